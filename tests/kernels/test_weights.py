"""Canonical weights against numpy, number by number; joining and reordering change no number."""

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from octavo.kernels.weights import (
    Float8Weight,
    GroupedWeight,
    SparseRows,
    TableWeight,
    Weight,
    dequantized,
    join,
    num_bytes,
    num_inputs,
    num_outputs,
    pack_codes,
    take_outputs,
    to_device,
    unpack_codes,
)

Array = npt.NDArray[np.float32]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def drawn(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def codes(outputs: int, inputs: int, bits: int, seed: int) -> Tensor:
    return torch.randint(0, 2**bits, (outputs, inputs), generator=drawn(seed))


def grouped(
    outputs: int = 6, inputs: int = 48, bits: int = 4, group: int = 16, *, zeros: bool = True, seed: int = 0
) -> GroupedWeight:
    groups = -(-inputs // group)
    return GroupedWeight(
        packed=pack_codes(codes(outputs, inputs, bits, seed), bits),
        bits=bits,
        scales=torch.randn(groups, outputs, generator=drawn(seed + 1)).half(),
        zeros=codes(groups, outputs, bits, seed + 2).to(torch.uint8) if zeros else None,
        group_size=group,
    )


def table(outputs: int = 5, inputs: int = 16, *, sparse: bool = True, seed: int = 0) -> TableWeight:
    rows = [0, 2, 2, 3, 3, 6][: outputs + 1]
    outliers = SparseRows(
        torch.tensor(rows, dtype=torch.int32),
        torch.tensor([1, 15, 7, 0, 2, 3], dtype=torch.int32)[: rows[-1]],
        torch.randn(rows[-1], generator=drawn(seed + 2)),
    )
    return TableWeight(
        packed=pack_codes(codes(outputs, inputs, 4, seed), 4),
        bits=4,
        table=torch.randn(outputs, 16, generator=drawn(seed + 1)).half(),
        sparse=outliers if sparse else None,
    )


def float8(outputs: int, inputs: int, block_n: int, block_k: int, input_scale: float | None = None) -> Float8Weight:
    numbers = torch.randn(outputs, inputs, generator=drawn(outputs)) * 100
    return Float8Weight(
        codes=numbers.to(torch.float8_e4m3fn),
        scales=torch.rand(-(-outputs // block_n), -(-inputs // block_k), generator=drawn(inputs)),
        input_scale=None if input_scale is None else torch.tensor(input_scale),
        activations="dynamic" if input_scale is None else "static",
        block_n=block_n,
        block_k=block_k,
    )


def code_at(packed: npt.NDArray[np.int32], bits: int, n: int, k: int) -> int:
    word = int(packed[n, k // (32 // bits)]) & 0xFFFFFFFF
    return (word >> (k % (32 // bits) * bits)) & ((1 << bits) - 1)


def float8_value(byte: int) -> float:
    sign, exponent, mantissa = -1.0 if byte & 0x80 else 1.0, (byte >> 3) & 15, byte & 7
    scale = 2.0 ** max(exponent - 7, -6)
    return sign * (mantissa / 8 + (exponent > 0)) * scale


def oracle(weight: Weight) -> Array:
    """Each number by its formula, with numpy's fp32 arithmetic and no help from torch."""
    assert not isinstance(weight, Tensor)
    result = np.zeros((num_outputs(weight), num_inputs(weight)), np.float32)
    for n, k in np.ndindex(*result.shape):
        if isinstance(weight, GroupedWeight):
            code, group = code_at(weight.packed.numpy(), weight.bits, n, k), k // weight.group_size
            zero = 2 ** (weight.bits - 1) if weight.zeros is None else int(weight.zeros.numpy()[group, n])
            column = k if weight.perm is None else int(weight.perm.numpy()[k])
            result[n, column] = np.float32(weight.scales.numpy()[group, n]) * np.float32(code - zero)
        elif isinstance(weight, TableWeight):
            result[n, k] = weight.table.numpy()[n, code_at(weight.packed.numpy(), weight.bits, n, k)]
        else:
            byte = int(weight.codes.view(torch.uint8).numpy()[n, k])
            scale = weight.scales.numpy()[n // weight.block_n, k // weight.block_k]
            result[n, k] = np.float32(float8_value(byte)) * scale
    if isinstance(weight, TableWeight) and weight.sparse is not None:
        start, columns = weight.sparse.row_start.numpy(), weight.sparse.columns.numpy()
        for n in range(result.shape[0]):
            for place in range(start[n], start[n + 1]):
                result[n, columns[place]] += np.float32(weight.sparse.values.numpy()[place])
    return result


def permuted(weight: GroupedWeight, seed: int = 3) -> GroupedWeight:
    perm = torch.randperm(num_inputs(weight), generator=drawn(seed)).to(torch.int32)
    return GroupedWeight(weight.packed, weight.bits, weight.scales, weight.zeros, weight.group_size, perm)


WEIGHTS: dict[str, Weight] = {
    "2 bits": grouped(bits=2, group=8),
    "4 bits": grouped(),
    "8 bits, last group smaller": grouped(bits=8, group=32),
    "symmetric": grouped(zeros=False),
    "symmetric 8": grouped(bits=8, zeros=False),
    "one group": grouped(group=48),
    "permuted": permuted(grouped()),
    "table": table(sparse=False),
    "table and outliers": table(),
    "float8 per tensor": float8(6, 20, 6, 20),
    "float8 per channel": float8(6, 20, 1, 20),
    "float8 blocks": float8(10, 20, 4, 8),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_the_numbers_are_those_of_the_formula(name: str) -> None:
    expected = torch.from_numpy(oracle(WEIGHTS[name]))
    for dtype in DTYPES:
        assert torch.equal(dequantized(WEIGHTS[name], dtype), expected.to(dtype)), dtype


def test_long_weights_are_dequantised_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = {name: dequantized(weight, torch.float32) for name, weight in WEIGHTS.items()}
    monkeypatch.setattr("octavo.kernels.weights._CHUNK_NUMBERS", 50)
    for name, weight in WEIGHTS.items():
        assert torch.equal(dequantized(weight, torch.float32), expected[name]), name


def test_a_plain_weight_is_rounded() -> None:
    plain = torch.randn(3, 4, generator=drawn(0))
    assert torch.equal(dequantized(plain, torch.bfloat16), plain.bfloat16())
    assert (num_outputs(plain), num_inputs(plain), num_bytes(plain)) == (3, 4, 48)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_packing_is_undone(bits: int) -> None:
    some = codes(5, 32, bits, 1)
    assert torch.equal(unpack_codes(pack_codes(some, bits), bits), some.to(torch.uint8))


def test_what_fills_no_word_is_refused() -> None:
    with pytest.raises(ValueError, match="12 inputs: expected a multiple of 8"):
        pack_codes(codes(2, 12, 4, 0), 4)


@pytest.mark.parametrize(
    "weights",
    [
        [grouped(seed=1), grouped(outputs=3, seed=2)],
        [grouped(seed=1, zeros=False), grouped(outputs=3, seed=2)],
        [grouped(seed=1, zeros=False), grouped(outputs=3, seed=2, zeros=False)],
        [permuted(grouped(seed=1)), permuted(grouped(seed=2))],
        [table(sparse=False), table(outputs=3, sparse=False, seed=1)],
        [table(), table(outputs=3, sparse=False, seed=1), table(outputs=4, seed=2)],
        [float8(6, 20, 6, 20), float8(4, 20, 4, 20)],
        [float8(6, 20, 6, 20), float8(4, 20, 1, 20)],
        [float8(8, 20, 4, 8), float8(6, 20, 4, 8)],
        [float8(6, 20, 4, 8), float8(8, 20, 4, 8)],
        [float8(6, 20, 6, 20, 0.5), float8(4, 20, 4, 20, 0.5)],
    ],
    ids=lambda weights: "+".join(type(weight).__name__ for weight in weights),
)
def test_joined_weights_are_the_stacked_numbers(weights: list[Weight]) -> None:
    joined = join(weights)
    assert joined is not None
    assert torch.equal(dequantized(joined, torch.float32), torch.cat([dequantized(w, torch.float32) for w in weights]))


def test_blocks_stay_blocks_when_they_are_joined_at_their_borders() -> None:
    joined = join([float8(8, 20, 4, 8), float8(6, 20, 4, 8)])
    assert isinstance(joined, Float8Weight)
    assert (joined.block_n, tuple(joined.scales.shape)) == (4, (4, 3))


@pytest.mark.parametrize(
    "weights",
    [
        [grouped(), grouped(inputs=32)],
        [grouped(), grouped(bits=8)],
        [grouped(), grouped(group=48)],
        [grouped(), permuted(grouped())],
        [permuted(grouped()), permuted(grouped(), seed=4)],
        [grouped(), table(inputs=48)],
        [grouped(), torch.zeros(2, 48)],
        [torch.zeros(2, 48), torch.zeros(2, 48).half()],
        [float8(6, 20, 6, 20, 0.5), float8(4, 20, 4, 20, 0.25)],
        [float8(6, 20, 6, 20, 0.5), float8(4, 20, 4, 20)],
        [float8(6, 20, 4, 8), float8(6, 20, 4, 5)],
    ],
)
def test_what_cannot_be_one_weight_is_not_joined(weights: list[Weight]) -> None:
    assert join(weights) is None


@pytest.mark.parametrize("name", WEIGHTS)
def test_outputs_are_taken_in_any_order(name: str) -> None:
    weight = WEIGHTS[name]
    index = torch.tensor([4, 0, 0, 2])
    taken = take_outputs(weight, index)
    assert torch.equal(dequantized(taken, torch.float32), dequantized(weight, torch.float32)[index])
    assert (num_outputs(taken), num_inputs(taken)) == (4, num_inputs(weight))


def test_bytes_are_those_of_all_parts() -> None:
    assert num_bytes(permuted(grouped())) == 6 * 48 // 2 + 3 * 6 * (2 + 1) + 48 * 4
    assert num_bytes(table()) == 5 * 16 // 2 + 5 * 16 * 2 + 6 * 4 + 6 * (4 + 4)
    assert num_bytes(float8(6, 20, 1, 20, 0.5)) == 120 + 6 * 4 + 4


def test_all_parts_move_to_a_device() -> None:
    meta = torch.device("meta")
    for weight in [*WEIGHTS.values(), float8(6, 20, 1, 20, 0.5), torch.zeros(2, 2)]:
        moved = to_device(weight, meta)
        tensors = [moved] if isinstance(moved, Tensor) else [*vars(moved).values()]
        tensors += [*vars(moved.sparse).values()] if isinstance(moved, TableWeight) and moved.sparse else []
        assert {part.device for part in tensors if isinstance(part, Tensor)} == {meta}
        assert num_bytes(moved) == num_bytes(weight)


def test_parts_that_do_not_fit_are_refused() -> None:
    good = grouped()
    with pytest.raises(ValueError, match=r"scales has shape \[2, 6\], expected \[3, 6\]"):
        GroupedWeight(good.packed, 4, good.scales[:2], good.zeros, 16)
    with pytest.raises(ValueError, match=r"perm has shape \[3\], expected \[48\]"):
        GroupedWeight(good.packed, 4, good.scales, good.zeros, 16, torch.zeros(3))
    with pytest.raises(ValueError, match=r"bits = 3: expected one of \(2, 4, 8\)"):
        GroupedWeight(good.packed, 3, good.scales, good.zeros, 16)
    with pytest.raises(ValueError, match=r"table has shape \[5, 8\], expected \[5, 16\]"):
        TableWeight(table().packed, 4, table().table[:, :8])
    with pytest.raises(ValueError, match=r"scales has shape \[6, 1\], expected \[3, 3\]"):
        Float8Weight(float8(6, 20, 1, 20).codes, torch.ones(6, 1), None, "none", 2, 8)

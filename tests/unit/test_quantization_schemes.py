"""Each format of quantised layers: its numbers are those that numpy reads, and what contradicts itself is named."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.kernels.weights import Float8Weight, GroupedWeight, TableWeight, Weight, dequantized
from octavo.worker.errors import ModelConfigError, WeightsError
from octavo.worker.models.targets import Placement
from octavo.worker.quantization.awq import AWQScheme
from octavo.worker.quantization.compressed import IntegerScheme
from octavo.worker.quantization.fp8 import Float8Scheme, quantized_float8
from octavo.worker.quantization.gptq import GPTQScheme
from octavo.worker.quantization.layers import QuantizedOnLoad
from octavo.worker.quantization.scheme import LinearScheme, LinearShape, Projection, StoredLinear
from octavo.worker.quantization.squeezellm import SqueezeLLMScheme
from tests.support import quantized
from tests.support.quantized import Draw, described

CPU = Placement(torch.float32, torch.device("cpu"))
INPUTS = 128
SIZES = {"layers.0.q": 64, "layers.0.k": 32}

GPTQ = GPTQScheme(4, 16, False, 1)
INTEGER = IntegerScheme(4, True, "group", 16, True)
FORMATS: dict[str, tuple[LinearScheme, Draw]] = {
    "gptq 4": (GPTQ, quantized.gptq()),
    "gptq 2": (replace(GPTQ, bits=2), quantized.gptq(2)),
    "gptq 3": (replace(GPTQ, bits=3, group_size=32), quantized.gptq(3, 32)),
    "gptq 3 symmetric": (replace(GPTQ, bits=3, group_size=32), quantized.gptq(3, 32, symmetric=True)),
    "gptq 8": (replace(GPTQ, bits=8), quantized.gptq(8)),
    "gptq one group": (replace(GPTQ, group_size=None), quantized.gptq(group_size=-1)),
    "gptq last group smaller": (replace(GPTQ, group_size=48), quantized.gptq(group_size=48)),
    "gptq symmetric": (GPTQ, quantized.gptq(symmetric=True)),
    "gptq v2": (replace(GPTQ, zero_offset=0), quantized.gptq(stored_minus=0)),
    "gptq 3 v2": (replace(GPTQ, bits=3, group_size=32, zero_offset=0), quantized.gptq(3, 32, stored_minus=0)),
    "gptq desc_act": (replace(GPTQ, desc_act=True), quantized.gptq(desc_act=True)),
    "gptq 3 desc_act": (replace(GPTQ, bits=3, group_size=32, desc_act=True), quantized.gptq(3, 32, desc_act=True)),
    "gptq without g_idx": (GPTQ, quantized.gptq(g_idx=False)),
    "awq gemm": (AWQScheme("gemm", 16), quantized.awq_gemm()),
    "awq gemm one group": (AWQScheme("gemm", None), quantized.awq_gemm(INPUTS)),
    "awq gemv 64": (AWQScheme("gemv", 64), quantized.awq_gemv(64)),
    "awq gemv 32": (AWQScheme("gemv", 32), quantized.awq_gemv(32)),
    "awq gemv one group": (AWQScheme("gemv", None), quantized.awq_gemv(INPUTS)),
    "squeezellm 4": (SqueezeLLMScheme(4), quantized.squeezellm(4)),
    "squeezellm 3": (SqueezeLLMScheme(3), quantized.squeezellm(3)),
    "squeezellm 4 sparse": (SqueezeLLMScheme(4), quantized.squeezellm(4, sparse=True)),
    "squeezellm 3 sparse and rows": (SqueezeLLMScheme(3), quantized.squeezellm(3, sparse=True, full_rows=10)),
    "squeezellm rows": (SqueezeLLMScheme(4), quantized.squeezellm(4, full_rows=3)),
    "fp8 tensor": (Float8Scheme(None, "dynamic"), quantized.fp8()),
    "fp8 static": (Float8Scheme(None, "static"), quantized.fp8(static=True)),
    "fp8 channel": (Float8Scheme(None, "dynamic"), quantized.fp8("channel")),
    "fp8 channel without a second dimension": (Float8Scheme(None, "none"), quantized.fp8("vector")),
    "fp8 block": (
        Float8Scheme((16, 32), "dynamic", "weight_scale_inv"),
        quantized.fp8("block", name="weight_scale_inv"),
    ),
    "fp8 tensor, other name": (Float8Scheme(None, "dynamic"), quantized.fp8(name="weight_scale_inv")),
    "fp8 block that fits nothing": (Float8Scheme((24, 48), "dynamic"), quantized.fp8("block", block=(24, 48))),
    "compressed group": (INTEGER, quantized.compressed_integers()),
    "compressed group zeros": (replace(INTEGER, symmetric=False), quantized.compressed_integers(symmetric=False)),
    "compressed 8 zeros": (
        replace(INTEGER, bits=8, symmetric=False),
        quantized.compressed_integers(8, symmetric=False),
    ),
    "compressed g_idx": (replace(INTEGER, ordered=True), quantized.compressed_integers(ordered=True)),
    "compressed channel": (
        IntegerScheme(8, True, "channel", None, True),
        quantized.compressed_integers(8, "channel"),
    ),
    "compressed channel zeros": (
        IntegerScheme(4, True, "channel", None, False),
        quantized.compressed_integers(4, "channel", symmetric=False),
    ),
    "compressed tensor": (
        IntegerScheme(4, True, "tensor", None, False),
        quantized.compressed_integers(4, "tensor", symmetric=False),
    ),
    "integers channel": (
        IntegerScheme(8, False, "channel", None, True),
        quantized.compressed_integers(8, "channel", packed=False),
    ),
    "integers channel zeros": (
        IntegerScheme(8, False, "channel", None, False),
        quantized.compressed_integers(8, "channel", packed=False, symmetric=False),
    ),
    "integers tensor": (
        IntegerScheme(8, False, "tensor", None, True),
        quantized.compressed_integers(8, "tensor", packed=False),
    ),
    "integers group of 4 bits": (
        IntegerScheme(4, False, "group", 16, False),
        quantized.compressed_integers(packed=False, symmetric=False),
    ),
}


def draw(name: str, seed: int = 0) -> tuple[LinearScheme, dict[str, Tensor], dict[str, np.ndarray]]:
    """Return a scheme that knows the tensors, the tensors, and the numbers of each projection."""
    scheme, draw_one = FORMATS[name]
    random = np.random.default_rng(seed)
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, np.ndarray] = {}
    for prefix, outputs in SIZES.items():
        drawn = draw_one(outputs, INPUTS, random)
        tensors |= {f"{prefix}.{part}": tensor for part, tensor in drawn.tensors.items()}
        numbers[prefix] = drawn.numbers
    return replace(scheme, tensors=described(tensors)), tensors, numbers  # type: ignore[type-var]


def whole(prefix: str) -> Projection:
    return Projection(prefix, SIZES[prefix], slice(0, SIZES[prefix]))


def fill(stored: StoredLinear, tensors: dict[str, Tensor]) -> list[Weight]:
    """Do what the loader does: every tensor has a target of its shape and dtype, and every target a tensor."""
    assert set(stored.targets) == set(tensors)
    for name, target in stored.targets.items():
        assert target.full_shape == tuple(tensors[name].shape), name
        assert target.view.dtype == tensors[name].dtype, name
        target.view.copy_(target.take(tensors[name]))
    return stored.finish()


def read(
    scheme: LinearScheme, tensors: dict[str, Tensor], *projections: Projection, part: slice | None = None
) -> Tensor:
    names = tuple(f"{projection.prefix}." for projection in projections)
    shape = LinearShape(projections, INPUTS, part or slice(0, INPUTS))
    mine = {name: tensor for name, tensor in tensors.items() if name.startswith(names)}
    return torch.cat([dequantized(weight, torch.float32) for weight in fill(scheme.make(CPU, shape), mine)])


def assert_numbers(actual: Tensor, expected: np.ndarray) -> None:
    assert np.array_equal(actual.numpy(), expected)


@pytest.mark.parametrize("name", FORMATS)
def test_the_numbers_are_those_that_numpy_reads(name: str) -> None:
    scheme, tensors, numbers = draw(name)
    for prefix in SIZES:
        assert_numbers(read(scheme, tensors, whole(prefix)), numbers[prefix])
    both = read(scheme, tensors, *map(whole, SIZES))
    assert_numbers(both, np.concatenate([numbers[prefix] for prefix in SIZES]))


@pytest.mark.parametrize("name", FORMATS)
def test_a_rank_takes_its_outputs(name: str) -> None:
    scheme, tensors, numbers = draw(name, seed=1)
    part = Projection("layers.0.q", 64, slice(20, 41))  # cuts words and blocks
    assert_numbers(read(scheme, tensors, part), numbers["layers.0.q"][20:41])
    order = torch.tensor([63, 0, 5, 5, 17])
    taken = Projection("layers.0.q", 64, slice(0, 5), order)
    assert_numbers(read(scheme, tensors, taken), numbers["layers.0.q"][order.numpy()])


@pytest.mark.parametrize("name", FORMATS)
def test_a_rank_takes_its_inputs_where_nothing_is_cut(name: str) -> None:
    scheme, tensors, numbers = draw(name, seed=2)
    half = slice(64, 128)
    if any(word in name for word in ("desc_act", "g_idx")) and name != "gptq without g_idx":
        with pytest.raises((ModelConfigError, WeightsError), match="another order"):
            read(scheme, tensors, whole("layers.0.q"), part=half)
    elif any(word in name for word in ("last group smaller", "fits nothing")):
        with pytest.raises(ModelConfigError, match="inputs 64 to 128 of 128 cut units of 48"):
            read(scheme, tensors, whole("layers.0.q"), part=half)
    else:
        assert_numbers(read(scheme, tensors, whole("layers.0.q"), part=half), numbers["layers.0.q"][:, 64:])


def weights_of(name: str, *prefixes: str) -> list[Weight]:
    scheme, tensors, _ = draw(name)
    shape = LinearShape(tuple(map(whole, prefixes)), INPUTS, slice(0, INPUTS))
    mine = {key: tensor for key, tensor in tensors.items() if key.startswith(prefixes)}
    return fill(scheme.make(CPU, shape), mine)


def test_projections_become_one_weight_unless_their_inputs_are_ordered_differently() -> None:
    for name in FORMATS:
        expected = 2 if name.endswith(("desc_act", "g_idx")) and name != "gptq without g_idx" else 1
        assert len(weights_of(name, *SIZES)) == expected, name


def test_canonical_forms() -> None:
    (symmetric,) = weights_of("gptq symmetric", "layers.0.q")
    assert isinstance(symmetric, GroupedWeight)
    assert (symmetric.zeros, symmetric.perm, symmetric.bits) == (None, None, 4)
    assert symmetric.scales.dtype is torch.float16
    (three,) = weights_of("gptq 3 symmetric", "layers.0.q")
    assert isinstance(three, GroupedWeight)
    assert three.bits == 4
    assert three.zeros is not None
    assert bool((three.zeros == 4).all())
    (ordered,) = weights_of("gptq desc_act", "layers.0.q")
    assert isinstance(ordered, GroupedWeight)
    assert ordered.perm is not None
    table = weights_of("squeezellm 3 sparse and rows", *SIZES)[0]
    assert isinstance(table, TableWeight)
    assert (table.bits, tuple(table.table.shape)) == (4, (96, 16))
    (static,) = weights_of("fp8 static", *SIZES)
    assert isinstance(static, Float8Weight)
    assert (static.activations, static.input_scale) == ("static", torch.tensor(0.5))
    assert (static.block_n, static.block_k) == (1, INPUTS)
    (block,) = weights_of("fp8 block", *SIZES)
    assert isinstance(block, Float8Weight)
    assert (block.block_n, block.block_k, tuple(block.scales.shape)) == (16, 32, (6, 4))


def test_different_static_input_scales_stay_apart() -> None:
    scheme, tensors, _ = draw("fp8 static")
    tensors["layers.0.k.input_scale"] = torch.tensor(0.25)
    shape = LinearShape(tuple(map(whole, SIZES)), INPUTS, slice(0, INPUTS))
    assert len(fill(scheme.make(CPU, shape), tensors)) == 2


def test_scales_keep_their_dtype() -> None:
    scheme, tensors, _ = draw("gptq 4")
    tensors = {k: t.bfloat16() if k.endswith("scales") else t for k, t in tensors.items()}
    shape = LinearShape((whole("layers.0.q"),), INPUTS, slice(0, INPUTS))
    mine = {k: t for k, t in tensors.items() if "q." in k}
    (weight,) = fill(replace(scheme, tensors=described(tensors)).make(CPU, shape), mine)  # type: ignore[type-var]
    assert isinstance(weight, GroupedWeight)
    assert weight.scales.dtype is torch.bfloat16


def broken(name: str, tensor: str, change: Tensor) -> None:
    scheme, tensors, _ = draw(name)
    tensors[f"layers.0.q.{tensor}"] = change
    read(scheme, tensors, whole("layers.0.q"))


def test_what_contradicts_itself_is_named() -> None:
    with pytest.raises(WeightsError, match=r"layers\.0\.q\.g_idx: group 0 has 17 inputs, expected 16 in each of 8"):
        broken("gptq desc_act", "g_idx", torch.tensor([0, *(k // 16 for k in range(127))], dtype=torch.int32))
    with pytest.raises(WeightsError, match=r"layers\.0\.q\.g_idx: group "):
        broken("gptq desc_act", "g_idx", torch.arange(INPUTS, dtype=torch.int32) // 16 + 1)
    with pytest.raises(WeightsError, match=r"layers\.0\.q\.weight_shape: says \[64, 127\], expected \[64, 128\]"):
        broken("compressed group", "weight_shape", torch.tensor([64, 127]))
    _, tensors, _ = draw("squeezellm 4 sparse")
    rows, columns = tensors["layers.0.q.rows"], tensors["layers.0.q.cols"]
    with pytest.raises(WeightsError, match=r"layers\.0\.q\.rows: expected to rise from 0 to \d+"):
        broken("squeezellm 4 sparse", "rows", rows.flip(0))
    with pytest.raises(WeightsError, match=r"layers\.0\.q\.cols: holds 128, expected 0 to 127"):
        broken("squeezellm 4 sparse", "cols", torch.full_like(columns, 128))
    with pytest.raises(WeightsError, match=r"layers\.0\.q\.full_row_indices: holds -1, expected 0 to 63"):
        broken("squeezellm rows", "full_row_indices", torch.tensor([0, -1, 3], dtype=torch.int32))


@pytest.mark.parametrize(
    ("scheme", "inputs", "outputs", "message"),
    [
        (GPTQ, 100, 64, "x has 100 inputs: 4-bit GPTQ stores multiples of 8"),
        (replace(GPTQ, bits=3), 128, 40, "x has 40 outputs: 3-bit GPTQ stores multiples of 32"),
        (AWQScheme("gemm", 48), 128, 64, "x has 128 inputs: AWQ with groups of that size stores multiples of 48"),
        (AWQScheme("gemv", 64), 128, 60, "x has 60 outputs: AWQ stores multiples of 8"),
        (SqueezeLLMScheme(4), 48, 64, "x has 48 inputs: SqueezeLLM stores multiples of 32"),
        (INTEGER, 100, 64, "x has 100 inputs: 4-bit compressed-tensors stores multiples of 8"),
    ],
)
def test_sizes_that_a_format_cannot_store_are_refused(
    scheme: LinearScheme, inputs: int, outputs: int, message: str
) -> None:
    with pytest.raises(ModelConfigError, match=message):
        scheme.make(CPU, LinearShape((Projection("x", outputs, slice(0, outputs)),), inputs, slice(0, inputs)))


def test_random_weights_need_no_checkpoint() -> None:
    for scheme, _ in FORMATS.values():
        stored = scheme.make(CPU, LinearShape((whole("layers.0.q"),), INPUTS, slice(0, INPUTS)))
        for target in stored.targets.values():
            if target.view.dim() != 1 or target.view.is_floating_point():
                target.view.zero_()
        (weight,) = stored.finish()
        assert dequantized(weight, torch.float32).shape == (64, INPUTS)


def test_nothing_is_read_on_the_meta_device() -> None:
    meta = Placement(torch.float32, torch.device("meta"))
    for scheme, _ in FORMATS.values():
        shape = LinearShape(tuple(map(whole, SIZES)), INPUTS, slice(0, INPUTS))
        assert all(target.view.is_meta for target in scheme.make(meta, shape).targets.values())


def test_plain_weights_are_quantised_on_load() -> None:
    weight = torch.randn(64, INPUTS, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 64)[:, None]
    weight[7] = 0.0
    layers = QuantizedOnLoad(quantized_float8)
    shape = LinearShape((whole("layers.0.q"),), INPUTS, slice(0, INPUTS))
    (stored,) = fill(layers.scheme_of("model.layers.0.q").make(CPU, shape), {"layers.0.q.weight": weight})
    assert isinstance(stored, Float8Weight)
    assert (stored.block_n, stored.block_k, stored.activations) == (1, INPUTS, "dynamic")
    numbers = dequantized(stored, torch.float32)
    # Three bits of mantissa: half of a step of an eighth; smaller numbers have the step of the smallest exponent.
    bound = (weight.abs() / 16).maximum(weight.abs().amax(1, keepdim=True) / 448 * 2**-10)
    assert bool(((numbers - weight).abs() <= bound * 1.001).all())
    assert numbers[7].count_nonzero() == 0
    assert torch.allclose(numbers.abs().amax(1), weight.abs().amax(1), rtol=1e-6)
    (head,) = layers.scheme_of("lm_head").make(CPU, shape).finish()
    assert isinstance(head, Tensor)

"""Layers in the formats of quantised checkpoints, drawn at random, and what numpy makes of them.

Each function returns the tensors of one linear layer as the format has them, and the matrix [N, K] in fp32 that they
stand for: read with numpy's own bit operations, one format at a time, from the formats' descriptions.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.kernels.ops import get_ops
from octavo.worker.models.config import parse_model_config
from octavo.worker.models.decoder import Decoder
from octavo.worker.models.targets import Placement, ShardSpec
from octavo.worker.quantization.layers import in_block
from octavo.worker.quantization.plain import Unquantized
from octavo.worker.quantization.scheme import LinearScheme
from tests.support.tiny_models import TINY_LLAMA, TINY_QWEN2_MOE, random_tensors

Array = npt.NDArray[Any]
_DTYPES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int8: "I8",
    torch.int32: "I32",
    torch.int64: "I64",
}


class StoredTensor(NamedTuple):
    """What a checkpoint says of a tensor."""

    shape: tuple[int, ...]
    dtype: str


class Drawn(NamedTuple):
    """A layer: its tensors without prefix, and the numbers they stand for."""

    tensors: dict[str, Tensor]
    numbers: Array  # [N, K] fp32


Draw = Callable[[int, int, np.random.Generator], Drawn]
"""Draws a layer of N outputs and K inputs."""


def described(tensors: Mapping[str, Tensor]) -> dict[str, StoredTensor]:
    """Return what a checkpoint with these tensors says of them."""
    return {name: StoredTensor(tuple(t.shape), _DTYPES[t.dtype]) for name, t in tensors.items()}


def gptq(
    bits: int = 4,
    group_size: int = 16,
    *,
    desc_act: bool = False,
    stored_minus: int = 1,
    symmetric: bool = False,
    g_idx: bool = True,
) -> Draw:
    """Codes packed along the inputs, zero points along the outputs and stored minus one (version 2: as they are)."""

    def draw(outputs: int, inputs: int, random: np.random.Generator) -> Drawn:
        size = inputs if group_size == -1 else group_size
        groups = -(-inputs // size)
        qweight = _words(random, inputs * bits // 32, outputs)
        qzeros = _words(random, groups, outputs * bits // 32)
        if symmetric:
            middle = [int(b) for b in f"{2 ** (bits - 1) - stored_minus:0{bits}b}"[::-1]]
            stream = np.tile(np.array(middle, np.uint8), (groups, outputs))
            qzeros = np.packbits(stream, axis=1, bitorder="little").view("<i4")
        scales = _scales(random, groups, outputs)
        group = np.arange(inputs) // size
        if desc_act:
            group = random.permutation(group)
        numbers = gptq_numbers(qweight, qzeros, scales, group, bits, stored_minus)
        tensors = {
            "qweight": torch.from_numpy(qweight),
            "qzeros": torch.from_numpy(np.ascontiguousarray(qzeros)),
            "scales": torch.from_numpy(scales),
        }
        if g_idx:
            tensors["g_idx"] = torch.from_numpy(group.astype(np.int32))
        return Drawn(tensors, numbers)

    return draw


def awq_gemm(group_size: int = 16) -> Draw:
    """Eight outputs a word; from its lowest nibble on they are 0, 2, 4, 6, 1, 3, 5, 7."""

    def draw(outputs: int, inputs: int, random: np.random.Generator) -> Drawn:
        groups = inputs // group_size
        qweight, qzeros = _words(random, inputs, outputs // 8), _words(random, groups, outputs // 8)
        scales = _scales(random, groups, outputs)
        tensors = {"qweight": qweight, "qzeros": qzeros, "scales": scales}
        numbers = awq_numbers(qweight, qzeros, scales)
        return Drawn({name: torch.from_numpy(array) for name, array in tensors.items()}, numbers)

    return draw


def awq_gemv(group_size: int = 64) -> Draw:
    """Codes in order along the inputs; scales and zero points along the groups, padded to 2 words for groups of 64."""

    def draw(outputs: int, inputs: int, random: np.random.Generator) -> Drawn:
        words = {32: 4, 64: 2, 128: 1}[group_size]  # enough for up to 8 groups
        qweight, qzeros = _words(random, outputs, inputs // 8), _words(random, outputs, words)
        scales = _scales(random, outputs, words * 8)
        codes, zeros = _stream(qweight, 4), _stream(qzeros, 4)
        group = np.arange(inputs) // group_size
        numbers = scales.astype(np.float32)[:, group] * (codes - zeros[:, group]).astype(np.float32)
        tensors = {"qweight": qweight, "qzeros": qzeros, "scales": scales}
        return Drawn({name: torch.from_numpy(array) for name, array in tensors.items()}, numbers)

    return draw


def squeezellm(bits: int = 4, *, sparse: bool = False, full_rows: int = 0) -> Draw:
    """A table for each output; outliers in rows, and whole rows of which some may come twice."""

    def draw(outputs: int, inputs: int, random: np.random.Generator) -> Drawn:
        qweight = _words(random, inputs * bits // 32, outputs)
        table = random.standard_normal((outputs, 2**bits)).astype(np.float16)
        codes = _stream(np.ascontiguousarray(qweight.T), bits)
        numbers = np.take_along_axis(table.astype(np.float32), codes, axis=1)
        tensors: dict[str, Array] = {"qweight": qweight, "lookup_table": table}
        added = np.zeros_like(numbers)
        if sparse:
            places = random.random((outputs, inputs)) < 0.05
            values = random.standard_normal(int(places.sum())).astype(np.float32)
            added[places] = values  # in the order of rows, then columns
            tensors["rows"] = np.concatenate([[0], places.sum(axis=1).cumsum()]).astype(np.int32)
            tensors["cols"] = places.nonzero()[1].astype(np.int32)
            tensors["vals"] = values
            tensors["startrows"] = np.zeros(7, np.int32)
        if full_rows:
            index = random.integers(0, outputs, full_rows)
            full = random.standard_normal((inputs, full_rows)).astype(np.float32)
            for column, row in enumerate(index):
                added[row] += full[:, column]
            tensors["full_rows"], tensors["full_row_indices"] = full, index.astype(np.int32)
        return Drawn({name: torch.from_numpy(array) for name, array in tensors.items()}, numbers + added)

    return draw


def fp8(
    scales: str = "tensor", *, block: tuple[int, int] = (16, 32), static: bool = False, name: str = "weight_scale"
) -> Draw:
    """Numbers of a sign, four bits of exponent and three of mantissa, times scales."""

    def draw(outputs: int, inputs: int, random: np.random.Generator) -> Drawn:
        codes = random.integers(0, 256, (outputs, inputs), np.uint8)
        codes[(codes & 127) == 127] = 0  # these are no numbers
        sign = np.where(codes >> 7, -1.0, 1.0)
        exponent, mantissa = (codes >> 3 & 15).astype(int), codes & 7
        values = sign * np.where(exponent, 1 + mantissa / 8, mantissa / 8) * 2.0 ** (np.maximum(exponent, 1) - 7)
        shape = {"tensor": (), "vector": (outputs,), "channel": (outputs, 1)}.get(
            scales, _blocks((outputs, inputs), block)
        )
        scale = np.asarray(random.random(shape, np.float32) * 0.01 + 0.001, np.float32)
        if scales == "block":
            spread = np.repeat(np.repeat(scale, block[0], 0)[:outputs], block[1], 1)[:, :inputs]
        else:
            spread = scale.reshape(-1, 1)
        tensors = {
            "weight": torch.from_numpy(codes).view(torch.float8_e4m3fn),
            name: torch.from_numpy(scale.reshape(shape)),
        }
        if static:
            tensors["input_scale"] = torch.tensor(0.5)
        return Drawn(tensors, values.astype(np.float32) * spread)

    return draw


def compressed_integers(
    bits: int = 4, strategy: str = "group", group_size: int = 16, *, packed: bool = True, symmetric: bool = True,
    ordered: bool = False,
) -> Draw:  # fmt: skip
    """Signed integers, raised by half of their range where they are packed; along the outputs where they are zeros."""

    def draw(outputs: int, inputs: int, random: np.random.Generator) -> Drawn:
        half = 2 ** (bits - 1)
        size = group_size if strategy == "group" else inputs
        groups = -(-inputs // size)
        integers = random.integers(-half, half, (outputs, inputs))
        zeros = np.zeros((outputs, groups), int) if symmetric else random.integers(-half, half, (outputs, groups))
        scales = torch.from_numpy(_scales(random, outputs, groups).astype(np.float32)).bfloat16()
        if strategy == "tensor":
            scales, zeros = scales[:1, :1], zeros[:1, :1]
        group = np.arange(inputs) // size
        tensors = {"weight_scale": scales.reshape(1) if strategy == "tensor" else scales}
        if ordered:
            group = random.permutation(group)
            tensors["weight_g_idx"] = torch.from_numpy(group.astype(np.int32))
        if packed:
            tensors["weight_packed"] = torch.from_numpy(_packed(integers + half, bits))
            tensors["weight_shape"] = torch.tensor([outputs, inputs])
        else:
            tensors["weight"] = torch.from_numpy(integers.astype(np.int8))
        if not symmetric and strategy == "tensor":
            tensors["weight_zero_point"] = torch.tensor([int(zeros[0, 0])], dtype=torch.int8)
        elif not symmetric and packed:
            tensors["weight_zero_point"] = torch.from_numpy(np.ascontiguousarray(_packed(zeros.T + half, bits).T))
        elif not symmetric:
            tensors["weight_zero_point"] = torch.from_numpy(zeros.astype(np.int8))
        wide = scales.float().numpy()
        numbers = wide[:, group] * (integers - zeros[:, group]).astype(np.float32)
        return Drawn(tensors, numbers)

    return draw


def gptq_numbers(
    qweight: Array, qzeros: Array, scales: Array, group: Array, bits: int = 4, stored_minus: int = 1
) -> Array:
    """Return the matrix [N, K] in fp32 of a layer in GPTQ's layout; group [K] is that of each input."""
    codes = _stream(np.ascontiguousarray(qweight.T), bits)
    zeros = (_stream(qzeros, bits) + stored_minus) % 2**bits
    numbers: Array = scales.astype(np.float32).T[:, group] * (codes - zeros.T[:, group]).astype(np.float32)
    return numbers


def awq_numbers(qweight: Array, qzeros: Array, scales: Array) -> Array:
    """Return the matrix [N, K] in fp32 of a layer in AWQ's gemm layout."""
    codes, zeros = _interleaved(qweight), _interleaved(qzeros)
    group = np.arange(len(codes)) // (len(codes) // len(zeros))
    numbers = scales.astype(np.float32)[group] * (codes - zeros[group]).astype(np.float32)
    return np.ascontiguousarray(numbers.T)


def _words(random: np.random.Generator, rows: int, columns: int) -> npt.NDArray[np.int32]:
    return random.integers(-(2**31), 2**31, (rows, columns)).astype(np.int32)


def _scales(random: np.random.Generator, rows: int, columns: int) -> npt.NDArray[np.float16]:
    return (random.random((rows, columns)) * 0.02 + 0.001).astype(np.float16)


def _blocks(shape: tuple[int, int], block: tuple[int, int]) -> tuple[int, int]:
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def _stream(words: Array, bits: int) -> Array:
    """[R, W] words -> [R, W * 32 / bits] codes that lie bit after bit."""
    lines = np.unpackbits(words.astype("<i4").view(np.uint8), axis=1, bitorder="little")
    result: Array = lines.reshape(len(words), -1, bits).astype(int) @ (1 << np.arange(bits))
    return result


def _packed(codes: Array, bits: int) -> npt.NDArray[np.int32]:
    """[R, C] codes -> words that hold them bit after bit, the last one filled up."""
    lines = (codes[:, :, None] >> np.arange(bits) & 1).astype(np.uint8).reshape(len(codes), -1)
    lines = np.pad(lines, ((0, 0), (0, -lines.shape[1] % 32)))
    return np.packbits(lines, axis=1, bitorder="little").view("<i4").astype(np.int32)


def _interleaved(words: Array) -> Array:
    """[R, W] words of AWQ's gemm layout -> [R, 8 W] codes."""
    nibbles = _stream(words, 4).reshape(len(words), -1, 8)
    codes = np.empty_like(nibbles)
    codes[:, :, [0, 2, 4, 6, 1, 3, 5, 7]] = nibbles
    return codes.reshape(len(words), -1)


WIDE_LLAMA: dict[str, Any] = TINY_LLAMA | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
"""As TINY_LLAMA, of sizes that every format can store."""
WIDE_QWEN2_MOE: dict[str, Any] = TINY_QWEN2_MOE | {
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
}
"""The same of TINY_QWEN2_MOE."""


def quantized_model(
    config: dict[str, Any], draw: Draw, seed: int = 0, only: str = ""
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Draw a model whose layers are quantised; see `quantized_tensors`."""
    return quantized_tensors(config, random_tensors(config, seed), draw, seed, only)


def quantized_tensors(
    config: dict[str, Any], plain: dict[str, Tensor], draw: Draw, seed: int = 0, only: str = ""
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Draw the linear layers of a model anew, quantised.

    Args:
        config: config.json of any architecture.
        plain: a plain checkpoint.
        draw: of a layer.
        seed: of the numbers.
        only: what the names of quantised layers hold.

    Returns:
        The checkpoint's tensors, and those of a plain checkpoint of the same numbers.
    """
    description = parse_model_config(config)
    asked = _Asked()
    Decoder(description, get_ops("reference"), Placement(torch.float32, torch.device("meta")), ShardSpec(), 2, asked)
    random = np.random.default_rng(seed)
    stored, plain = dict(plain), dict(plain)
    for name in sorted(plain):
        prefix = name.removesuffix(".weight")
        if description.names.full(prefix) not in asked.prefixes or only not in name:
            continue
        shape = plain[name].shape[::-1] if description.transposed else plain[name].shape
        drawn = draw(shape[0], shape[1], random)
        del stored[name]
        stored |= {f"{prefix}.{part}": tensor for part, tensor in drawn.tensors.items()}
        numbers = torch.from_numpy(drawn.numbers)
        plain[name] = numbers.t().contiguous() if description.transposed else numbers
    return stored, plain


class _Asked(Unquantized):
    """Notes which layers of blocks a decoder asks for."""

    def __init__(self) -> None:
        self.prefixes: set[str] = set()

    def scheme_of(self, prefix: str) -> LinearScheme:
        if in_block(prefix):
            self.prefixes.add(prefix)
        return super().scheme_of(prefix)

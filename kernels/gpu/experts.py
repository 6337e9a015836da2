"""Mixture of experts: products of each expert's weights with its own tokens, all experts in one launch.

Pairs of a token and one of its experts are sorted by expert on the device; the grid follows from shapes alone, so a
captured graph runs whatever the router chooses. Only weights of experts that have tokens are read. Each pair's result is
written to a place of its own, and a token's are then added up in the order of its experts: no result depends on timing.
"""

import functools
import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from octavo.kernels.activations import Activation
from octavo.kernels.experts import stacked
from octavo.kernels.gpu.activation import activated
from octavo.kernels.gpu.launch import overlaps, wait_for_inputs
from octavo.kernels.gpu.matmul import has_descriptors
from octavo.kernels.gpu.routing import sort_pairs
from octavo.kernels.weights import Weight

logger = logging.getLogger(__name__)

_BLOCK = 1024
_GROUP = tl.constexpr(16)
"""Tiles of tokens that share weights while these are in the L2 cache."""


class Tile(NamedTuple):
    """What a program computes, and how: of gated layers, as many outputs of the gate as of the other half."""

    tokens: int
    rows: int  # of weights
    depth: int  # of K, a stage
    num_warps: int
    num_stages: int


class Shape(NamedTuple):
    """Tiles of both layers."""

    up: Tile
    down: Tile


@triton.jit
def _find(
    starts,
    tile,
    num_experts,
    TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """Return the expert that a tile of tokens belongs to (from num_experts on: none), its first pair and the end."""
    expert = tl.arange(0, EXPERTS)
    inside = expert < num_experts
    begin = tl.load(starts + expert, inside, other=0)
    end = tl.load(starts + 1 + expert, inside, other=0)
    tiles = (end - begin + TOKENS - 1) // TOKENS
    upto = tl.cumsum(tiles)
    mine = tl.sum((upto <= tile).to(tl.int32))
    is_mine = expert == mine
    first = tl.sum(tl.where(is_mine, begin + (tile - upto + tiles) * TOKENS, 0))
    return mine, first, tl.sum(tl.where(is_mine, end, 0))


@triton.jit
def _columns(place, inside, EVEN: tl.constexpr):
    """Load lines [n, DEPTH], zeros where they have ended; EVEN: they never do."""
    if EVEN:
        return tl.load(place)
    else:
        return tl.load(place, inside[None, :], other=0.0)


@triton.jit
def _store(total, out, row, inside, output, num_outputs, ACTIVATION: tl.constexpr, OUTPUTS: tl.constexpr):
    """Store fp32 sums [rows of weights, tokens] at lines of out; gate and multiply first where there is an activation."""
    dtype: tl.constexpr = out.dtype.element_ty
    if ACTIVATION != "":
        pair = tl.permute(tl.reshape(total, [2, OUTPUTS, total.shape[1]]), (1, 2, 0))
        gate, up = tl.split(pair)
        gate = activated(gate.to(dtype).to(tl.float32), ACTIVATION).to(dtype).to(tl.float32)
        total = gate * up.to(dtype).to(tl.float32)
    place = out + row.to(tl.int64)[None, :] * num_outputs + output[:, None]
    tl.store(place, total.to(dtype), inside[None, :] & (output < num_outputs)[:, None])


@triton.jit(do_not_specialize=["num_tiles"])
def _experts_kernel(
    lines,
    weights,
    pairs,
    starts,
    out,
    num_tiles,
    num_experts,
    num_outputs,
    SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ONE_TOKEN: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    EXPERTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One tile a program: TOKENS pairs of one expert and OUTPUTS of its outputs, all of K = SIZE.

    With an activation it is the way up: lines are tokens [T, K], weights [E, 2I, K], out [pairs in sorted order, I].
    Without, the way down: lines are what that wrote [pairs in sorted order, K], weights [E, H, K], out [pairs, H].
    With ONE_TOKEN nothing is sorted: `pairs` holds its experts' ids. Weights are a tensor descriptor of blocks
    [gate and up, OUTPUTS, DEPTH], or a pointer. They are the left operand: their rows fill the matrix unit.
    """
    WAYS: tl.constexpr = 2 if ACTIVATION != "" else 1
    ROWS: tl.constexpr = WAYS * OUTPUTS
    EVEN: tl.constexpr = SIZE % DEPTH == 0
    out_tiles = tl.cdiv(num_outputs, OUTPUTS)
    first_tile = tl.program_id(0) // (out_tiles * _GROUP) * _GROUP
    in_group = tl.minimum(num_tiles - first_tile, _GROUP)
    rest = tl.program_id(0) % (out_tiles * _GROUP)
    tile, first_output = first_tile + rest % in_group, rest // in_group * OUTPUTS
    wait_for_inputs(OVERLAP)
    if ONE_TOKEN:
        expert, first, end = tl.load(pairs + tile), tile, tile + 1
    else:
        expert, first, end = _find(starts, tile, num_experts, TOKENS, EXPERTS)
    if expert < num_experts:
        lane, depth = tl.arange(0, TOKENS), tl.arange(0, DEPTH)
        inside = lane < end - first
        place = tl.minimum(first + lane, end - 1)  # places behind the last one are computed as it, and not stored
        pair = place if ONE_TOKEN else tl.load(pairs + place)
        row = pair // TOP_K if ACTIVATION != "" else place
        x_place = lines + row.to(tl.int64)[:, None] * SIZE + depth[None, :]
        if not DESCRIPTORS:
            side = tl.arange(0, ROWS)
            output = tl.minimum(first_output + side % OUTPUTS, num_outputs - 1)
            line = (expert * WAYS + side // OUTPUTS).to(tl.int64) * num_outputs + output
            w_place = weights + line[:, None] * SIZE + depth[None, :]
        total = tl.zeros([ROWS, TOKENS], tl.float32)
        for k in tl.range(0, SIZE, DEPTH, num_stages=STAGES):
            x = _columns(x_place + k, depth < SIZE - k, EVEN)
            if DESCRIPTORS:
                w = tl.reshape(weights.load([expert * WAYS, first_output, k]), [ROWS, DEPTH])
            else:
                w = _columns(w_place + k, depth < SIZE - k, EVEN)
            total = tl.dot(w, tl.trans(x), total, input_precision="ieee")
        output = first_output + tl.arange(0, OUTPUTS)
        _store(total, out, place if ACTIVATION != "" else pair, inside, output, num_outputs, ACTIVATION, OUTPUTS)


@triton.jit
def _combine_kernel(results, weights, out, size, TOP_K: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """Programs run over the chunks of a token, then over the tokens."""
    chunks = tl.cdiv(size, BLOCK)
    token = (tl.program_id(0) // chunks).to(tl.int64)
    place = tl.program_id(0) % chunks * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    wait_for_inputs(OVERLAP)
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(TOP_K):
        weight = tl.load(weights + token * TOP_K + j)
        total += tl.load(results + (token * TOP_K + j) * size + place, inside, other=0.0).to(tl.float32) * weight
    tl.store(out + token * size + place, total.to(out.dtype.element_ty), inside)


@functools.cache
def _tell_of_plain_experts() -> None:
    logger.info("experts' quantised weights are held as plain numbers on the GPU")


def prepare_experts(weights: Tensor | Sequence[Weight], dtype: torch.dtype) -> Tensor:
    """Return experts' weights, [E, N, K] or E times [N, K], as plain numbers [E, N, K]."""
    if not isinstance(weights, Tensor) and not all(isinstance(weight, Tensor) for weight in weights):
        _tell_of_plain_experts()
    return stacked(weights, dtype).contiguous()


def experts(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: Activation = "silu",
) -> Tensor:
    """Run gated MLPs of experts, each on its own tokens: x [T, H], ids and weights [T, k], E [2I, H], E [H, I] -> [T, H].

    The reference is ``octavo.kernels.reference.experts``.
    """
    shape = choose_shape(expert_ids.numel(), gate_up.shape[0], gate_up.dtype)
    return run_experts(x, expert_ids, expert_weights, gate_up, down, activation, shape, sorts=x.shape[0] > 1)


def choose_shape(num_pairs: int, num_experts: int, dtype: torch.dtype) -> Shape:
    """Return the tiles for so many pairs of a token and one of its experts. None was measured yet."""
    each = num_pairs / num_experts
    if dtype is torch.float32:
        return Shape(Tile(16, 32, 32, 4, 2), Tile(16, 32, 32, 4, 2))
    if each <= 12:
        return Shape(Tile(16, 64, 128, 4, 4), Tile(16, 64, 128, 4, 4))
    if each <= 24:
        return Shape(Tile(32, 128, 64, 4, 4), Tile(32, 128, 64, 4, 4))
    if each <= 64:
        return Shape(Tile(64, 128, 64, 4, 4), Tile(64, 128, 64, 4, 4))
    return Shape(Tile(128, 256, 64, 8, 4), Tile(128, 256, 64, 8, 4))


def run_experts(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: Activation,
    shape: Shape,
    *,
    sorts: bool = True,
) -> Tensor:
    """Do what ``experts`` does, in tiles of one shape; without `sorts` there is one token at most."""
    (num_tokens, size), top_k = x.shape, expert_ids.shape[1]
    out = torch.empty((num_tokens, size), dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    ids = expert_ids.contiguous()
    pairs, starts = sort_pairs(ids, gate_up.shape[0]) if sorts else (ids, ids)
    inner = torch.empty((num_tokens * top_k, down.shape[2]), dtype=x.dtype, device=x.device)
    results = torch.empty((num_tokens * top_k, size), dtype=x.dtype, device=x.device)
    _product(x.contiguous(), gate_up, pairs, starts, inner, top_k, activation, shape.up, sorts)
    _product(inner, down, pairs, starts, results, top_k, "", shape.down, sorts)
    overlap = overlaps(x)
    _combine_kernel[(num_tokens * triton.cdiv(size, _BLOCK),)](
        results,
        expert_weights.contiguous(),
        out,
        size,
        TOP_K=top_k,
        BLOCK=_BLOCK,
        OVERLAP=overlap,
        num_warps=4,
        launch_pdl=overlap,
    )
    return out


def _product(
    lines: Tensor,
    weights: Tensor,
    pairs: Tensor,
    starts: Tensor,
    out: Tensor,
    top_k: int,
    activation: Activation | str,
    tile: Tile,
    sorts: bool,
) -> None:
    """Write one layer's outputs, of all pairs; the way up where there is an activation."""
    num_experts, num_rows, size = weights.shape
    ways = 2 if activation else 1
    num_outputs, outputs = num_rows // ways, tile.rows // ways
    with_descriptors = has_descriptors(weights.view(-1, size))
    blocks = weights.view(num_experts * ways, num_outputs, size)
    num_tiles = most_tiles(pairs.numel(), num_experts, tile.tokens)
    overlap = overlaps(lines)
    _experts_kernel[(num_tiles * triton.cdiv(num_outputs, outputs),)](
        lines,
        TensorDescriptor(blocks, list(blocks.shape), list(blocks.stride()), [ways, outputs, tile.depth])
        if with_descriptors
        else weights,
        pairs,
        starts,
        out,
        num_tiles,
        num_experts,
        num_outputs,
        SIZE=size,
        TOP_K=top_k,
        ACTIVATION=activation,
        ONE_TOKEN=not sorts,
        DESCRIPTORS=with_descriptors,
        TOKENS=tile.tokens,
        OUTPUTS=outputs,
        DEPTH=tile.depth,
        STAGES=tile.num_stages,
        EXPERTS=triton.next_power_of_2(num_experts),
        OVERLAP=overlap,
        num_warps=tile.num_warps,
        launch_pdl=overlap,
    )


def most_tiles(num_pairs: int, num_experts: int, tokens: int) -> int:
    """Return how many tiles of so many pairs there are at most, however the pairs are spread over the experts."""
    used = min(num_pairs, num_experts)
    return min(num_pairs, (num_pairs + used * (tokens - 1)) // tokens)

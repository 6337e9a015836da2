"""Integer codes in groups, from whatever layout, to the canonical weight."""

import torch
from torch import Tensor

from octavo.kernels.weights import GroupedWeight, pack_codes, unpack_codes
from octavo.worker.quantization.stored import RawTensors, held_bits


def grouped_weight(
    packed: Tensor, bits: int, scales: Tensor, zeros: Tensor | None, group_size: int, perm: Tensor | None = None
) -> GroupedWeight:
    """Return the canonical weight; zero points that are all in the middle are left out.

    Args:
        packed: [N, K / P] int32 in `held_bits(bits)`, low bits first.
        bits: of the codes.
        scales: [G, N].
        zeros: [G, N] uint8, or None: symmetric.
        group_size: inputs of a group.
        perm: [K] int32: the order of the inputs in which they lie group after group, where that is not their own.
    """
    held = held_bits(bits)
    if zeros is None and held != bits:
        zeros = torch.full_like(scales, 2 ** (bits - 1), dtype=torch.uint8)
    elif zeros is not None and held == bits and bool((zeros == 2 ** (bits - 1)).all()):
        zeros = None
    if perm is not None:
        packed = pack_codes(unpack_codes(packed, held)[:, perm.long()], held)
    return GroupedWeight(
        packed=packed.contiguous(),
        bits=held,
        scales=scales.contiguous(),
        zeros=None if zeros is None else zeros.contiguous(),
        group_size=group_size,
        perm=perm,
    )


def order_of(raw: RawTensors, name: str, g_idx: Tensor, group_size: int, *, zeros_are_none: bool) -> Tensor | None:
    """Return the order [K] int32 in which inputs lie group after group; None where that is their own order.

    Args:
        raw: for messages.
        name: of g_idx.
        g_idx: [K] int32, the group of each input.
        group_size: inputs of a group.
        zeros_are_none: whether a g_idx of nothing but zeros, which old tools wrote, says nothing.

    Raises:
        WeightsError: the groups are not of that size.
    """
    expected = torch.arange(len(g_idx), device=g_idx.device, dtype=g_idx.dtype) // group_size
    if torch.equal(g_idx, expected) or (zeros_are_none and not bool(g_idx.any())):
        return None
    perm = torch.argsort(g_idx, stable=True)
    if not torch.equal(g_idx[perm], expected):
        counts = torch.unique(g_idx, return_counts=True)
        group, count = next(
            ((int(g), int(n)) for g, n in zip(*counts, strict=True) if int(n) != group_size), (int(g_idx.max()), -1)
        )
        raise raw.error(
            name, f"group {group} has {count} inputs, expected {group_size} in each of {int(expected[-1]) + 1} groups"
        )
    return perm.to(torch.int32)

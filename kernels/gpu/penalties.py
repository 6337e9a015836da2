"""Presence, frequency and repetition penalties in one pass over the ids that occurred."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit(do_not_specialize_on_alignment=["rows", "presence", "frequency", "repetition"])
def _penalties_kernel(
    logits,
    rows,
    prompt_mask,
    output_counts,
    presence,
    frequency,
    repetition,
    logits_stride,
    mask_stride,
    counts_stride,
    vocabulary,
    BLOCK: tl.constexpr,
):
    """Programs run over the P rows with penalties, then over chunks of the vocabulary."""
    place = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocabulary
    counts = tl.load(output_counts + place * counts_stride + ids, mask=inside, other=0)
    generated = counts > 0
    occurred = generated | (tl.load(prompt_mask + place * mask_stride + ids, mask=inside, other=0) != 0)
    target = logits + tl.load(rows + place).to(tl.int64) * logits_stride + ids
    chosen = tl.load(target, mask=occurred, other=0.0)
    factor = tl.load(repetition + place)
    # Rounded as the reference rounds: division to nearest, no fused multiplication and addition (see the launch).
    chosen = tl.where(chosen > 0, tl.div_rn(chosen, tl.zeros_like(chosen) + factor), chosen * factor)
    chosen -= tl.load(frequency + place) * counts.to(tl.float32)
    chosen -= tl.where(generated, tl.load(presence + place), 0.0)
    tl.store(target, chosen, mask=occurred)


def apply_penalties(
    logits: Tensor,
    rows: Tensor,
    prompt_mask: Tensor,
    output_counts: Tensor,
    presence: Tensor,
    frequency: Tensor,
    repetition: Tensor,
) -> None:
    """Penalise tokens that occurred, in the P rows of logits [S, V] that ``rows`` [P] integer names (each once). In place.

    prompt_mask [P, V] bool: the id is in the prompt; output_counts [P, V] int32: how often it was generated; presence,
    frequency, repetition [P] fp32. Repetition (> 0, 1 is none; Keskar et al. 2019, arXiv 1909.05858) looks at prompt
    and output: positive logits are divided by it, others multiplied. Then ``frequency * count`` and, where the count is
    not 0, ``presence`` are subtracted; these look at the output only.

    Lines of logits, mask and counts are contiguous, any distance apart. Logits of ids that did not occur are neither
    read nor written. The result is that of ``octavo.kernels.sampling.apply_penalties``, bit for bit.

    Raises:
        ValueError: logits are not fp32, or a line is not contiguous.
    """
    places, vocabulary = prompt_mask.shape
    tensors = (logits, prompt_mask, output_counts)
    if logits.dtype != torch.float32 or (vocabulary > 1 and any(x.stride(1) != 1 for x in tensors)):
        raise ValueError("penalties take fp32 logits, masks and counts with contiguous lines")
    if places == 0:
        return
    _penalties_kernel[(places, triton.cdiv(vocabulary, _BLOCK))](
        logits,
        rows,
        prompt_mask.view(torch.uint8),
        output_counts,
        presence,
        frequency,
        repetition,
        logits.stride(0),
        prompt_mask.stride(0),
        output_counts.stride(0),
        vocabulary,
        BLOCK=_BLOCK,
        num_warps=4,
        enable_fp_fusion=False,
    )

"""Mixture of experts: the choice of a token's experts, and how their results become one; for any device."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from octavo.kernels.weights import Weight, dequantized


def route(logits: Tensor, top_k: int, *, renormalize: bool) -> tuple[Tensor, Tensor]:
    """Choose the ``top_k`` experts of each token, those with the highest logits; of equal ones that of the lower id.

    logits [T, E] -> ids [T, top_k] int32, the highest logit first, and their weights [T, top_k] fp32: the softmax of the
    token's logits over all experts, or over the chosen ones where ``renormalize``. A logit that is no number counts as the
    lowest there is, and makes all weights of its token NaN; ids are distinct and within range even then.
    """
    wide = logits.float()
    # -0.0 and 0.0 are equal, but not every device sorts them so.
    keys = wide.masked_fill(wide.isnan(), float("-inf")).masked_fill(wide == 0.0, 0.0)
    ids = torch.sort(keys, dim=-1, descending=True, stable=True).indices[:, :top_k]
    masses = torch.exp(wide - wide.amax(dim=-1, keepdim=True))
    chosen = masses.gather(1, ids)
    total = (chosen if renormalize else masses).sum(dim=-1, keepdim=True)
    return ids.int(), chosen / total


def combine(x: Tensor, expert_ids: Tensor, expert_weights: Tensor, mlp: Callable[[int, Tensor], Tensor]) -> Tensor:
    """Add up what a token's experts make of it, times their weights: x [T, H], ids and weights [T, k] -> [T, H].

    ``mlp`` takes an expert and its tokens [n, H], n > 0, in the order of x, and returns [n, H]; it is called once for each
    expert that has any. Sums are fp32, in the order of the ids, rounded once.
    """
    num_tokens, top_k = expert_ids.shape
    flat = expert_ids.flatten().long()
    order = torch.argsort(flat, stable=True)  # of pairs of a token and one of its experts
    found, counts = torch.unique_consecutive(flat[order], return_counts=True)
    results = x.new_empty(num_tokens * top_k, x.shape[1])
    for expert, pairs in zip(found.tolist(), order.split(counts.tolist()), strict=True):
        results[pairs] = mlp(expert, x[pairs // top_k])
    by_token = results.view(num_tokens, top_k, x.shape[1])
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for place in range(top_k):
        total += by_token[:, place].float() * expert_weights[:, place, None]
    return total.to(x.dtype)


def stacked(weights: Tensor | Sequence[Weight], dtype: torch.dtype) -> Tensor:
    """Return the plain numbers of experts' weights as one [E, N, K]; a stack of that dtype as it is."""
    if isinstance(weights, Tensor):
        return weights.to(dtype)
    first = dequantized(weights[0], dtype)
    stack = first.new_empty(len(weights), *first.shape)
    for expert, weight in enumerate(weights):
        stack[expert] = dequantized(weight, dtype)
    return stack

"""Log-probabilities of prompts: from the hidden states of a step to what is told of it, in slices of bounded memory.

Only rows that ask for them cost anything. Everything is enqueued on the device of the hidden states; `Told.collect` looks
at what came of it, once the caller has waited for that.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.kernels.ops import Ops
from octavo.wire.prompt_logprobs import PromptLogprobs
from octavo.worker.mirror import PromptPart
from octavo.worker.models.interface import Hidden, Model
from octavo.worker.rehearsal import MANY_LOGPROBS
from octavo.worker.transfer import to_device, to_host

SLICE_TOKENS = 256
"""Tokens whose logits are in memory at one time: as float32, 128 MiB for a vocabulary of 128 Ki."""


@dataclass(frozen=True)
class ToldPart:
    """What is told of one row's part; None if logits of it are not finite."""

    row: int
    logprobs: PromptLogprobs | None


class Told:
    """Log-probabilities on their way to the host."""

    def __init__(self, parts: list[PromptPart], nonfinite: Tensor, columns: list[Tensor]) -> None:
        self._parts = parts
        self._nonfinite = to_host(nonfinite)  # [n] bool, of all parts one after the other
        self._columns = [to_host(column) for column in columns]  # logprob, rank [n], top ids, top logprobs [n, k]

    def collect(self) -> list[ToldPart]:
        """Return what is told, by part; on a GPU the caller has waited for the work behind it."""
        logprob, rank, top_ids, top_logprobs = (column.numpy() for column in self._columns)
        broken = self._nonfinite.numpy()
        told: list[ToldPart] = []
        begin = 0
        for part in self._parts:
            own = slice(begin, begin + part.count)
            begin += part.count
            if broken[own].any():
                told.append(ToldPart(part.row, None))
                continue
            top = slice(0, part.top)
            columns = PromptLogprobs(
                part.row,
                part.first,
                logprob[own].astype("<f4").tobytes(),
                rank[own].astype("<i4").tobytes(),
                top_ids[own, top].astype("<i4").tobytes(),
                top_logprobs[own, top].astype("<f4").tobytes(),
            )
            told.append(ToldPart(part.row, columns))
        return told


def tell(
    model: Model, ops: Ops, hidden: Hidden, ids: Tensor, parts: list[PromptPart], first_tokens: list[int], valid: int
) -> Told:
    """Enqueue the log-probabilities of parts of prompts.

    Args:
        model: makes logits of hidden states.
        ops: the backend's operations.
        hidden: of the step's tokens.
        ids: [rows, L] integer: known ids, a line a row.
        parts: what to tell; not empty.
        first_tokens: by place in the plan: where a row's tokens begin among those of the step.
        valid: ids from here on pad the embedding.
    """
    device = ids.device
    tokens = [first_tokens[part.place] + part.offset + i for part in parts for i in range(part.count)]
    lines = [part.row for part in parts for _ in range(part.count)]
    positions = [part.first + i for part in parts for i in range(part.count)]
    wanted, line, position = to_device(tokens + lines + positions, torch.int64, device).view(3, -1)
    chosen = ids[line, position].long()
    top = max(part.top for part in parts)
    slices = [
        _tell_slice(model, ops, hidden, wanted[at : at + SLICE_TOKENS], chosen[at : at + SLICE_TOKENS], top, valid)
        for at in range(0, len(tokens), SLICE_TOKENS)
    ]
    nonfinite, *columns = (torch.cat(pieces) for pieces in zip(*slices, strict=True))
    return Told(parts, nonfinite, columns)


def try_telling(model: Model, ops: Ops, hidden: Hidden, ids: Tensor, valid: int) -> None:
    """Enqueue the largest slice with as much as anybody may ask for: what it takes beside hidden states is then known."""
    count = min(SLICE_TOKENS, hidden.x.shape[0], ids.shape[1])
    ids[0, :count] = 0
    tell(model, ops, hidden, ids, [PromptPart(0, 0, 0, 0, count, MANY_LOGPROBS)], [0], valid)


def _tell_slice(
    model: Model, ops: Ops, hidden: Hidden, wanted: Tensor, chosen: Tensor, top: int, valid: int
) -> tuple[Tensor, ...]:
    logits = model.logits(hidden, wanted).float()
    nonfinite = ops.first_nonfinite(logits[:, :valid])
    logits.masked_fill_(nonfinite[:, None], 0.0)  # thrown away; a NaN would break rules of the operations
    logits[:, valid:] = float("-inf")
    return nonfinite, *ops.logprobs(logits, chosen, top)

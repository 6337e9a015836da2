"""A draw that wants everything: to have the kernels of sampling compiled, and to know what it takes of memory."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from octavo.kernels.ops import Ops
from octavo.wire.columns import pack_floats, pack_ints
from octavo.wire.plan import RowSampling
from octavo.worker.sampler import RowSampler, SamplingRow, TokenMask, draw

logger = logging.getLogger(__name__)

MANY_LOGPROBS = 20
"""Log-probabilities of each row in the largest step that is tried."""

_MOST_ALLOWED = 64
_REHEARSED_TOKENS = 8


def everything(vocab_size: int, logprobs: int = 1) -> RowSampling:
    """Return parameters that use whatever sampling can do."""
    return RowSampling(
        seed=0,
        top_p=0.9,
        top_k=50,
        min_p=0.01,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        repetition_penalty=1.1,
        min_tokens=2,
        stop_token_ids=pack_ints([0]),
        logit_bias_ids=pack_ints([0]),
        logit_bias_values=pack_floats([1.0]),
        allowed_token_ids=pack_ints(range(min(vocab_size, _MOST_ALLOWED))),
        logprobs=logprobs,
        bad_word_ids=pack_ints([0, 1, 1]),
        bad_word_lengths=pack_ints([1, 2]),
    )


@contextmanager
def rehearsed(ops: Ops, vocab_size: int, valid_vocab: int, device: torch.device) -> Iterator[None]:
    """Have the sampling kernels compiled by a thread of its own meanwhile; on leaving, they are.

    Triton compiles outside of the interpreter lock. What goes wrong there goes wrong again in the warm-up, and is told
    there.
    """

    @torch.inference_mode()
    def rehearse() -> None:
        try:
            logits = torch.zeros(2, vocab_size, dtype=torch.float32, device=device)
            ids = torch.zeros(1, _REHEARSED_TOKENS, dtype=torch.int32, device=device)
            draw_everything(ops, logits, ids, valid_vocab)
            torch.cuda.current_stream(device).synchronize()
        except RuntimeError as error:
            logger.warning("rehearsing the sampling kernels failed: %s", error)

    if device.type != "cuda":
        yield
        return
    thread = threading.Thread(target=rehearse, name="rehearse", daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def draw_everything(ops: Ops, logits: torch.Tensor, ids: torch.Tensor, valid_vocab: int, logprobs: int = 1) -> None:
    """Enqueue a draw for each line of [S, vocab] logits that wants everything; all have the first line of ids."""
    num_known = ids.shape[1]
    sampler = RowSampler(everything(valid_vocab, logprobs), 0, logits.device)
    rows = [SamplingRow(sampler, 0, min(num_known, max(1, num_known - 1)), num_known) for _ in range(logits.shape[0])]
    words = np.full((len(rows), -(-logits.shape[1] // 32)), -1, dtype=np.int32)
    draw(ops, logits, ids, rows, valid_vocab, TokenMask(list(range(len(rows))), words))

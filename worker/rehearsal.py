"""A draw that wants everything: to have the kernels of sampling compiled, and to know what it takes of memory."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

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
def meanwhile(name: str, rehearse: Callable[[], None], device: torch.device) -> Iterator[None]:
    """Have kernels compiled by a thread of its own; on leaving, they are.

    Triton compiles outside of the interpreter lock, for the most part. What goes wrong there goes wrong again in the
    warm-up, and is told there.

    Args:
        name: of what is done.
        rehearse: launches the kernels on the device's current stream of the thread, and waits for them.
        device: a CUDA device.
    """

    @torch.inference_mode()
    def run() -> None:
        try:
            with torch.cuda.device(device):
                rehearse()
        except RuntimeError as error:
            logger.warning("%s failed: %s", name, error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()


@contextmanager
def sampling_rehearsed(ops: Ops, vocab_size: int, valid_vocab: int, device: torch.device) -> Iterator[None]:
    """Have the sampling kernels compiled meanwhile."""

    def rehearse() -> None:
        logits = torch.zeros(2, vocab_size, dtype=torch.float32, device=device)
        ids = torch.zeros(1, _REHEARSED_TOKENS, dtype=torch.int32, device=device)
        draw_everything(ops, logits, ids, valid_vocab)
        torch.cuda.current_stream(device).synchronize()

    with meanwhile("rehearse sampling", rehearse, device) if device.type == "cuda" else nullcontext():
        yield


def draw_everything(ops: Ops, logits: torch.Tensor, ids: torch.Tensor, valid_vocab: int, logprobs: int = 1) -> None:
    """Enqueue a draw for each line of [S, vocab] logits that wants everything; all have the first line of ids."""
    num_known = ids.shape[1]
    sampler = RowSampler(everything(valid_vocab, logprobs), 0, logits.device)
    rows = [SamplingRow(sampler, 0, min(num_known, max(1, num_known - 1)), num_known) for _ in range(logits.shape[0])]
    words = np.full((len(rows), -(-logits.shape[1] // 32)), -1, dtype=np.int32)
    draw(ops, logits, ids, rows, valid_vocab, TokenMask(list(range(len(rows))), words))

"""Prompts far too long: refused before a tokenizer takes a kilobyte of memory for each of their tokens."""

from collections.abc import Sequence
from typing import Protocol

from octavo.frontend.errors import ContextLengthExceeded

CHARS_PER_TOKEN = 8
"""More than most texts have: so many characters for each token that fits tell whether a long text may fit at all."""


class Encodes(Protocol):
    """What a tokenizer is asked for here."""

    def encode_text(self, text: str) -> list[int]:
        """Return the ids of a text."""
        ...


def refuse_by_beginning(tokenizer: Encodes, texts: Sequence[str], max_model_len: int, path: str) -> None:
    """Refuse a prompt whose beginning alone has far more tokens than fit. What is anywhere near the limit passes, and is
    counted whole.

    Raises:
        ContextLengthExceeded: it does.
    """
    size = CHARS_PER_TOKEN * max_model_len
    if sum(map(len, texts)) <= 2 * size:
        return
    limit, count = max_model_len + max_model_len // 2, 0
    for text in texts:
        if size <= 0 or count > limit:
            break
        count += len(tokenizer.encode_text(text[:size]))
        size -= len(text)
    if count > limit:
        raise ContextLengthExceeded(
            f"prompt of more than {limit} tokens, limit {max_model_len} (max_model_len, with at least one token of output)",
            field_path=path,
            metadata={"max_model_len": str(max_model_len)},
        )

"""Ids to text, one id at a time: never half a character, and in the end exactly the text of all ids.

The text of ids is defined as: the bytes of the ids one after the other, read as UTF-8, where each maximal invalid part
becomes one U+FFFD (Unicode 16.0, section 3.9). For byte-level tokenizers this is what `tokenizers` decodes. For
tokenizers with byte fallback it differs only where a run of byte tokens is not valid UTF-8: `tokenizers` then writes
one U+FFFD for each byte of the whole run, valid characters included, so nothing of a run could be shown before its end.
"""

import codecs
from typing import Protocol

from tokenizers import Tokenizer

from octavo.frontend.vocabulary import BytePieces

MAX_WINDOW_TOKENS = 24
"""Ids without a shown text that a WindowDetokenizer keeps: no character is made of more."""

REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    """Incremental decoding of one choice."""

    def push(self, token_id: int) -> str:
        """Take the next id and return the text that is complete by it."""
        ...

    def flush(self) -> str:
        """Return what is left when no id follows: U+FFFD for an incomplete character, else ''."""
        ...


class ByteDetokenizer:
    """Decodes through a table of bytes by id.

    Args:
        pieces: the bytes of each id.
        skip_special_tokens: whether special tokens have no text.
    """

    def __init__(self, pieces: BytePieces, skip_special_tokens: bool) -> None:
        self._pieces = pieces
        self._skip = skip_special_tokens
        self._table = pieces.table(skip_special_tokens)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._incomplete = False
        self._to_strip = pieces.rules.strip_text
        self._drops_in_first = bool(pieces.rules.drop_in_first)

    def push(self, token_id: int) -> str:
        """Take the next id and return the text that is complete by it."""
        piece = self._table.get(token_id)
        if piece is None:
            piece = self._pieces.look_up(token_id, self._skip)
        if self._drops_in_first and piece:
            self._drops_in_first = False
            piece = self._pieces.first_text(token_id)
        if self._incomplete or not isinstance(piece, str):
            data = piece.encode() if isinstance(piece, str) else piece
            piece = self._decoder.decode(data)
            self._incomplete = bool(self._decoder.getstate()[0])
        return self._strip(piece) if self._to_strip and piece else piece

    def flush(self) -> str:
        """Return what is left when no id follows: U+FFFD for an incomplete character, else ''."""
        self._incomplete = False
        return self._decoder.decode(b"", final=True)

    def _strip(self, text: str) -> str:
        stripped = text
        while self._to_strip and stripped.startswith(" "):
            stripped = stripped[1:]
            self._to_strip -= 1
        if stripped:
            self._to_strip = 0
        return stripped


class WindowDetokenizer:
    """Decodes through the tokenizer itself, over a window of the last ids, for decoders that look at neighbours.

    Args:
        tokenizer: the tokenizer.
        hidden: ids without a text.
    """

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._ids: list[int] = []
        self._num_shown = 0  # ids of the window whose text has been shown
        self._shown = ""  # that text

    def push(self, token_id: int) -> str:
        """Take the next id and return the text that is complete by it."""
        if token_id in self._hidden:
            return ""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        if text.endswith(REPLACEMENT) and len(self._ids) - self._num_shown < MAX_WINDOW_TOKENS:
            return ""
        return self._show(text)

    def flush(self) -> str:
        """Return what is left when no id follows."""
        return self._show(self._decode(self._ids))

    def _show(self, text: str) -> str:
        new = text[len(self._shown) :]
        # The window keeps what was new: the next id is decoded beside it, as in the whole text.
        if new:
            self._ids = self._ids[self._num_shown :]
            self._num_shown = len(self._ids)
            self._shown = self._decode(self._ids)
        return new

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text

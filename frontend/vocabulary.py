"""What each id of a tokenizer stands for, as text or bytes, derived from the decoder that tokenizer.json names.

Byte-level and SentencePiece-like decoders turn ids into bytes one by one; knowing these bytes makes incremental
decoding exact and linear. Decoders of other kinds have no such table (`BytePieces.of` returns None).
"""

import re
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """Return the printable characters by which byte-level BPE writes bytes (GPT-2's mapping)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF_CHAR = _byte_alphabet()


@dataclass(frozen=True)
class DecoderRules:
    """How a decoder reads one token.

    Attributes:
        byte_level: characters stand for bytes.
        replacements: texts replaced in each token, in order.
        byte_fallback: tokens <0xNN> stand for bytes.
        strip_text: spaces dropped at the start of the whole text, at most this many.
        drop_in_first: this text is dropped wherever it occurs in the first token that is shown.
    """

    byte_level: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False
    strip_text: int = 0
    drop_in_first: str = ""


def read_rules(decoder: Any) -> DecoderRules | None:
    """Read the `decoder` of a tokenizer.json; None if its tokens cannot be decoded one by one."""
    if not isinstance(decoder, dict):
        return None
    kind = decoder.get("type")
    if kind == "ByteLevel":
        return DecoderRules(byte_level=True)
    if kind == "Metaspace":
        mark = str(decoder.get("replacement", "▁"))
        drop = "" if decoder.get("prepend_scheme", "always") == "never" else mark
        return DecoderRules(replacements=((mark, " "),), drop_in_first=drop)
    if kind == "Sequence":
        return _read_sequence(decoder.get("decoders", []))
    return None


def _read_sequence(parts: list[dict[str, Any]]) -> DecoderRules | None:
    if len(parts) == 1:
        return read_rules(parts[0])
    replacements: list[tuple[str, str]] = []
    byte_fallback = fused = False
    strip_text = 0
    for part in parts:
        match part:
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if not byte_fallback:
                replacements.append((old, new))
            case {"type": "ByteFallback"} if not fused:
                byte_fallback = True
            case {"type": "Fuse"}:
                fused = True
            case {"type": "Strip", "content": " ", "start": int(start), "stop": 0} if fused and not strip_text:
                strip_text = start
            case _:
                return None
    return DecoderRules(replacements=tuple(replacements), byte_fallback=byte_fallback, strip_text=strip_text)


class BytePieces:
    """The bytes of each id, read from the tokenizer when first asked for; shared by all streams of one event loop.

    Args:
        tokenizer: the tokenizer.
        rules: how its decoder reads tokens.
        special_ids: ids of special tokens.
    """

    def __init__(self, tokenizer: Tokenizer, rules: DecoderRules, special_ids: frozenset[int]) -> None:
        self.rules = rules
        self._tokenizer = tokenizer
        self._special_ids = special_ids
        self._shown: tuple[dict[int, str | bytes], dict[int, str | bytes]] = ({}, {})

    def table(self, skip_special_tokens: bool) -> dict[int, str | bytes]:
        """Return the table of pieces read so far; `look_up` fills it. At most one entry an id of the embedding."""
        return self._shown[skip_special_tokens]

    def look_up(self, token_id: int, skip_special_tokens: bool) -> str | bytes:
        """Return an id's piece: text if it is whole characters, else bytes; '' for ids without a token."""
        skipped = skip_special_tokens and token_id in self._special_ids
        data = b"" if skipped else self.read_bytes(token_id)
        try:
            piece: str | bytes = data.decode()
        except UnicodeDecodeError:
            piece = data
        self._shown[skip_special_tokens][token_id] = piece
        return piece

    def first_text(self, token_id: int) -> str:
        """Return the text of an id that comes first, for decoders that treat the first token differently."""
        token = self._tokenizer.id_to_token(token_id) or ""
        token = token.replace(self.rules.drop_in_first, "")
        for old, new in self.rules.replacements:
            token = token.replace(old, new)
        return token

    def read_bytes(self, token_id: int) -> bytes:
        """Return an id's exact bytes inside a text; none for ids without a token."""
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self.rules.byte_level:
            codes = [_BYTE_OF_CHAR.get(char) for char in token]
            known = bytes(code for code in codes if code is not None)
            # A token with another character is an added one, and is written as it is.
            return known if len(known) == len(codes) else token.encode()
        for old, new in self.rules.replacements:
            token = token.replace(old, new)
        if self.rules.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return token.encode()

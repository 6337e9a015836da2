"""What each id of a tokenizer stands for, read from its tokenizer.json: frontend and worker must agree about it.

Byte-level and SentencePiece-like decoders turn ids into bytes one by one. Decoders of other kinds have no such table.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.wire.model_files import read_model_text

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """Return the printable characters by which byte-level BPE writes bytes (GPT-2's mapping)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF_CHAR = _byte_alphabet()


class VocabularyError(Exception):
    """The ids of a tokenizer cannot be turned into bytes one by one; the message says why."""


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

    def bytes_of(self, token: str) -> bytes:
        """Return a token's exact bytes inside a text."""
        if self.byte_level:
            codes = [_BYTE_OF_CHAR.get(char) for char in token]
            known = bytes(code for code in codes if code is not None)
            # A token with another character is an added one, and is written as it is.
            return known if len(known) == len(codes) else token.encode()
        for old, new in self.replacements:
            token = token.replace(old, new)
        if self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return token.encode()


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


def read_token_bytes(folder: Path) -> list[bytes]:
    """Return the bytes of each id; none for special tokens and for ids without a token.

    Raises:
        VocabularyError: tokenizer.json cannot be read, or its decoder does not turn ids into bytes one by one.
    """
    path = folder / "tokenizer.json"
    try:
        description = json.loads(read_model_text(path))
        tokens, special = _tokens(description)
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise VocabularyError(f"{path.name} cannot be read: {error}") from error
    rules = read_rules(description.get("decoder"))
    if rules is None:
        raise VocabularyError("the tokenizer's decoder does not turn tokens into text one by one")
    size = 1 + max(tokens, default=-1)
    return [b"" if i in special or i not in tokens else rules.bytes_of(tokens[i]) for i in range(size)]


def _tokens(description: dict[str, Any]) -> tuple[dict[int, str], set[int]]:
    """Return the tokens by their ids, and the ids of special ones."""
    vocabulary = description["model"]["vocab"]
    if isinstance(vocabulary, dict):
        tokens = {int(token_id): str(token) for token, token_id in vocabulary.items()}
    else:
        tokens = {token_id: str(entry[0]) for token_id, entry in enumerate(vocabulary)}  # Unigram: with their scores
    added = description.get("added_tokens") or []
    tokens |= {int(token["id"]): str(token["content"]) for token in added}
    return tokens, {int(token["id"]) for token in added if token.get("special")}

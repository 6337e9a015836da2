"""The model's tokenizer: text to ids, ids to text, one token's bytes.

Special tokens (`<|im_end|>` and the like) are control, not text. In a caller's text they are encoded as the text that
they look like; only in the output of a chat template do they become their ids.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from octavo.frontend.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from octavo.frontend.vocabulary import BytePieces
from octavo.wire.model_files import read_model_text
from octavo.wire.vocabulary import read_rules

SHRINK_FACTOR = 4
"""How much shorter a text may become by a tokenizer's normalizer, for the limit on a prompt's bytes."""


class ModelFilesError(Exception):
    """The model's folder lacks a file or holds a broken one: the frontend cannot start. Names the file."""


class ModelTokenizer:
    """A model's tokenizer.json. Encoding may run in any thread and releases the interpreter lock. So may decoding, which
    does not: tables that threads share are only filled, with the same entries by each.

    Args:
        folder: the model's folder.

    Raises:
        ModelFilesError: tokenizer.json is missing or broken.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        self._for_templates, description = _load(path)
        self._for_texts, _ = _load(path)
        self._for_texts.encode_special_tokens = True
        added = description.get("added_tokens") or []
        self.special_ids = frozenset(int(token["id"]) for token in added if token.get("special"))
        # A token of one character cannot be told from text by a mark inside it; no model has such a special token.
        specials = [(str(t["content"]), int(t["id"])) for t in added if t.get("special") and len(t["content"]) > 1]
        self._special_ids_by_text = dict(specials)
        texts = sorted(self._special_ids_by_text, key=len, reverse=True)
        self._special_pattern = re.compile("|".join(map(re.escape, texts))) if texts else None
        rules = read_rules(description.get("decoder"))
        self._rules = rules
        self._pieces = BytePieces(self._for_texts, rules, self.special_ids) if rules else None
        self._pieces_by_shown: dict[frozenset[int], BytePieces] = {}
        self._longest_bytes = max((len(token.encode()) for token in self._for_texts.get_vocab()), default=1)
        self._shrink = 1 if description.get("normalizer") is None else SHRINK_FACTOR

    @property
    def num_ids(self) -> int:
        """One more than the largest id, added tokens included."""
        return 1 + max(self._for_texts.get_vocab(with_added_tokens=True).values(), default=-1)

    def id_of(self, token: str) -> int | None:
        """Return the id of a token, None if there is none."""
        found: int | None = self._for_texts.token_to_id(token)
        return found

    def max_prompt_bytes(self, max_tokens: int) -> int:
        """Return how many bytes of text at most can become `max_tokens` tokens; longer prompts are refused unread."""
        return max_tokens * self._longest_bytes * self._shrink

    def encode_text(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Encode a caller's text: special tokens in it stay text; what the tokenizer adds (bos) is added if wanted."""
        return _encode(self._for_texts, text, add_special_tokens)

    def encode_template(self, rendered: str) -> list[int]:
        """Encode a chat template's output: special tokens in it become their ids; nothing is added."""
        return _encode(self._for_templates, rendered, add_special_tokens=False)

    def encode_marked_template(self, rendered: str, mark: str) -> list[int]:
        """Encode a chat template's output in which `defuse` has marked what callers wrote.

        The text is cut at special tokens without a mark, and each part is encoded as a caller's text.
        """
        ids: list[int] = []
        start = 0
        for match in self._special_pattern.finditer(rendered) if self._special_pattern else ():
            ids += self._encode_part(rendered[start : match.start()], mark)
            ids.append(self._special_ids_by_text[match.group()])
            start = match.end()
        return ids + self._encode_part(rendered[start:], mark)

    def has_special_tokens(self, texts: Iterable[str]) -> bool:
        """Say whether a special token is written in one of the texts."""
        pattern = self._special_pattern
        return pattern is not None and any(pattern.search(text) for text in texts)

    def defuse(self, text: str, mark: str) -> str:
        """Put `mark` after the first character of each special token in a text, so that it is none any more."""
        if self._special_pattern is None:
            return text
        # A replacement can leave another special token behind it (nested ones): repeat until there is none.
        while self._special_pattern.search(text):
            text = self._special_pattern.sub(lambda m: m.group()[0] + mark + m.group()[1:], text)
        return text

    def special_ids_of(self, texts: Iterable[str]) -> frozenset[int]:
        """Return the ids of those of the texts that are special tokens."""
        return frozenset(self._special_ids_by_text[text] for text in texts if text in self._special_ids_by_text)

    def detokenizer(self, skip_special_tokens: bool, shown: frozenset[int] = frozenset()) -> Detokenizer:
        """Return an incremental decoder for one choice.

        Args:
            skip_special_tokens: whether special tokens have no text.
            shown: those that have one nevertheless; of few different sets, since each is kept.
        """
        hidden = self.special_ids - shown if skip_special_tokens else frozenset()
        if self._pieces is None or self._rules is None:
            return WindowDetokenizer(self._for_texts, hidden)
        if not shown or not skip_special_tokens:
            return ByteDetokenizer(self._pieces, skip_special_tokens)
        pieces = self._pieces_by_shown.get(shown)
        if pieces is None:
            pieces = self._pieces_by_shown[shown] = BytePieces(self._for_texts, self._rules, hidden)
        return ByteDetokenizer(pieces, skip_special_tokens)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool) -> str:
        """Return the text of ids, the same as all that a detokenizer says of them. May run in any thread."""
        detokenizer = self.detokenizer(skip_special_tokens)
        return "".join([*map(detokenizer.push, ids), detokenizer.flush()])

    def token_bytes(self, token_id: int) -> bytes:
        """Return the exact bytes of one token; none for ids without a token."""
        if self._pieces is not None:
            return self._pieces.read_bytes(token_id)
        return self._for_texts.decode([token_id], skip_special_tokens=False).encode()

    def _encode_part(self, part: str, mark: str) -> list[int]:
        return _encode(self._for_texts, part.replace(mark, ""), add_special_tokens=False) if part else []


def _load(path: Path) -> tuple[Tokenizer, dict[str, Any]]:
    try:
        data = read_model_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ModelFilesError(f"cannot read {path}: {error}") from error
    try:
        tokenizer = Tokenizer.from_str(data)
        description: dict[str, Any] = json.loads(data)
    except BaseException as error:  # `tokenizers` raises plain Exception
        if not isinstance(error, Exception) and not _is_panic(error):
            raise
        raise ModelFilesError(f"{path} is no valid tokenizer: {error}") from error
    # A tokenizer saved for training may cut or pad what it encodes.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer, description


def _encode(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    # The batch form is the one that releases the interpreter lock.
    try:
        encoding = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
    except BaseException as error:
        if _is_panic(error):
            raise RuntimeError(f"the tokenizer panicked: {error}") from error
        raise
    ids: list[int] = encoding.ids
    return ids


def _is_panic(error: BaseException) -> bool:
    """Say whether an error is a panic of Rust code, which is no Exception in Python and has no importable class."""
    return type(error).__name__ == "PanicException"

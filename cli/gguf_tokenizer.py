"""The tokenizer that a GGUF file's metadata describe, as tokenizer.json and tokenizer_config.json.

Nothing of it is guessed: how a text is cut before byte pairs are merged is part of the tokenizer, so a kind of cutting
that is not known by its name is refused.
"""

from typing import Any

from octavo.cli.errors import ConfigurationError
from octavo.worker.gguf.header import GgufFile

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 2, 3, 4, 5, 6
"""Types of tokens; the others are plain ones (1)."""
_BLANK = "\u2581"
"""SentencePiece's space."""
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_REST_WITH_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|{_REST_WITH_SLASH}"
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}|{_REST_WITH_SLASH}"
)


def _split(pattern: str) -> list[dict[str, Any]]:
    return [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
    ]


_GPT2_STEP = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_GPT2 = [_GPT2_STEP]
_DIGITS = [{"type": "Digits", "individual_digits": True}, _GPT2_STEP]
_CUTS: dict[str, list[dict[str, Any]]] = {
    **dict.fromkeys(("gpt-2", "olmo", "phi-2", "jais", "mpt"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), _DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "smaug-bpe", "dbrx"), _split(_LLAMA3)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _split(_QWEN2)),
    "tekken": _split(_TEKKEN),
    **dict.fromkeys(("gpt-4o", "llama4"), _split(_GPT4O)),
}
"""tokenizer.ggml.pre -> how a text is cut into words before byte pairs are merged."""
_WHOLE_WORDS = frozenset({"llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken"})
"""Of these a word that is a token is taken as it is, whatever merges would make of it; they begin with bos by default."""
_SPECIAL = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
}
MODELS = ("gpt2", "llama")


class GgufVocabulary:
    """The tokens of a file.

    Raises:
        ConfigurationError: they are missing or malformed, or of a kind that is not supported.
    """

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self.model = self._metadata("model")
        if self.model not in MODELS:
            raise self.error(
                f"tokenizer.ggml.model = {self.model!r} is not supported; supported are {', '.join(MODELS)}"
            )
        tokens = self._metadata("tokens")
        if not isinstance(tokens, list) or not tokens or not all(isinstance(token, str) for token in tokens):
            raise self.error("tokenizer.ggml.tokens is no list of texts")
        self.tokens = [str(token) for token in tokens]
        self.types: list[int] = self.numbers("token_type", int) or [1] * len(self.tokens)

    def _metadata(self, name: str) -> object:
        return self._file.metadata.get(f"tokenizer.ggml.{name}")

    def numbers(self, name: str, kind: type[int] | type[float]) -> list[Any]:
        """Return one number for each token; none where the file has none."""
        values = self._metadata(name)
        if values is None:
            return []
        if not isinstance(values, list) or len(values) != len(self.tokens) or type(values[0]) is not kind:
            raise self.error(f"tokenizer.ggml.{name} does not hold a number for each of {len(self.tokens)} tokens")
        return values

    def flag(self, name: str, default: bool) -> bool:
        """Return a flag."""
        value = self._metadata(name)
        if value is not None and not isinstance(value, bool):
            raise self.error(f"tokenizer.ggml.{name} = {value!r}, expected true or false")
        return default if value is None else value

    def special_id(self, name: str) -> int | None:
        """Return the id of bos, eos, eot, eom, unknown or padding, if there is one."""
        value = self._metadata(f"{name}_token_id")
        if value is None or value == 2**32 - 1:  # -1: there is none
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < len(self.tokens):
            raise self.error(f"tokenizer.ggml.{name}_token_id = {value!r}, expected one of {len(self.tokens)} ids")
        return value

    def is_control(self, index: int) -> bool:
        """Say whether a token is no text."""
        return self.types[index] == _CONTROL

    @property
    def pre(self) -> str:
        """How texts are cut.

        Raises:
            ConfigurationError: the file does not say, or in an unknown way.
        """
        value = self._metadata("pre")
        if not isinstance(value, str) or value not in _CUTS:
            raise self.error(
                f"tokenizer.ggml.pre = {value!r} is not supported; supported are {', '.join(sorted(_CUTS))} (a folder "
                "with the file and the model's tokenizer.json beside it is served with that)"
            )
        return value

    @property
    def merges(self) -> list[list[str]]:
        """Pairs that become one token, the first ones first."""
        values = self._metadata("merges")
        if not isinstance(values, list):
            raise self.error("tokenizer.ggml.merges is missing")
        pairs = [str(value).split(" ") for value in values]
        known = set(self.tokens)
        for pair in pairs:
            if len(pair) != 2 or not known.issuperset((*pair, "".join(pair))):
                raise self.error(
                    f"tokenizer.ggml.merges holds {' '.join(pair)!r}, expected two tokens that make a third"
                )
        return pairs

    def error(self, words: str) -> ConfigurationError:
        """Return the error that names the file."""
        return ConfigurationError(f"{self._file.path}: {words}")


def tokenizer_json(vocabulary: GgufVocabulary, architecture: str) -> dict[str, Any]:
    """Return tokenizer.json.

    Raises:
        ConfigurationError: the tokenizer is malformed, or of a kind that is not supported.
    """
    described = _byte_level(vocabulary) if vocabulary.model == "gpt2" else _sentence_piece(vocabulary, architecture)
    tokens = described["model"]["vocab"]
    added = [
        {"id": index, "content": token, "special": kind == _CONTROL}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for index, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if kind in (_CONTROL, _USER_DEFINED) and tokens.get(token) == index and token
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "post_processor": _additions(vocabulary),
        **described,
    }


def tokenizer_config(vocabulary: GgufVocabulary, templates: dict[str, str]) -> dict[str, Any]:
    """Return tokenizer_config.json, with the chat templates by their names."""
    config: dict[str, Any] = {
        name: vocabulary.tokens[index]
        for name, key in _SPECIAL.items()
        if (index := vocabulary.special_id(key)) is not None
    }
    if templates:
        config["chat_template"] = [{"name": name, "template": template} for name, template in templates.items()]
    return config


def _vocab(vocabulary: GgufVocabulary, tokens: list[str]) -> dict[str, int]:
    """Return the tokens with their ids; what only fills the embedding up is no token."""
    found: dict[str, int] = {}
    for index, (token, kind) in enumerate(zip(tokens, vocabulary.types, strict=True)):
        if kind != _UNUSED:
            found.setdefault(token, index)
    return found


def _bpe(vocab: dict[str, int], merges: list[list[str]], **more: Any) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": vocab,
        "merges": merges,
    } | more


def _byte_level(vocabulary: GgufVocabulary) -> dict[str, Any]:
    pre = vocabulary.pre
    steps = _CUTS[pre]
    vocab = _vocab(vocabulary, vocabulary.tokens)
    return {
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
        "pre_tokenizer": steps[0] if len(steps) == 1 else {"type": "Sequence", "pretokenizers": steps},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": _bpe(vocab, vocabulary.merges, ignore_merges=pre in _WHOLE_WORDS),
    }


def _sentence_piece(vocabulary: GgufVocabulary, architecture: str) -> dict[str, Any]:
    gemma = architecture.startswith("gemma")
    tokens = [
        _BLANK * len(t) if t and not t.strip(" ") else t for t in vocabulary.tokens
    ]  # runs of spaces stand as such
    vocab = _vocab(vocabulary, tokens)
    prefix = vocabulary.flag("add_space_prefix", not gemma)
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": _BLANK}
    begin = [{"type": "Prepend", "prepend": _BLANK}] if prefix else []
    end = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    blanks = {"type": "Replace", "pattern": {"String": _BLANK}, "content": " "}
    unknown = vocabulary.special_id("unknown")
    if unknown is None:
        unknown = next((i for i, kind in enumerate(vocabulary.types) if kind == _UNKNOWN), None)
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*begin, spaces]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [blanks, {"type": "ByteFallback"}, {"type": "Fuse"}, *end]},
        "model": _bpe(
            vocab,
            _merges_of(vocabulary, tokens, vocab, by_id=gemma),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=_BYTE in vocabulary.types,
        ),
    }


def _merges_of(vocabulary: GgufVocabulary, tokens: list[str], vocab: dict[str, int], *, by_id: bool) -> list[list[str]]:
    """Return the merges that scores stand for: of two neighbours that make a token, those that make the best one first.

    Args:
        vocabulary: of the file.
        tokens: as texts are written.
        vocab: their ids.
        by_id: whether the best is the first; the scores of Gemma's files do not say.
    """
    scores = vocabulary.numbers("scores", float)
    if not scores:
        raise vocabulary.error("tokenizer.ggml.scores is missing")
    merges: list[tuple[float, int, int, int, list[str]]] = []
    for index, token in enumerate(tokens):
        if vocabulary.types[index] in (_UNKNOWN, _CONTROL, _UNUSED, _BYTE):
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                rank = float(index) if by_id else -scores[index]
                merges.append((rank, index, vocab[left], vocab[right], [left, right]))
    merges.sort(key=lambda merge: merge[:4])
    return [pair for *_, pair in merges]


def _additions(vocabulary: GgufVocabulary) -> dict[str, Any] | None:
    """Return what is put before and behind a text that is no chat."""
    adds_bos = vocabulary.flag("add_bos_token", vocabulary.model == "llama" or vocabulary.pre in _WHOLE_WORDS)
    ends = [
        (vocabulary.special_id("bos"), adds_bos),
        (vocabulary.special_id("eos"), vocabulary.flag("add_eos_token", False)),
    ]
    before, behind = [
        [{"SpecialToken": {"id": vocabulary.tokens[index], "type_id": 0}}] if added and index is not None else []
        for index, added in ends
    ]
    if not before and not behind:
        return None
    special = {
        vocabulary.tokens[index]: {"id": vocabulary.tokens[index], "ids": [index], "tokens": [vocabulary.tokens[index]]}
        for index, added in ends
        if added and index is not None
    }
    text = {"Sequence": {"id": "A", "type_id": 0}}
    second = {"Sequence": {"id": "B", "type_id": 1}}
    return {
        "type": "TemplateProcessing",
        "single": [*before, text, *behind],
        "pair": [*before, text, *behind, *before, second, *behind],
        "special_tokens": special,
    }

"""Tokenizers and model folders built in tests: every kind of decoder, no files from elsewhere."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

SPECIALS = ("<|end|>", "<|start|>", "<|pad|>")
CHATML = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
EOS_ID = 256
VOCAB_SIZE = 300
"""Of the tiny model's embedding: more rows than the tokenizer has ids."""


def byte_level() -> Tokenizer:
    """Return a byte-level tokenizer: ids 0..255 are the bytes in order of their value, then SPECIALS, then merges."""
    vocab = _byte_chars()
    merges = [("h", "e"), ("l", "l"), ("Ġ", "w"), ("å", "ħ")]
    for offset, (left, right) in enumerate(merges):
        vocab[left + right] = 256 + len(SPECIALS) + offset
    # Ids between are the special tokens, which the model must know as well for the numbers to hold.
    for offset, special in enumerate(SPECIALS):
        vocab[special] = 256 + offset
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(special, special=True, normalized=False) for special in SPECIALS])
    return tokenizer


def _byte_chars() -> dict[str, int]:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    chars = {chr(byte): byte for byte in printable}
    rest = [byte for byte in range(256) if byte not in printable]
    return chars | {chr(256 + i): byte for i, byte in enumerate(rest)}


def _words() -> list[str]:
    return [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{b:02X}>" for b in range(256)),
        "▁",
        "▁we",
        "▁walk",
        "▁home",
        "now",
        "▁▁",
        "é",
    ]


def llama_like() -> Tokenizer:
    """Return a SentencePiece-like tokenizer with byte fallback, whose decoder drops the text's first space."""
    vocab = {word: i for i, word in enumerate(_words())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("▁", "▁")], byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def metaspace() -> Tokenizer:
    """Return a tokenizer with a Metaspace decoder."""
    pieces = ["<unk>", "</s>", "▁", "▁we", "▁walk", "▁home", "now", "▁▁big", "x▁y", "é"]
    tokenizer = Tokenizer(models.Unigram([(piece, -float(i)) for i, piece in enumerate(pieces)], 0, False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


def word_piece() -> Tokenizer:
    """Return a tokenizer whose decoder looks at neighbours, so that no table of bytes describes it."""
    words = ["[UNK]", "[SEP]", "we", "walk", "##ed", "##ing", "home", ".", "!", "do", "n't"]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    tokenizer.add_special_tokens(["[SEP]"])
    return tokenizer


def write_model_folder(
    folder: Path,
    tokenizer: Tokenizer | None = None,
    *,
    chat_template: str | None = CHATML,
    generation_config: dict[str, Any] | None = None,
    tokenizer_config: dict[str, Any] | None = None,
) -> Path:
    """Write what a frontend reads of a model, and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (tokenizer or byte_level()).save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"vocab_size": VOCAB_SIZE, "eos_token_id": EOS_ID}))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config or {}))
    (folder / "generation_config.json").write_text(json.dumps(generation_config or {}))
    if chat_template is not None:
        (folder / "chat_template.jinja").write_text(chat_template)
    return folder

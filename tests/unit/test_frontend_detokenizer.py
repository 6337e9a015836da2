"""Incremental decoding equals decoding at the end, and never shows half a character."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from octavo.frontend.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from octavo.frontend.tokenizer import ModelTokenizer
from tests.support.tiny_tokenizers import byte_level, llama_like, metaspace, word_piece, write_model_folder

KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": byte_level,
    "llama_like": llama_like,
    "metaspace": metaspace,
    "word_piece": word_piece,
}
SCRIPTS = "안녕하세요 สวัสดีครับ 👨‍👩‍👧‍👦 naïve 東京 \U0001f600!"


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Tokenizer, ModelTokenizer]]:
    found = {}
    for name, make in KINDS.items():
        folder: Path = write_model_folder(tmp_path_factory.mktemp(name), make())
        found[name] = (make(), ModelTokenizer(folder))
    return found


def pieces(detokenizer: Detokenizer, ids: Sequence[int]) -> list[str]:
    return [*(detokenizer.push(i) for i in ids), detokenizer.flush()]


@pytest.mark.parametrize("name", ["byte_level", "metaspace", "word_piece"])
@settings(max_examples=150, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_pieces_make_the_text_of_all_ids(
    name: str, loaded: dict[str, tuple[Tokenizer, ModelTokenizer]], data: st.DataObject, skip: bool
) -> None:
    raw, model = loaded[name]
    # Ids beyond the tokenizer's are drawn too: padded rows of an embedding have no text.
    ids = data.draw(st.lists(st.integers(0, raw.get_vocab_size() + 5), max_size=40))
    assert "".join(pieces(model.detokenizer(skip), ids)) == raw.decode(ids, skip_special_tokens=skip)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_byte_fallback_follows_utf8(
    loaded: dict[str, tuple[Tokenizer, ModelTokenizer]], data: st.DataObject, skip: bool
) -> None:
    raw, model = loaded["llama_like"]
    ids = data.draw(st.lists(st.integers(0, raw.get_vocab_size() - 1), max_size=40))
    shown = "".join(pieces(model.detokenizer(skip), ids))
    kept = [i for i in ids if not (skip and i < 3)]
    data_bytes = b"".join(model.token_bytes(i) for i in kept)
    text = data_bytes.decode("utf-8", "replace")
    assert shown == text.removeprefix(" ")
    if "\ufffd" not in text:
        assert shown == raw.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("name", ["byte_level", "llama_like"])
def test_scripts_of_several_bytes_come_whole(name: str, loaded: dict[str, tuple[Tokenizer, ModelTokenizer]]) -> None:
    raw, model = loaded[name]
    ids = raw.encode(SCRIPTS).ids
    shown = pieces(model.detokenizer(True), ids)
    assert "".join(shown) == SCRIPTS
    assert not any("\ufffd" in piece for piece in shown)
    assert len(ids) > len(SCRIPTS)  # several ids a character, or the test shows nothing


@pytest.mark.parametrize("name", ["llama_like", "metaspace"])
def test_spaces_between_words_are_kept(name: str, loaded: dict[str, tuple[Tokenizer, ModelTokenizer]]) -> None:
    raw, model = loaded[name]
    vocab = raw.get_vocab()
    ids = [vocab[word] for word in ("▁we", "▁walk", "▁home", "▁", "now")]
    assert pieces(model.detokenizer(True), ids) == ["we", " walk", " home", " ", "now", ""]


def test_an_incomplete_character_shows_only_at_the_end(loaded: dict[str, tuple[Tokenizer, ModelTokenizer]]) -> None:
    _, model = loaded["byte_level"]
    euro = list("€".encode())
    assert pieces(model.detokenizer(True), [*euro, *euro[:2]]) == ["", "", "€", "", "", "\ufffd"]


def test_kinds_of_decoders_are_recognised(loaded: dict[str, tuple[Tokenizer, ModelTokenizer]]) -> None:
    found = {name: type(model.detokenizer(True)) for name, (_, model) in loaded.items()}
    table, window = ByteDetokenizer, WindowDetokenizer
    assert found == {"byte_level": table, "llama_like": table, "metaspace": table, "word_piece": window}


@pytest.mark.parametrize("name", list(KINDS))
def test_ids_without_a_token_have_no_text(name: str, loaded: dict[str, tuple[Tokenizer, ModelTokenizer]]) -> None:
    raw, model = loaded[name]
    outside = raw.get_vocab_size() + 3
    assert pieces(model.detokenizer(False), [outside, outside]) == ["", "", ""]
    assert model.token_bytes(outside) == b""


def test_token_bytes_are_exact(loaded: dict[str, tuple[Tokenizer, ModelTokenizer]]) -> None:
    _, byte_model = loaded["byte_level"]
    assert [byte_model.token_bytes(i) for i in (0, 0x20, 0xE2, 255)] == [b"\x00", b" ", b"\xe2", b"\xff"]
    assert byte_model.token_bytes(256) == b"<|end|>"
    raw, fallback = loaded["llama_like"]
    assert fallback.token_bytes(raw.get_vocab()["<0xE2>"]) == b"\xe2"
    assert fallback.token_bytes(raw.get_vocab()["▁we"]) == b" we"

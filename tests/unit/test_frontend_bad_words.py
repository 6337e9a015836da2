"""Bad words: texts to the ids that workers look for."""

from pathlib import Path

import msgspec
import pytest
from tokenizers import Tokenizer

from octavo.frontend.bad_words import check_bad_words, with_bad_words
from octavo.frontend.config import FrontendConfig
from octavo.frontend.errors import InvalidArgument
from octavo.frontend.generation_config import SamplingDefaults
from octavo.frontend.tokenizer import ModelTokenizer
from octavo.frontend.validation import Bounds, GenerationParams, check_params
from octavo.v1 import generation_pb2 as pb
from octavo.wire.columns import pack_ints, unpack_ints
from octavo.wire.errors import MalformedMessage
from octavo.wire.plan import RowSampling
from tests.support.tiny_tokenizers import byte_level, llama_like

PATH = "input.sampling.bad_words"
VOCAB = 300
W = 261  # of the byte-level tokenizer: " w"


@pytest.fixture(scope="module")
def bytewise(tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    return load(tmp_path_factory.mktemp("bytes"), byte_level())


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    return load(tmp_path_factory.mktemp("llama"), llama_like())


def load(folder: Path, tokenizer: Tokenizer) -> ModelTokenizer:
    tokenizer.save(str(folder / "tokenizer.json"))
    return ModelTokenizer(folder)


def params(*allowed: int) -> GenerationParams:
    bounds = Bounds(FrontendConfig(Path("model"), ("tiny",), "ipc:///nowhere"), VOCAB, 64, SamplingDefaults(), (256,))
    request = pb.GenerationInput(sampling=pb.SamplingParams(allowed_token_ids=allowed))
    return check_params(request, bounds)


def words_of(sampling: RowSampling) -> list[list[int]]:
    ids = list(unpack_ints(sampling.bad_word_ids))
    return [[ids.pop(0) for _ in range(length)] for length in unpack_ints(sampling.bad_word_lengths)]


def resolve(tokenizer: ModelTokenizer, *words: str, allowed: tuple[int, ...] = ()) -> list[list[int]]:
    return words_of(with_bad_words(params(*allowed), words, tokenizer, VOCAB).sampling)


def test_a_word_is_bad_with_and_without_a_space(bytewise: ModelTokenizer) -> None:
    w, x = b"wx"
    assert resolve(bytewise, "wx") == [[w, x], [W, x]]
    assert resolve(bytewise, " wx") == [[w, x], [W, x]], "the caller's own space changes nothing"
    assert resolve(bytewise, "x", "x") == [[x], [32, x]], "each once"
    assert resolve(bytewise, " ") == [[32]]
    assert resolve(bytewise, "\n") == [[10], [32, 10]]


def test_special_tokens_in_a_word_are_text(bytewise: ModelTokenizer) -> None:
    assert resolve(bytewise, "<|end|"[:4])[0] == list(b"<|en")


def test_nothing_is_added_to_a_word(llama: ModelTokenizer) -> None:
    assert all(1 not in word for word in resolve(llama, "é")), "no beginning of sequence"


@pytest.mark.parametrize(
    ("words", "path", "says"),
    [
        ([""], f"{PATH}[0]", "empty"),
        (["a"] * 33, PATH, "33 entries, limit 32"),
    ],
)
def test_lists_that_are_refused_unread(words: list[str], path: str, says: str) -> None:
    with pytest.raises(InvalidArgument, match=says) as raised:
        check_bad_words(words)
    assert raised.value.field_path == path


def test_words_that_are_too_long(bytewise: ModelTokenizer) -> None:
    assert resolve(bytewise, "abcdefg") == [list(b"abcdefg"), list(b" abcdefg")]
    for word, says in (("abcdefgh", "9 tokens, limit 8"), ("x" * 10**6, "1000000 bytes, limit")):
        with pytest.raises(InvalidArgument, match=says) as raised:
            resolve(bytewise, "a", word)
        assert raised.value.field_path == f"{PATH}[1]"


def test_something_must_be_left_to_draw(bytewise: ModelTokenizer) -> None:
    assert resolve(bytewise, "ab", allowed=(97, 98)) == [[97, 98], [32, 97, 98]]
    with pytest.raises(InvalidArgument, match="all 2 allowed_token_ids are bad words"):
        resolve(bytewise, "a", "b", allowed=(97, 98))


@pytest.mark.parametrize(
    ("ids", "lengths"), [([1, 2], [1]), ([1], [1, 0]), (range(9), [9]), ([1] * 65, [1] * 65), ([], [0])]
)
def test_columns_that_contradict_are_no_message(ids: list[int], lengths: list[int]) -> None:
    with pytest.raises(MalformedMessage, match="bad words"):
        RowSampling(seed=0, bad_word_ids=pack_ints(ids), bad_word_lengths=pack_ints(lengths))
    encoded = msgspec.msgpack.encode(RowSampling(seed=0, bad_word_ids=pack_ints([7]), bad_word_lengths=pack_ints([1])))
    assert words_of(msgspec.msgpack.decode(encoded, type=RowSampling)) == [[7]]

"""What bounds large requests before they are parsed: fields of messages, values of bodies, bytes of all together."""

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.frontend.budget import FREE_BYTES, ByteBudget
from octavo.frontend.errors import ContextLengthExceeded, InvalidArgument, TooManyBytes
from octavo.frontend.large_messages import MAX_FIELDS, MAX_NUMBERS, Unread, check_fields
from octavo.frontend.long_prompts import refuse_by_beginning
from octavo.frontend.openai.bodies import check_values
from octavo.frontend.openai.errors import HttpError
from octavo.v1 import generation_pb2 as pb


def holds_at_most(body: bytes, limit: int) -> bool:
    try:
        check_values(body, limit)
    except HttpError:
        return False
    return True


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.sampled_from('a,"\\[]{}:é\n')),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(st.sampled_from('a,"\\')), inner, max_size=5),
    max_leaves=30,
)


def num_commas(value: object) -> int:
    if isinstance(value, dict):
        return max(0, len(value) - 1) + sum(map(num_commas, value.values()))
    if isinstance(value, list):
        return max(0, len(value) - 1) + sum(map(num_commas, value))
    return 0


@given(JSON)
def test_commas_between_values_are_counted_and_no_others(value: object) -> None:
    body, count = json.dumps(value).encode(), num_commas(value)
    assert holds_at_most(body, count)
    assert count == 0 or not holds_at_most(body, count - 1)


def test_too_many_values_are_a_bad_request() -> None:
    with pytest.raises(HttpError, match="more than 1 values") as raised:
        check_values(b"[1,2,3]", 1)
    assert (raised.value.status, raised.value.code) == (400, "invalid_argument")


def test_texts_with_commas_are_not_many_values() -> None:
    assert holds_at_most(json.dumps({"prompt": 'a, "b", \\, \\"' * 5000}).encode(), 10)


@pytest.mark.parametrize(
    "body",
    [b"[" + b"1," * 50, b'"a" ' * 50, b'["' + b'\\"",' * 50, b'{"prompt": [' + b'"",' * 50, b"," * 50],
    ids=["open", "no commas", "escapes", "texts", "commas"],
)
def test_what_is_no_json_is_bounded_as_well(body: bytes) -> None:
    assert not holds_at_most(body + b"," * 12, 11)


@given(st.binary(max_size=200), st.integers(0, 20))
def test_any_bytes_are_counted(body: bytes, limit: int) -> None:
    holds_at_most(body, limit)


def fields_of(message: pb.GenerateRequest) -> int:
    """Return the least limit that a message passes."""
    data = message.SerializeToString()
    for limit in range(100):
        try:
            check_fields(data, pb.GenerateRequest, limit)
        except InvalidArgument:
            continue
        return limit
    raise AssertionError("more than 100 fields")


def test_fields_of_messages_within_count_and_packed_lists_are_one() -> None:
    request = pb.GenerateRequest()
    assert fields_of(request) == 0
    request.input.token_ids.ids.extend(range(50_000))
    assert fields_of(request) == 3
    request.input.stopping.stop_strings.extend(["a", "", "b"])
    assert fields_of(request) == 3 + 1 + 3
    request.input.sampling.temperature = 1.0  # four bytes
    request.input.sampling.seed = 2**64 - 1  # ten bytes
    assert fields_of(request) == 7 + 1 + 2
    request.input.chat.messages.add(role="u")
    assert fields_of(request) == 10 - 2 + 3  # a prompt has one form


@pytest.mark.parametrize(
    ("data", "path"),
    [
        (b"\xa0\x06\x01", ""),
        (b"\x0a\x03\xa0\x06\x01", "input"),
        (b"\x0a\x07\x22\x05\x0a\x03\xa0\x06\x01", "input.chat.messages"),
    ],
)
def test_unknown_fields_are_named(data: bytes, path: str) -> None:
    with pytest.raises(InvalidArgument, match="field number 100 is not known") as raised:
        check_fields(data, pb.GenerateRequest)
    assert raised.value.field_path == path


@pytest.mark.parametrize("field", [b"\x22\x02\x0a\x00", b"\x32\x02\x1a\x00", b"\x2a\x02\x52\x00", b"\x1a\x02\x08\x01"])
def test_many_small_fields_are_refused_before_they_are_parsed(field: bytes) -> None:
    inner = field * (MAX_FIELDS // 2 + 1)
    size = len(inner)
    data = b"\x0a" + bytes([size & 127 | 128, size >> 7 & 127 | 128, size >> 14]) + inner
    with pytest.raises(InvalidArgument, match="more than 131072 fields"):
        Unread(pb.GenerateRequest, data).read()


@pytest.mark.parametrize(
    ("number", "count", "fits"), [(1, MAX_NUMBERS, True), (1, MAX_NUMBERS + 1, False), (300, MAX_NUMBERS, True)]
)
def test_numbers_of_a_packed_list_are_counted(number: int, count: int, fits: bool) -> None:
    data = pb.GenerateRequest(input=pb.GenerationInput(token_ids=pb.TokenIds(ids=[number] * count))).SerializeToString()
    if fits:
        assert len(Unread(pb.GenerateRequest, data).read().input.token_ids.ids) == count
        return
    with pytest.raises(InvalidArgument, match=f"more than {MAX_NUMBERS} numbers") as raised:
        Unread(pb.GenerateRequest, data).read()
    assert raised.value.field_path == "input.token_ids.ids"


@given(st.binary(max_size=300))
def test_any_bytes_are_counted_or_refused(data: bytes) -> None:
    for prefix in (b"", b"\x0a\xff\x01", b"\x0a\x0a\x22\x04"):
        try:
            check_fields(prefix + data, pb.GenerateRequest)
        except InvalidArgument:
            continue


def test_what_is_counted_is_what_is_parsed() -> None:
    source = random.Random(5)
    for _ in range(300):
        request = pb.GenerateRequest()
        request.input.stopping.stop_strings.extend(["x" * source.randrange(300) for _ in range(source.randrange(5))])
        request.input.sampling.logit_bias.update({source.randrange(2**32): 1.0 for _ in range(source.randrange(5))})
        data = request.SerializeToString()
        assert Unread(pb.GenerateRequest, data).read() == request
        cut = data[: source.randrange(len(data) + 1)]
        try:
            found = Unread(pb.GenerateRequest, cut).read()
        except InvalidArgument:
            with pytest.raises(Exception, match="pars"):
                pb.GenerateRequest.FromString(cut)
        else:
            assert found == pb.GenerateRequest.FromString(cut)


def test_shares_are_bounded_together_and_given_back() -> None:
    budget = ByteBudget(1000)
    with budget.share() as one, budget.share() as other:
        one.grow(FREE_BYTES)
        assert budget.used == 0
        one.grow(FREE_BYTES + 600)
        one.grow(FREE_BYTES + 500)  # never less
        other.grow(FREE_BYTES + 400)
        assert budget.used == 1000
        for share in (one, other):
            with pytest.raises(TooManyBytes, match="1000 bytes"):
                share.grow(FREE_BYTES + 601)
        with budget.share() as small:
            small.grow(FREE_BYTES)
        assert budget.used == 1000
    assert budget.used == 0


class CountingTokenizer:
    """A token for each character; remembers how much it was asked to tokenise."""

    def __init__(self) -> None:
        self.num_chars = 0

    def encode_text(self, text: str) -> list[int]:
        self.num_chars += len(text)
        return [0] * len(text)


@pytest.mark.parametrize("texts", [["x" * 10**6], ["x" * 1000] * 1000, ["", "x" * 10**6]])
def test_a_prompt_that_is_far_too_long_is_refused_by_its_beginning(texts: list[str]) -> None:
    tokenizer: Any = CountingTokenizer()
    with pytest.raises(ContextLengthExceeded, match="more than 150 tokens, limit 100") as raised:
        refuse_by_beginning(tokenizer, texts, 100, "input.text")
    assert raised.value.field_path == "input.text"
    assert tokenizer.num_chars <= 8 * 100


@pytest.mark.parametrize("texts", [["x" * 1600], ["x" * 800, "x" * 800], [""], []])
def test_a_prompt_that_may_fit_is_not_looked_at_twice(texts: list[str]) -> None:
    tokenizer: Any = CountingTokenizer()
    refuse_by_beginning(tokenizer, texts, 100, "input.text")
    assert tokenizer.num_chars == 0

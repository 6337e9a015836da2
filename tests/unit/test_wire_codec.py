"""The codec: what is sent comes back, and what is no message never gets further than the decoder."""

import math
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.wire import codec
from octavo.wire.columns import pack_floats, pack_ints, same_length, unpack_floats, unpack_ints
from octavo.wire.errors import MalformedMessage, ProtocolMismatch
from octavo.wire.handshake import PROTOCOL_VERSION, FrontendHello, Heartbeat, WorkerFacts, WorkerHello
from octavo.wire.plan import FLAG_SAMPLE, NewRow, RowLogprobs, RowSampling, StepPlan, StepResult
from octavo.wire.requests import (
    BeamParams,
    ChoiceFinished,
    DrainBegun,
    DrainService,
    FinishReason,
    FrontendDrains,
    PrefixCacheReset,
    ReplaceScheduler,
    ResetPrefixCache,
    SchedulerLeaves,
    ServiceDrains,
    StepOutput,
    SubmitRequest,
)

int32 = st.integers(-(2**31), 2**31 - 1)


@given(st.lists(int32))
def test_int_columns_round_trip(values: list[int]) -> None:
    assert list(unpack_ints(pack_ints(values))) == values


@given(st.lists(st.floats(width=32, allow_nan=False)))
def test_float_columns_round_trip(values: list[float]) -> None:
    assert list(unpack_floats(pack_floats(values))) == values


def test_columns_are_little_endian() -> None:
    assert pack_ints([1, -2]) == b"\x01\x00\x00\x00\xfe\xff\xff\xff"


def test_an_integer_that_does_not_fit_is_refused() -> None:
    with pytest.raises(OverflowError):
        pack_ints([2**31])


def test_columns_of_unequal_length_are_refused() -> None:
    with pytest.raises(MalformedMessage, match=r"rows differ in length: \[2, 1\]"):
        same_length("rows", pack_ints([1, 2]), pack_ints([1]))
    with pytest.raises(MalformedMessage, match="not a multiple of 4"):
        same_length("rows", b"abc")


PLAN = StepPlan(
    epoch=7,
    step=3,
    row=pack_ints([0, 5]),
    num_tokens=pack_ints([1, 64]),
    flags=pack_ints([FLAG_SAMPLE, 0]),
    new_rows=(
        NewRow(
            row=5,
            request="f.1",
            choice=0,
            num_prompt_tokens=3,
            num_computed_tokens=0,
            token_ids=pack_ints([4, 5, 6]),
            sampling=RowSampling(
                seed=2**64 - 1, temperature=0.5, logit_bias_ids=pack_ints([9])[:4], logit_bias_values=pack_floats([1.5])
            ),
        ),
    ),
    append_row=pack_ints([5]),
    append_block=pack_ints([17]),
)
COPIES = {"copy_row": pack_ints([0, 5]), "copy_src": pack_ints([1, 2]), "copy_dst": pack_ints([3, 4])}
BEAMS = {"beam_row": pack_ints([0, 1]), "beam_src": pack_ints([0, 0]), "beam_token": pack_ints([9, 8])}
FORKS = {"fork_src": pack_ints([0, 0]), "fork_dst": pack_ints([1, 2]), "fork_choice": pack_ints([1, 2])}
RESULT = StepResult(
    7, 3, pack_ints([0]), pack_ints([42]), logprobs=(RowLogprobs(0, -0.5, 1, pack_ints([42]), pack_floats([-0.5])),)
)
OUTPUT = StepOutput(
    handle=pack_ints([1]),
    choice=pack_ints([0]),
    position=pack_ints([4]),
    token=pack_ints([9]),
    finished=(ChoiceFinished(1, 0, FinishReason.STOP, 5),),
)
SUBMIT = SubmitRequest(
    handle=1,
    prompt_ids=pack_ints([1, 2]),
    num_choices=2,
    max_tokens=9,
    sampling=RowSampling(seed=0),
    output_ids=(b"", b""),
)
SEARCHED = SubmitRequest(
    handle=1,
    prompt_ids=pack_ints([1, 2]),
    num_choices=2,
    max_tokens=9,
    sampling=RowSampling(seed=0, logprobs=4),
    stop_token_ids=pack_ints([5]),
    output_ids=(b"", b""),
    beams=BeamParams(3, 0.5, True),
)
CACHED = msgspec.structs.replace(SUBMIT, caller="c", priority=-(2**31), prefix_root=b"r" * 32, prefix_keys=b"k" * 64)


@pytest.mark.parametrize(
    "message",
    [
        SUBMIT,
        CACHED,
        SEARCHED,
        ResetPrefixCache(3),
        DrainService(3),
        DrainService(),
        FrontendDrains(drained=True),
        ReplaceScheduler(3),
        FrontendHello(1, "d", "b", 1),
        WorkerHello(1, "d", "b", 2, 0, WorkerFacts(9, 16, 100, 64, 4, 64, "cpu", "cpu", "float32")),
        RESULT,
        Heartbeat(),
    ],
)
def test_messages_of_peers_round_trip(message: codec.FromPeer) -> None:
    assert codec.decode_from_peer(codec.encode(message, 11, 12)) == ((11, 12), message)


@pytest.mark.parametrize(
    "message",
    [
        PLAN,
        msgspec.structs.replace(PLAN, **COPIES, **FORKS, **BEAMS),
        OUTPUT,
        PrefixCacheReset(3, 17),
        DrainBegun(3, 2),
        ServiceDrains(),
        SchedulerLeaves(3, 2),
        Heartbeat(),
    ],
)
def test_messages_of_the_scheduler_round_trip(message: codec.FromScheduler) -> None:
    assert codec.decode_from_scheduler(codec.encode(message, 2**63 - 1, 1)) == ((2**63 - 1, 1), message)


def test_a_plan_is_no_message_of_a_peer() -> None:
    with pytest.raises(MalformedMessage):
        codec.decode_from_peer(codec.encode(PLAN))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_tokens": pack_ints([1])}, "rows differ in length"),
        ({"num_tokens": pack_ints([1, 0])}, "less than one token"),
        ({"row": pack_ints([5, 5])}, "comes twice"),
        ({"row": b"abc"}, "not a multiple of 4"),
        ({"append_row": b""}, "appended blocks differ"),
        ({"copy_src": pack_ints([1]), "copy_dst": pack_ints([2])}, r"copies differ in length: \[0, 1, 1\]"),
        ({"copy_row": pack_ints([5]), "copy_src": pack_ints([1])}, "copies differ"),
        (COPIES | {"copy_dst": pack_ints([3, 3])}, "target of two copies"),
        (COPIES | {"copy_dst": pack_ints([3, 2])}, "source and target in one plan"),
        ({"fork_src": pack_ints([0]), "fork_dst": pack_ints([1])}, r"forks differ in length: \[1, 1, 0\]"),
        ({"fork_choice": pack_ints([0])}, "forks differ"),
        (BEAMS | {"beam_token": pack_ints([9])}, r"beams differ in length: \[2, 2, 1\]"),
        (BEAMS | {"beam_row": pack_ints([1, 1])}, "a row goes on with two ids"),
        ({"epoch": -1}, "Expected `int` >= 0"),
    ],
)
def test_a_plan_that_contradicts_itself_is_malformed(change: dict[str, object], words: str) -> None:
    fields = [msgspec.structs.asdict(PLAN)[f] if f not in change else change[f] for f in StepPlan.__struct_fields__]
    frame = codec.encode(Heartbeat())[:24] + msgspec.msgpack.encode(["plan", *fields])
    with pytest.raises(MalformedMessage, match=words):
        codec.decode_from_scheduler(frame)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prefix_root": b"r" * 31}, "prefix root of 31 bytes and keys of 64"),
        ({"prefix_keys": b"k" * 63}, "prefix root of 32 bytes and keys of 63"),
        ({"prefix_root": b""}, "prefix root of 0 bytes and keys of 64"),
        ({"priority": 2**31}, "Expected `int` <= 2147483647"),
        ({"priority": -(2**31) - 1}, "Expected `int` >= -2147483648"),
    ],
)
def test_a_submitted_request_that_contradicts_itself_is_malformed(change: dict[str, object], words: str) -> None:
    fields = [change.get(f, getattr(CACHED, f)) for f in SubmitRequest.__struct_fields__]
    with pytest.raises(MalformedMessage, match=words):
        codec.decode_from_peer(codec.encode(Heartbeat())[:24] + msgspec.msgpack.encode(["submit", *fields]))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_choices": 4, "output_ids": ()}, "4 choices of 3 beams"),
        ({"output_ids": (b"", pack_ints([1]))}, "cannot go on from output"),
        ({"finished_choices": pack_ints([0])}, "cannot go on from output"),
        ({"grammar": b"g"}, "follows no grammar"),
        ({"sampling": RowSampling(seed=0, logprobs=3)}, "3 beams are chosen from 3 candidates"),
        ({"beams": [3, 11.0, False]}, "length_penalty = 11.0 is out of range"),
        ({"beams": [3, float("nan"), False]}, "length_penalty = nan is out of range"),
        ({"beams": [0, 1.0, False]}, "Expected `int` >= 1"),
    ],
)
def test_a_search_that_contradicts_itself_is_malformed(change: dict[str, object], words: str) -> None:
    fields = [change.get(f, getattr(SEARCHED, f)) for f in SubmitRequest.__struct_fields__]
    with pytest.raises(MalformedMessage, match=words):
        codec.decode_from_peer(codec.encode(Heartbeat())[:24] + msgspec.msgpack.encode(["submit", *fields]))


def test_another_protocol_version_is_named() -> None:
    frame = bytearray(codec.encode(Heartbeat()))
    frame[2] = 99
    with pytest.raises(ProtocolMismatch, match=f"version 99, this process speaks {PROTOCOL_VERSION}"):
        codec.decode_from_peer(bytes(frame))


def test_deep_nesting_is_malformed() -> None:
    with pytest.raises(MalformedMessage):
        codec.decode_from_peer(codec.encode(Heartbeat())[:24] + b"\x91" * 100_000 + b"\xc0")


@given(st.binary(max_size=200))
def test_random_bytes_are_malformed(garbage: bytes) -> None:
    with pytest.raises((MalformedMessage, ProtocolMismatch)):
        codec.decode_from_peer(garbage)


def test_no_mutation_of_a_message_gets_past_the_decoder_as_anything_but_a_message() -> None:
    rng = random.Random(5)
    frames = [codec.encode(m, 1, 1) for m in (SUBMIT, RESULT)]
    decoded = 0
    for _ in range(5000):
        frame = bytearray(rng.choice(frames))
        for _ in range(rng.randint(1, 4)):
            frame[rng.randrange(len(frame))] = rng.randrange(256)
        try:
            codec.decode_from_peer(bytes(frame[: rng.randint(0, len(frame))] if rng.random() < 0.3 else frame))
            decoded += 1
        except (MalformedMessage, ProtocolMismatch):
            continue
    assert decoded < 5000


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", math.nan),
        ("temperature", -1.0),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("min_p", -0.1),
        ("presence_penalty", math.inf),
        ("frequency_penalty", math.nan),
        ("repetition_penalty", 0.0),
        ("logit_bias_values", pack_floats([math.nan])),
        ("seed", -1),
    ],
)
def test_sampling_numbers_out_of_range_do_not_get_past_the_decoder(name: str, value: object) -> None:
    sampling = RowSampling(seed=0, logit_bias_ids=pack_ints([5]), logit_bias_values=pack_floats([1.0]))
    fields = [value if f == name else getattr(sampling, f) for f in RowSampling.__struct_fields__]
    submit = [fields if f == "sampling" else getattr(SUBMIT, f) for f in SubmitRequest.__struct_fields__]
    with pytest.raises(MalformedMessage, match=r"out of range|>= 0"):
        codec.decode_from_peer(codec.encode(Heartbeat())[:24] + msgspec.msgpack.encode(["submit", *submit]))

"""Every bad input is refused by field, value and limit; every good one becomes what it means."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.frontend.config import FrontendConfig
from octavo.frontend.errors import ContextLengthExceeded, InvalidArgument
from octavo.frontend.generation_config import SamplingDefaults
from octavo.frontend.validation import (
    Bounds,
    GenerationCall,
    GenerationParams,
    check_params,
    check_prompt_form,
    check_token_ids,
    resolve_call,
)
from octavo.v1 import generation_pb2 as pb
from octavo.wire.columns import unpack_floats, unpack_ints
from octavo.wire.plan import RowSampling
from octavo.wire.requests import BeamParams

CONFIG = FrontendConfig(model_path=Path("model"), served_model_names=("tiny",), address="ipc:///nowhere")
BOUNDS = Bounds(CONFIG, vocab_size=300, max_model_len=64, defaults=SamplingDefaults(), eos_ids=(256,))


def parse(**fields: Any) -> pb.GenerationInput:
    return json_format.ParseDict(fields, pb.GenerationInput())


def params(bounds: Bounds = BOUNDS, **fields: Any) -> GenerationParams:
    return check_params(parse(**fields), bounds)


def resolve(num_prompt_tokens: int, **stopping: Any) -> GenerationCall:
    return resolve_call(params(stopping=stopping), "text", [1] * num_prompt_tokens, BOUNDS)


INVALID = [
    ({"sampling": {"n": 0}}, "input.sampling.n", "0", "128"),
    ({"sampling": {"n": 10**9}}, "input.sampling.n", "1000000000", "128"),
    ({"sampling": {"temperature": -1}}, "input.sampling.temperature", "-1", "0"),
    ({"sampling": {"temperature": "NaN"}}, "input.sampling.temperature", "nan", "0"),
    ({"sampling": {"temperature": "Infinity"}}, "input.sampling.temperature", "inf", "1e+06"),
    ({"sampling": {"topP": 0}}, "input.sampling.top_p", "0", "1"),
    ({"sampling": {"topP": -0.1}}, "input.sampling.top_p", "-0.1", "1"),
    ({"sampling": {"topP": 1.1}}, "input.sampling.top_p", "1.1", "1"),
    ({"sampling": {"topP": "NaN"}}, "input.sampling.top_p", "nan", "1"),
    ({"sampling": {"topK": -2}}, "input.sampling.top_k", "-2", "-1"),
    ({"sampling": {"minP": 1.5}}, "input.sampling.min_p", "1.5", "1"),
    ({"sampling": {"minP": -0.5}}, "input.sampling.min_p", "-0.5", "0"),
    ({"sampling": {"presencePenalty": 2.5}}, "input.sampling.presence_penalty", "2.5", "2"),
    ({"sampling": {"frequencyPenalty": "-Infinity"}}, "input.sampling.frequency_penalty", "-inf", "-2"),
    ({"sampling": {"repetitionPenalty": 0}}, "input.sampling.repetition_penalty", "0", "10"),
    ({"sampling": {"repetitionPenalty": 1e-38}}, "input.sampling.repetition_penalty", "1e-38", "0.01"),
    ({"sampling": {"repetitionPenalty": 11}}, "input.sampling.repetition_penalty", "11", "10"),
    ({"sampling": {"logitBias": {"305": 1}}}, "input.sampling.logit_bias[305]", "305", "300"),
    ({"sampling": {"logitBias": {"5": 1e9}}}, "input.sampling.logit_bias[5]", "1e+09", "100"),
    ({"sampling": {"logitBias": {"5": "NaN"}}}, "input.sampling.logit_bias[5]", "nan", "100"),
    ({"sampling": {"logitBias": {str(i): 1 for i in range(1025)}}}, "input.sampling.logit_bias", "1025", "1024"),
    ({"sampling": {"allowedTokenIds": [1, 300]}}, "input.sampling.allowed_token_ids[1]", "300", "300"),
    ({"sampling": {"allowedTokenIds": [1] * 65537}}, "input.sampling.allowed_token_ids", "65537", "65536"),
    (
        {"sampling": {"allowedTokenIds": [7]}, "stopping": {"minTokens": 2, "maxTokens": 5, "stopTokenIds": [7]}},
        "input.sampling.allowed_token_ids",
        "all 1 allowed ids",
        "min_tokens = 2",
    ),
    ({"sampling": {"beamSearch": {}}}, "input.sampling.beam_search.width", "0", "1 to 16"),
    ({"sampling": {"beamSearch": {"width": 17}}}, "input.sampling.beam_search.width", "17", "16"),
    ({"sampling": {"beamSearch": {"width": 2}, "n": 3}}, "input.sampling.n", "3", "2 (beam_search.width)"),
    (
        {"sampling": {"beamSearch": {"width": 2, "lengthPenalty": 10.5}}},
        "input.sampling.beam_search.length_penalty",
        "10.5",
        "10",
    ),
    (
        {"sampling": {"beamSearch": {"width": 2, "lengthPenalty": "NaN"}}},
        "input.sampling.beam_search.length_penalty",
        "nan",
        "10",
    ),
    ({"stopping": {"maxTokens": 0}}, "input.stopping.max_tokens", "0", "1"),
    ({"stopping": {"minTokens": 65}}, "input.stopping.min_tokens", "65", "64"),
    ({"stopping": {"minTokens": 6, "maxTokens": 5}}, "input.stopping.min_tokens", "6", "5"),
    ({"stopping": {"stopStrings": [""]}}, "input.stopping.stop_strings[0]", "empty", "empty"),
    ({"stopping": {"stopStrings": ["x"] * 10_000}}, "input.stopping.stop_strings", "10000", "16"),
    ({"stopping": {"stopStrings": ["x", "y" * 2**20]}}, "input.stopping.stop_strings[1]", "1048576", "1024"),
    ({"stopping": {"stopTokenIds": [1, 2, 99999]}}, "input.stopping.stop_token_ids[2]", "99999", "300"),
    ({"stopping": {"stopTokenIds": [1] * 257}}, "input.stopping.stop_token_ids", "257", "256"),
    ({"output": {"logprobs": 10**6}}, "input.output.logprobs", "1000000", "20"),
    ({"priority": 1}, "input.priority", "1", "'priority', this service has 'fcfs'"),
    ({"priority": -(2**31)}, "input.priority", "-2147483648", "'priority'"),
    ({"cacheSalt": "x" * 257}, "input.cache_salt", "257", "256"),
    ({"cacheSalt": "é" * 129}, "input.cache_salt", "258 bytes", "256"),
    ({"output": {"detokenize": False}, "stopping": {"stopStrings": ["x"]}}, "input.stopping.stop_strings", "", ""),
]


@pytest.mark.parametrize(("fields", "path", "value", "limit"), INVALID, ids=lambda v: str(v)[:60])
def test_bad_parameters_are_named(fields: dict[str, Any], path: str, value: str, limit: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        params(**fields)
    assert raised.value.field_path == path
    assert value in raised.value.message
    assert limit in raised.value.message


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"sampling": {"temperature": 0.5}}, "input.sampling.temperature"),
        ({"sampling": {"topP": 0.5}}, "input.sampling.top_p"),
        ({"sampling": {"topK": 5}}, "input.sampling.top_k"),
        ({"sampling": {"minP": 0.5}}, "input.sampling.min_p"),
        ({"sampling": {"presencePenalty": 1}}, "input.sampling.presence_penalty"),
        ({"sampling": {"frequencyPenalty": 1}}, "input.sampling.frequency_penalty"),
        ({"sampling": {"repetitionPenalty": 1.5}}, "input.sampling.repetition_penalty"),
        ({"sampling": {"logitBias": {"5": 1}}}, "input.sampling.logit_bias"),
        ({"sampling": {"allowedTokenIds": [5]}}, "input.sampling.allowed_token_ids"),
        ({"stopping": {"stopStrings": ["x"]}}, "input.stopping.stop_strings"),
        ({"output": {"logprobs": 0}}, "input.output.logprobs"),
        ({"stopping": {"maxTokens": 0}, "output": {"promptLogprobs": 0}}, "input.stopping.max_tokens"),
    ],
)
def test_a_search_excludes_what_shapes_a_draw(fields: dict[str, Any], path: str) -> None:
    sampling = fields.get("sampling", {}) | {"beamSearch": {"width": 2}}
    with pytest.raises(InvalidArgument, match="a beam search excludes it") as raised:
        params(**(fields | {"sampling": sampling}))
    assert raised.value.field_path == path


def test_a_search_takes_what_turns_draws_off_and_has_candidates_for_each_beam() -> None:
    off = {
        "temperature": 0,
        "topP": 1,
        "topK": -1,
        "minP": 0,
        "presencePenalty": 0,
        "repetitionPenalty": 1,
        "seed": "5",
    }
    sampling = off | {"n": 2, "beamSearch": {"width": 3, "earlyStopping": True}}
    found = params(sampling=sampling, stopping={"minTokens": 2, "stopTokenIds": [9]})
    assert found.beams == BeamParams(3, 1.0, True)
    assert found.num_choices == 2
    row = RowSampling(seed=0, temperature=0.0, min_tokens=2, logprobs=3 + len(found.ending_ids))
    assert found.sampling == row
    assert 9 in found.ending_ids


def test_fields_of_other_versions_are_refused_rather_than_ignored() -> None:
    # Field 11 is an adapter where it exists: to ignore it would let another model answer.
    request = pb.GenerationInput.FromString(b"\x5a\x01x" + parse(text="x").SerializeToString())
    with pytest.raises(InvalidArgument, match="field number 11") as raised:
        check_params(request, BOUNDS)
    assert raised.value.field_path == "input"
    request = parse(text="x")
    request.sampling.MergeFromString(b"\x70\x01")
    with pytest.raises(InvalidArgument, match="field number 14") as raised:
        check_params(request, BOUNDS)
    assert raised.value.field_path == "input.sampling"


def test_unset_parameters_mean_the_defaults() -> None:
    found = params()
    row = found.sampling
    assert (row.temperature, row.top_p, row.top_k, row.min_p, row.repetition_penalty) == (1.0, 1.0, 0, 0.0, 1.0)
    assert (found.num_choices, found.max_tokens, found.min_tokens, found.logprobs) == (1, None, 0, None)
    assert (found.detokenize, found.skip_special_tokens, found.token_ids) == (True, True, False)
    assert found.ending_ids == {256}
    assert not found.caller_stop_ids


def test_the_models_own_defaults_hold_until_they_are_overridden() -> None:
    bounds = Bounds(CONFIG, 300, 64, SamplingDefaults(0.6, 0.9, 20, 0.05, 1.1), (256,))
    row = params(bounds).sampling
    assert (row.temperature, row.top_p, row.top_k, row.min_p) == (0.6, 0.9, 20, 0.05)
    assert row.repetition_penalty == 1.1
    explicit = {"temperature": 0, "topP": 1, "topK": 0, "minP": 0, "repetitionPenalty": 1}
    row = params(bounds, sampling=explicit).sampling
    assert (row.temperature, row.top_p, row.top_k, row.min_p, row.repetition_penalty) == (0.0, 1.0, 0, 0.0, 1.0)


@pytest.mark.parametrize(("given", "meant"), [(0, 0.0), (1e-6, 0.0), (9e-6, 0.0), (1e-4, 1e-4), (1.5, 1.5)])
def test_tiny_temperatures_are_greedy(given: float, meant: float) -> None:
    assert math.isclose(params(sampling={"temperature": given}).sampling.temperature, meant, rel_tol=1e-6)


@pytest.mark.parametrize(("given", "meant"), [(-1, 0), (0, 0), (1, 1), (299, 299), (300, 0), (10**9, 0)])
def test_top_k_of_everything_is_off(given: int, meant: int) -> None:
    assert params(sampling={"topK": given}).sampling.top_k == meant


def test_seeds_are_kept_or_drawn() -> None:
    assert params(sampling={"seed": "0"}).sampling.seed == 0
    assert params(sampling={"seed": str(2**64 - 1)}).sampling.seed == 2**64 - 1
    assert params().sampling.seed != params().sampling.seed


def test_ends_of_sequence_and_stop_ids() -> None:
    found = params(stopping={"stopTokenIds": [7, 5, 7], "minTokens": 2})
    assert found.ending_ids == {5, 7, 256}
    assert found.caller_stop_ids == {5, 7}
    assert list(unpack_ints(found.sampling.stop_token_ids)) == [5, 7, 256]
    ignoring = params(stopping={"stopTokenIds": [7], "ignoreEos": True})
    assert ignoring.ending_ids == {7}


def test_biases_and_allowed_ids_become_columns() -> None:
    row = params(sampling={"logitBias": {"9": -100, "3": 2.5}, "allowedTokenIds": [4, 2, 4]}).sampling
    assert list(unpack_ints(row.logit_bias_ids)) == [3, 9]
    assert list(unpack_floats(row.logit_bias_values)) == [2.5, -100.0]
    assert list(unpack_ints(row.allowed_token_ids)) == [2, 4]


def test_logprobs_zero_is_not_unset() -> None:
    assert params(output={"logprobs": 0}).sampling.logprobs == 0
    assert params().sampling.logprobs == -1


@pytest.mark.parametrize("priority", [0, 1, -1, 2**31 - 1, -(2**31)])
def test_priorities_are_taken_under_their_policy_alone(priority: int) -> None:
    bounds = replace(BOUNDS, scheduling_policy="of one's own", takes_priorities=True)
    assert params(bounds, priority=priority).priority == priority
    assert params(priority=0).priority == 0
    if priority:
        with pytest.raises(InvalidArgument, match="this service has 'fair'"):
            params(replace(BOUNDS, scheduling_policy="fair"), priority=priority)


def test_a_cache_salt_is_kept_up_to_its_limit() -> None:
    assert params().cache_salt == ""
    assert params(cacheSalt="é" * 128).cache_salt == "é" * 128


def test_a_prompt_is_needed() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "input.prompt"),
        ({"text": ""}, "input.text"),
        ({"tokenIds": {}}, "input.token_ids.ids"),
        ({"chat": {}}, "input.chat.messages"),
    ]
    for fields, path in cases:
        with pytest.raises(InvalidArgument) as raised:
            check_prompt_form(parse(**fields), BOUNDS, 1000)
        assert raised.value.field_path == path
    check_prompt_form(parse(text=" "), BOUNDS, 1000)


def test_text_that_cannot_fit_is_refused_before_it_is_tokenised() -> None:
    with pytest.raises(ContextLengthExceeded, match=r"2000 bytes.*1000.*64 tokens"):
        check_prompt_form(parse(text="é" * 1000), BOUNDS, 1000)
    with pytest.raises(ContextLengthExceeded, match="1001 bytes"):
        messages = [{"content": "x" * 500}, {"content": "y" * 501}]
        check_prompt_form(parse(chat={"messages": messages}), BOUNDS, 1000)


def test_a_conversation_has_a_bounded_number_of_messages() -> None:
    with pytest.raises(InvalidArgument, match="4097 messages, limit 4096"):
        check_prompt_form(parse(chat={"messages": [{"role": "user"}] * 4097}), BOUNDS, 10**9)


def test_ids_outside_the_vocabulary_are_named_by_index() -> None:
    check_token_ids([0, 299], BOUNDS)
    with pytest.raises(InvalidArgument, match=r"300 lies outside the vocabulary, \[0, 300\)") as raised:
        check_token_ids([5, 300, 2**32 - 1], BOUNDS)
    assert raised.value.field_path == "input.token_ids.ids[1]"


def test_lengths_name_all_numbers() -> None:
    with pytest.raises(ContextLengthExceeded, match="prompt of 60 tokens and max_tokens 5 exceed the limit of 64"):
        resolve(60, maxTokens=5)
    with pytest.raises(ContextLengthExceeded, match="prompt of 64 tokens, limit 64") as raised:
        resolve(64)
    assert raised.value.metadata == {"prompt_tokens": "64", "max_model_len": "64"}
    with pytest.raises(ContextLengthExceeded, match="prompt of 20000 tokens, limit 64"):
        check_prompt_form(parse(tokenIds={"ids": [5] * 20000}), BOUNDS, 1000)
    with pytest.raises(ContextLengthExceeded, match="4000000000"):
        resolve(3, maxTokens=4_000_000_000)


def test_the_context_is_used_to_its_last_token() -> None:
    assert resolve(63).max_tokens == 1
    assert resolve(60, maxTokens=4).max_tokens == 4
    assert resolve(10).max_tokens == 54
    with pytest.raises(InvalidArgument, match="5, limit 4") as raised:
        resolve(60, minTokens=5)
    assert raised.value.field_path == "input.stopping.min_tokens"
    with pytest.raises(InvalidArgument, match="holds no token"):
        resolve(0)


EXTREMES = st.sampled_from([0, -1, 1, 2, 64, 299, 300, 2**31 - 1, 2**31, 2**32 - 1])
FLOATS = st.sampled_from([0.0, -0.0, 1e-9, 0.5, 1.0, 2.0, 1e38, math.nan, math.inf, -math.inf, -1.0])


@settings(deadline=None)
@given(st.data())
def test_whatever_comes_is_refused_by_name_or_can_run(data: st.DataObject) -> None:
    request = pb.GenerationInput(text="x")
    for message in (request.sampling, request.stopping, request.output):
        for field in message.DESCRIPTOR.fields:
            if not data.draw(st.booleans()) or field.message_type is not None:
                continue
            drawn: st.SearchStrategy[Any] = {
                "float": FLOATS,
                "bool": st.booleans(),
                "string": st.text("ab", max_size=3),
            }.get({2: "float", 8: "bool", 9: "string"}.get(field.type, ""), EXTREMES)
            value = data.draw(drawn)
            try:
                if field.is_repeated:
                    getattr(message, field.name).extend([value] * data.draw(st.integers(0, 20)))
                else:
                    setattr(message, field.name, value)
            except ValueError:
                continue  # what the field's type cannot hold cannot arrive
    refused = None
    try:
        found = resolve_call(check_params(request, BOUNDS), "text", [1, 2, 3], BOUNDS)
    except InvalidArgument as error:
        refused = error
    if refused is not None:
        assert refused.field_path.startswith("input.")
        assert refused.message
        return
    row = found.params.sampling
    assert 1 <= found.max_tokens <= 61
    assert 1 <= found.params.num_choices <= 128
    assert 0 <= row.temperature < math.inf
    assert 0 < row.top_p <= 1
    assert 0 <= row.top_k < 300
    assert all(token_id < 300 for token_id in found.params.ending_ids)
    assert found.params.min_tokens <= found.max_tokens

"""The same requests through every door, whole and as streams, of a real service: the same answers.

Nothing runs beside a request and nothing is cached, so that equal requests are computed in equal steps.
"""

import contextlib
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest
from google.protobuf import json_format
from google.rpc import error_details_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status

from octavo.v1 import generation_pb2 as pb
from tests.support.frontend_client import Collected
from tests.support.service import Service, free_port

MAX_TOKENS = 6
REASONS = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}


@dataclass
class Choice:
    """A choice as every door can tell it."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[tuple[str, float, tuple[float, ...]]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass
class Answer:
    """An answer as every door can tell it: choices by index, tokens of prompt and output."""

    choices: dict[int, Choice] = field(default_factory=dict)
    usage: tuple[int, int] | None = None
    prompt: list[dict[int, tuple[float, int, str]]] = field(default_factory=list)  # by place and id

    def choice(self, index: int) -> Choice:
        return self.choices.setdefault(index, Choice())


@dataclass(frozen=True)
class Door:
    service: Service
    client: openai.OpenAI


@pytest.fixture(scope="module")
def door(demo_model: Path) -> Iterator[Door]:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="octavo-")))
        service, http_port = Service(free_port(), folder / "r", folder / "log"), free_port()
        stack.callback(service.stop)
        flags = ("--backend", "cpu", "--no-enable-prefix-caching", "--http-port", str(http_port))
        service.serve(str(demo_model), *flags).wait_until_ready()
        client = stack.enter_context(
            openai.OpenAI(base_url=f"http://127.0.0.1:{http_port}/v1", api_key="none", max_retries=0, timeout=60)
        )
        yield Door(service, client)


CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"seed": 7},
    "seeded, high temperature": {"seed": 2**63 + 5, "temperature": 1.5},
    "two choices": {"seed": 3, "n": 2},
    "log-probabilities": {"temperature": 0, "logprobs": 3},
    "log-probabilities of what was drawn": {"seed": 4, "logprobs": 0},
    "top_k and min_p": {"seed": 5, "top_k": 20, "min_p": 0.05},
    "top_p": {"seed": 6, "top_p": 0.5},
    "penalties": {"seed": 8, "presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.25},
    "bias": {"temperature": 0, "logit_bias": {100: 100.0}},
    "allowed ids": {"seed": 9, "allowed_token_ids": [260, 300, 400]},
    "bad words": {"temperature": 0, "bad_words": ["jumps", "over", "Red", "\n", ".", ","]},
    "stop string": {"temperature": 0, "stop": [" "]},
    "stop string, shown": {"temperature": 0, "stop": [" "], "include_stop_str_in_output": True},
    "stop id": {"temperature": 0, "logit_bias": {100: 100.0}, "stop_token_ids": [100]},
    "stop id, late": {"temperature": 0, "logit_bias": {100: 100.0}, "stop_token_ids": [100], "min_tokens": 4},
    "ignored end": {"temperature": 0, "ignore_eos": True},
    "special tokens shown": {"temperature": 0, "skip_special_tokens": False},
    "salted": {"seed": 10, "cache_salt": "pepper"},
    "a choice": {"seed": 11, "n": 2, "structured_outputs": {"choice": ["yes", "no, never"]}},
    "a regex": {"seed": 12, "logprobs": 2, "temperature": 1.5, "structured_outputs": {"regex": "[a-f]{3}[0-9]"}},
    "a schema": {
        "seed": 13,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "boolean"}}},
    },
    "an object, cut off": {"seed": 14, "response_format": {"type": "json_object"}},
    "stop string, late": {"temperature": 0, "stop": [" "], "include_stop_str_in_output": True, "min_tokens": 4},
    "stop strings and ids": {"seed": 11, "stop": ["e", "o"], "stop_token_ids": list(range(300, 400)), "n": 2},
    "bias among allowed ids": {"temperature": 0, "allowed_token_ids": [260, 300], "logit_bias": {260: -100.0}},
    "log-probabilities of choices": {"seed": 12, "n": 2, "logprobs": 1, "stop": ["a"]},
    "prompt log-probabilities": {"temperature": 0, "prompt_logprobs": 3},
    "prompt log-probabilities and others": {"seed": 13, "n": 2, "prompt_logprobs": 0, "logprobs": 2},
    "nothing but prompt log-probabilities": {"max_tokens": 0, "prompt_logprobs": 1, "n": 2},
    "echo": {"temperature": 0, "echo": True, "stop": ["q"]},
    "echo with log-probabilities": {"seed": 14, "echo": True, "logprobs": 2, "n": 2},
    "nothing but echo": {"max_tokens": 0, "echo": True},
    "beams": {"use_beam_search": True, "n": 3, "length_penalty": 0.5},
    "beams with prompt log-probabilities": {"use_beam_search": True, "n": 2, "prompt_logprobs": 1},
    "beams and echo": {"use_beam_search": True, "n": 2, "early_stopping": True, "echo": True},
}
TEXT_ONLY = {name for name, case in CASES.items() if "echo" in case}
"""A chat's echo is another thing over HTTP than through gRPC."""

PROMPT = "The quick brown fox"
MESSAGES: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name three colours."}]

_OPENAI_FIELDS = (
    *("temperature", "seed", "n", "top_p", "presence_penalty", "frequency_penalty", "logit_bias", "stop", "logprobs"),
    "max_tokens",
)
_STOPPING = {
    "stop": "stop_strings",
    "stop_token_ids": "stop_token_ids",
    "min_tokens": "min_tokens",
    "ignore_eos": "ignore_eos",
    "include_stop_str_in_output": "include_stop_string",
}


def grpc_input(case: dict[str, Any], chat: bool) -> pb.GenerationInput:
    """Return a case as gRPC has it, written down here once more instead of by the code under test."""
    fields: dict[str, Any] = {"sampling": {}, "stopping": {"max_tokens": MAX_TOKENS}, "output": {"token_ids": True}}
    for name, value in case.items():
        if name in _STOPPING:
            fields["stopping"][_STOPPING[name]] = value
        elif name == "max_tokens":
            fields["stopping"][name] = value
        elif name in ("logprobs", "skip_special_tokens", "prompt_logprobs", "echo"):
            fields["output"][name] = value
        elif name in ("cache_salt", "priority"):
            fields[name] = value
        elif name == "structured_outputs":
            ((kind, form),) = value.items()
            kind, form = ("json_schema", json.dumps(form)) if kind == "json" else (kind, form)
            fields["constraint"] = {kind: {"values": form} if kind == "choice" else form}
        elif name == "use_beam_search":
            search = {key: case[key] for key in ("length_penalty", "early_stopping") if key in case}
            fields["sampling"]["beam_search"] = {"width": case["n"]} | search
        elif name in ("length_penalty", "early_stopping"):
            continue
        elif name == "response_format":
            has_schema = value["type"] == "json_schema"
            schema = json.dumps(value["json_schema"]["schema"]) if has_schema else ""
            fields["constraint"] = {"json_schema": schema} if has_schema else {"json_object": True}
        else:
            fields["sampling"][name] = value
    fields |= {"chat": {"messages": MESSAGES}} if chat else {"text": PROMPT}
    return json_format.ParseDict(fields, pb.GenerationInput())


def http_fields(case: dict[str, Any], chat: bool) -> dict[str, Any]:
    """Return a case as openai-python has it."""
    known = {name: value for name, value in case.items() if name in _OPENAI_FIELDS}
    extra = {name: value for name, value in case.items() if name not in _OPENAI_FIELDS}
    if "logit_bias" in known:
        known["logit_bias"] = {str(key): value for key, value in known["logit_bias"].items()}
    if chat and "logprobs" in known:
        known |= {"logprobs": True, "top_logprobs": known["logprobs"]}
    prompt = {"messages": MESSAGES} if chat else {"prompt": PROMPT}
    extra["return_token_ids"] = True
    return {"model": "", "max_tokens": MAX_TOKENS, "extra_body": extra, **known, **prompt}


def grpc_logprobs(entries: Any) -> list[tuple[str, float, tuple[float, ...]]]:
    return [(entry.text, entry.logprob, tuple(sorted(top.logprob for top in entry.top))) for entry in entries]


def grpc_prompt(entries: Any) -> list[dict[int, tuple[float, int, str]]]:
    return [
        {one.token_id: (one.logprob, one.rank, one.text) for one in (*entry.top, entry)}
        if entry.HasField("logprob")
        else {}
        for entry in entries
    ]


def http_prompt(found: Any) -> list[dict[int, tuple[float, int, str]]]:
    return [
        {int(token_id): (one["logprob"], one["rank"], one["decoded_token"]) for token_id, one in (place or {}).items()}
        for place in found or ()
    ]


def through_grpc(door: Door, case: dict[str, Any], chat: bool) -> Answer:
    request = pb.GenerateRequest(input=grpc_input(case, chat))
    whole = door.service.generation.Generate(request, timeout=60)
    answer = Answer(usage=(whole.usage.prompt_tokens, whole.usage.completion_tokens))
    answer.prompt = grpc_prompt(whole.prompt_logprobs)
    for choice in whole.choices:
        reason = choice.stop_string or (choice.stop_token_id if choice.HasField("stop_token_id") else None)
        answer.choices[choice.index] = Choice(
            choice.text,
            list(choice.token_ids),
            grpc_logprobs(choice.logprobs),
            REASONS[choice.finish_reason],
            reason,
        )
    return answer


def through_grpc_stream(door: Door, case: dict[str, Any], chat: bool) -> Answer:
    collected = Collected()
    for event in door.service.generation.GenerateStream(
        pb.GenerateStreamRequest(input=grpc_input(case, chat)), timeout=60
    ):
        collected.add(event)
    answer = Answer(prompt=grpc_prompt(collected.prompt))
    for index, end in collected.finished.items():
        reason = end.stop_string or (end.stop_token_id if end.HasField("stop_token_id") else None)
        answer.choices[index] = Choice(
            collected.text.get(index, ""),
            collected.ids.get(index, []),
            grpc_logprobs(collected.logprobs.get(index, [])),
            REASONS[end.finish_reason],
            reason,
        )
        if end.HasField("usage"):
            answer.usage = (end.usage.prompt_tokens, end.usage.completion_tokens)
    return answer


def add(answer: Answer, found: Any, case: dict[str, Any]) -> None:
    """Add what an answer or an event over HTTP says."""
    if found.usage is not None:
        answer.usage = (found.usage.prompt_tokens, found.usage.completion_tokens)
    answer.prompt = http_prompt(found.model_extra.get("prompt_logprobs")) or answer.prompt
    for one in found.choices:
        answer.prompt = http_prompt(one.model_extra.get("prompt_logprobs")) or answer.prompt
        choice, extra = answer.choice(one.index), one.model_extra
        message = getattr(one, "message", None) or getattr(one, "delta", None)
        choice.text += (one.text if message is None else message.content) or ""
        choice.ids += extra.get("token_ids") or []
        choice.finish_reason = one.finish_reason or choice.finish_reason
        choice.stop_reason = extra.get("stop_reason") or choice.stop_reason
        if one.logprobs is None:
            continue
        if message is not None:
            for entry in one.logprobs.content:
                top = tuple(sorted(top.logprob for top in entry.top_logprobs))
                choice.logprobs.append((entry.token, entry.logprob, top))
        else:
            columns = zip(one.logprobs.tokens, one.logprobs.token_logprobs, one.logprobs.top_logprobs, strict=True)
            # An echoed prompt's come first.
            num_prompt = len(one.logprobs.tokens) - len(extra.get("token_ids") or []) if case.get("echo") else 0
            for token, logprob, top in list(columns)[num_prompt:]:
                # OpenAI's completions add the token that was drawn to the likeliest.
                likeliest = sorted(top.values(), reverse=True)[: case["logprobs"]]
                choice.logprobs.append((token, logprob, tuple(sorted(likeliest))))


def through_http(door: Door, case: dict[str, Any], chat: bool) -> Answer:
    fields, answer = http_fields(case, chat), Answer()
    create: Any = door.client.chat.completions.create if chat else door.client.completions.create
    add(answer, create(**fields), case)
    return answer


def through_http_stream(door: Door, case: dict[str, Any], chat: bool) -> Answer:
    fields, answer = http_fields(case, chat), Answer()
    create: Any = door.client.chat.completions.create if chat else door.client.completions.create
    for event in create(**fields, stream=True, stream_options={"include_usage": True}):
        add(answer, event, case)
    return answer


ROWS = [
    pytest.param(name, chat, id=f"{name}-{'chat' if chat else 'text'}")
    for name in CASES
    for chat in (False, True)
    if not (chat and name in TEXT_ONLY)
]

OTHERS: list[Callable[[Door, dict[str, Any], bool], Answer]] = [
    through_grpc_stream,
    through_http,
    through_http_stream,
]


@pytest.mark.parametrize(("name", "chat"), ROWS)
def test_every_door_answers_the_same(door: Door, name: str, chat: bool) -> None:
    case = CASES[name]
    expected = through_grpc(door, case, chat)
    assert expected.usage is not None
    assert sorted(expected.choices) == list(range(case.get("n", 1)))
    assert expected.usage[1] == sum(len(choice.ids) for choice in expected.choices.values())
    assert all(bool(choice.logprobs) == ("logprobs" in case) for choice in expected.choices.values())
    assert bool(expected.prompt) == ("prompt_logprobs" in case)
    for through in OTHERS:
        if through is through_http_stream and "prompt_logprobs" in case:
            continue  # refused there, as vLLM has it
        assert through(door, case, chat) == expected, through.__name__


def bytes_of(entries: Any) -> list[Any]:
    return [
        (one.token_id, one.raw, one.rank, [(top.token_id, top.raw, top.rank) for top in one.top]) for one in entries
    ]


@pytest.mark.parametrize("name", ["log-probabilities", "log-probabilities of choices"])
def test_bytes_of_tokens_are_the_same_whole_and_streamed(door: Door, name: str) -> None:
    asked, streamed = grpc_input(CASES[name], chat=False), Collected()
    whole = door.service.generation.Generate(pb.GenerateRequest(input=asked), timeout=60)
    for event in door.service.generation.GenerateStream(pb.GenerateStreamRequest(input=asked), timeout=60):
        streamed.add(event)
    for choice in whole.choices:
        told = bytes_of(choice.logprobs)
        assert told == bytes_of(streamed.logprobs[choice.index])
        assert len(told) == len(choice.token_ids)
        assert all(raw and all(other for _, other, _ in top) for _, raw, _, top in told)


REFUSALS: dict[str, dict[str, Any]] = {
    "top_p": {"top_p": 3.0},
    "temperature": {"temperature": -1.0},
    "n": {"n": 1000},
    "logprobs": {"logprobs": 50},
    "an id outside": {"logit_bias": {10**6: 1.0}},
    "an empty stop string": {"stop": [""]},
    "an empty bad word": {"bad_words": ["x", ""]},
    "a long bad word": {"bad_words": ["supercalifragilisticexpialidocious " * 2]},
    "min_tokens": {"min_tokens": MAX_TOKENS + 1},
    "priority": {"priority": 1},
    "a bad regex": {"structured_outputs": {"regex": "("}},
    "a bad schema": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 3}}},
    },
    "a schema that is not enforced": {"structured_outputs": {"json": {"not": {}}}},
    "too many choices": {"structured_outputs": {"choice": ["a"] * 1025}},
    "a form without an end": {"ignore_eos": True, "structured_outputs": {"regex": "a"}},
}


@pytest.mark.parametrize("chat", [False, True], ids=["text", "chat"])
@pytest.mark.parametrize("name", REFUSALS)
def test_every_door_refuses_the_same(door: Door, name: str, chat: bool) -> None:
    case, expected = REFUSALS[name], None
    for through in (through_grpc, through_grpc_stream):
        with pytest.raises(grpc.RpcError) as raised:
            through(door, case, chat)
        status = rpc_status.from_call(raised.value)  # type: ignore[arg-type]
        info = error_details_pb2.ErrorInfo()
        assert any(detail.Unpack(info) for detail in status.details)
        assert expected in (None, info.reason)
        expected = info.reason
    for through in (through_http, through_http_stream):
        with pytest.raises(openai.BadRequestError) as refused:
            through(door, case, chat)
        assert str(refused.value.code).upper() == expected


def test_nothing_is_left(door: Door) -> None:
    held = door.service.wait_until_idle()
    assert held.free_blocks + held.cached_blocks >= held.total_blocks - 1

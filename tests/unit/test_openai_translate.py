"""From JSON to a GenerationInput and back to the names of JSON."""

import json
import re
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.frontend import errors
from octavo.frontend.config import FrontendConfig
from octavo.frontend.generation_config import SamplingDefaults
from octavo.frontend.openai import schema
from octavo.frontend.openai.errors import HTTP_RULES, HttpError, from_msgspec, to_http
from octavo.frontend.openai.translate import FIELDS, json_name, translate_chat, translate_completion
from octavo.frontend.validation import Bounds, check_params, check_prompt_form
from octavo.v1 import generation_pb2 as pb

CONFIG = FrontendConfig(Path("model"), ("tiny",), "ipc:///nowhere/s")
HELLO = [{"role": "user", "content": "hello"}]

GRPC_ONLY = {"output.detokenize", "stopping.time_limit"}
"""Fields that JSON has no name for: text is what it is about, and neither OpenAI nor vLLM has a time limit."""

LEAVES = ("messages", "time_limit")


def completion(**body: Any) -> pb.GenerationInput:
    data = json.dumps({"prompt": "x", **body}).encode()
    translation = translate_completion(msgspec.json.decode(data, type=schema.CompletionBody), CONFIG)
    assert len(translation) == 1
    return translation.input(0)


def chat(**body: Any) -> pb.GenerationInput:
    data = json.dumps({"messages": HELLO, **body}).encode()
    translation = translate_chat(msgspec.json.decode(data, type=schema.ChatBody))
    assert len(translation) == 1
    return translation.input(0)


def paths(message: Any, prefix: str = "") -> set[str]:
    found = set()
    for field in message.fields:
        if field.message_type is None or field.message_type.GetOptions().map_entry or field.name in LEAVES:
            found.add(prefix + field.name)
        else:
            found |= paths(field.message_type, f"{prefix}{field.name}.")
    return found


def test_every_field_of_an_input_has_a_json_name() -> None:
    """A field that is added to the message must be given one here as well, or be named as gRPC's alone."""
    unnamed = {path for path in paths(pb.GenerationInput.DESCRIPTOR) if not json_name(f"input.{path}")[0]}
    assert unnamed == GRPC_ONLY


def test_every_field_of_the_table_is_one_of_both() -> None:
    known = paths(pb.GenerationInput.DESCRIPTOR)
    for name, place in FIELDS.items():
        assert place in known
        assert name in schema.CompletionBody.__struct_fields__
        assert name in schema.ChatBody.__struct_fields__


@pytest.mark.parametrize(
    ("path", "name", "rest"),
    [
        ("input", "", ""),
        ("", "", ""),
        ("input.nonsense", "", ""),
        ("input.sampling.top_p", "top_p", ""),
        ("input.sampling.logit_bias[7]", "logit_bias", "[7]"),
        ("input.stopping.stop_strings[2]", "stop", "[2]"),
        ("input.token_ids.ids[3]", "prompt", "[3]"),
        ("input.token_ids", "prompt", ""),
        ("input.text", "prompt", ""),
        ("input.chat", "messages", ""),
        ("input.chat.messages[4].role", "messages", "[4].role"),
        ("input.chat.template_kwargs_json", "chat_template_kwargs", ""),
        ("input.cache_salt", "cache_salt", ""),
        ("input.chat.tools", "tools", ""),
        ("input.chat.tools[3].name", "tools", "[3].function.name"),
        ("input.chat.tools[3].parameters_json_schema", "tools", "[3].function.parameters"),
        ("input.chat.tool_choice.name", "tool_choice", ".function.name"),
        ("input.chat.messages[1].tool_calls[2].arguments_json", "messages", "[1].tool_calls[2].function.arguments"),
        ("input.chat.messages[1].name", "messages", "[1].name"),
    ],
)
def test_paths_of_errors_become_json_names(path: str, name: str, rest: str) -> None:
    assert json_name(path) == (name, rest)


def test_unset_fields_stay_unset() -> None:
    expected = pb.GenerationInput(text="x")
    expected.stopping.max_tokens = 16
    assert completion() == expected
    nulls = {name: None for name in schema.CompletionBody.__struct_fields__ if name != "prompt"}
    assert completion(**nulls) == expected
    messages = [pb.ChatMessage(role="user", content="hello")]
    plain = pb.GenerationInput(chat=pb.ChatPrompt(messages=messages))
    assert chat() == plain
    nulls = {name: None for name in schema.ChatBody.__struct_fields__ if name != "messages"}
    assert chat(**nulls) == plain


def test_zero_is_no_unset_field() -> None:
    found = completion(temperature=0, max_tokens=0, seed=0, top_k=0, logprobs=0, min_tokens=0)
    assert found.sampling.HasField("temperature")
    assert found.sampling.HasField("seed")
    assert found.stopping.HasField("max_tokens")
    assert found.output.HasField("logprobs")
    assert found.stopping.max_tokens == 0


def test_fields_of_chats() -> None:
    found = chat(
        max_tokens=5,
        max_completion_tokens=7,
        logprobs=True,
        add_generation_prompt=False,
        continue_final_message=True,
        chat_template_kwargs={"enable_thinking": False},
    )
    assert found.stopping.max_tokens == 7
    assert found.output.logprobs == 0
    assert found.output.HasField("logprobs")
    assert found.chat.HasField("add_generation_prompt")
    assert not found.chat.add_generation_prompt
    assert found.chat.continue_final_message
    assert json.loads(found.chat.template_kwargs_json) == {"enable_thinking": False}
    assert not chat(logprobs=False).output.HasField("logprobs")


def test_messages_of_parts_and_messages_that_were_answers() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    answer: dict[str, Any] = {
        "role": "assistant",
        "content": "c",
        "refusal": None,
        "tool_calls": None,
        "annotations": [],
        "audio": None,
    }
    found = chat(messages=[{"role": "user", "content": parts, "name": "me"}, answer]).chat.messages
    assert [(m.role, m.content, m.name) for m in found] == [("user", "a\nb", "me"), ("assistant", "c", "")]


@pytest.mark.parametrize(
    ("seed", "bits"), [(0, 0), (-1, 2**64 - 1), (2**63, 2**63), (-(2**63), 2**63), (2**64 - 1, 2**64 - 1)]
)
def test_seeds_are_64_bits(seed: int, bits: int) -> None:
    assert completion(seed=seed).sampling.seed == bits


UNSERVED: list[tuple[str, Any]] = []


@pytest.mark.parametrize(
    ("name", "value"), [*UNSERVED, ("best_of", 2), ("suffix", "x"), ("seed", 2**64), ("prompt", [])]
)
def test_what_completions_do_not_serve_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(HttpError) as raised:
        completion(**{name: value})
    assert (raised.value.status, raised.value.param) == (400, name)
    assert raised.value.message.startswith(f"{name}: ")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *UNSERVED,
        ("functions", [{}]),
        ("function_call", "auto"),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "x"}),
        ("web_search_options", {"a": 1}),
        ("reasoning_effort", "high"),
        ("top_logprobs", 2),
    ],
)
def test_what_chats_do_not_serve_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(HttpError) as raised:
        chat(**{name: value})
    assert (raised.value.status, raised.value.param) == (400, name)


def test_fields_that_ask_for_nothing_are_taken() -> None:
    completion(
        best_of=1,
        suffix="",
        echo=False,
        response_format={"type": "text"},
        structured_outputs=None,
        prompt_logprobs=None,
    )
    chat(tools=[], tool_choice="none", functions=None, modalities=["text"], use_beam_search=False, audio=None)
    for name in schema.IGNORED:
        for value in ({"a": [1, {}]}, "x", True, None):
            completion(**{name: value})
            chat(**{name: value})


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "assistant", "content": "x", "function_call": {"name": "f"}}, "messages[0].function_call"),
        ({"role": "assistant", "tool_calls": [{"id": "1", "type": "custom"}]}, "messages[0].tool_calls[0].type"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "messages[0].content[0]"),
    ],
)
def test_messages_that_are_more_than_text_are_refused(message: dict[str, Any], param: str) -> None:
    with pytest.raises(HttpError) as raised:
        chat(messages=[message])
    assert (raised.value.status, raised.value.param) == (400, param)


WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}}


def test_tools_and_their_choice() -> None:
    functions = [
        {"name": "weather", "description": "Of a city.", "parameters": WEATHER, "strict": True},
        {"name": "now"},
    ]
    found = chat(
        tools=[{"type": "function", "function": function} for function in functions],
        tool_choice={"type": "function", "function": {"name": "now"}},
        parallel_tool_calls=False,
    ).chat
    assert [(tool.name, tool.description) for tool in found.tools] == [("weather", "Of a city."), ("now", "")]
    assert json.loads(found.tools[0].parameters_json_schema) == WEATHER
    assert not found.tools[1].parameters_json_schema
    assert (found.tool_choice.name, found.HasField("parallel_tool_calls")) == ("now", True)
    modes = {
        "none": pb.TOOL_CHOICE_MODE_NONE,
        "auto": pb.TOOL_CHOICE_MODE_AUTO,
        "required": pb.TOOL_CHOICE_MODE_REQUIRED,
    }
    for name, mode in modes.items():
        assert chat(tool_choice=name).chat.tool_choice.mode == mode
    assert not chat(tools=[]).chat.HasField("tool_choice")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].type"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice.type"),
    ],
)
def test_tools_of_other_kinds_are_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(HttpError) as raised:
        chat(**fields)
    assert (raised.value.status, raised.value.param) == (400, param)


def test_turns_with_calls() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{}"}, "index": 0}
    turns = [
        {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "content": "Rain.", "tool_call_id": "call_1"},
    ]
    asking, answering = chat(messages=turns).chat.messages
    assert asking == pb.ChatMessage(
        role="assistant",
        reasoning="Hm.",
        tool_calls=[pb.ToolCall(id="call_1", name="weather", arguments_json="{}")],
    )
    assert answering == pb.ChatMessage(role="tool", content="Rain.", tool_call_id="call_1")


@pytest.mark.parametrize("prompt", [["a", 1], [1, [2]], ["a", [1]]])
def test_prompts_of_several_kinds_are_refused(prompt: list[Any]) -> None:
    with pytest.raises(HttpError, match="mixes"):
        completion(prompt=prompt)


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        (b'{"prompt": "x", "foo": 1}', "foo", "foo: is not known"),
        (b"{}", "prompt", "prompt: is required"),
        (b'{"prompt": "x", "n": "2"}', "n", r"n: expected `int \| null`, got `str`"),
        (b'{"prompt": "x", "n": -1}', "n", "n: expected `int` >= 0"),
        (b'{"prompt": "x", "top_k": 2147483648}', "top_k", "top_k: expected `int` <= 2147483647"),
        (b'{"prompt": [1, -1]}', "prompt[1]", "prompt"),
        (b'{"prompt": "x", "stream_options": {"foo": 1}}', "stream_options.foo", "is not known"),
        (b'{"prompt": "x", "logit_bias": {"a": 1}}', "logit_bias", "logit_bias: expected `int`"),
        (b'{"prompt": "x", "temperature": 1e999}', "temperature", "temperature: number out of range"),
        (b"[1]", None, "the body: expected `object`, got `array`"),
        (b"", None, "no valid JSON"),
        (b'{"prompt": NaN}', None, "no valid JSON"),
        (b'{"prompt": "\xff"}', None, "no valid JSON"),
        (b'{"prompt": "x", "metadata": ' + b"[" * 100_000, None, "nested too deeply"),
        (b'{"prompt": ' + b"[" * 100_000, "prompt[0][0]", "expected `int`"),
    ],
)
def test_bodies_that_are_none_name_the_field(body: bytes, param: str | None, message: str) -> None:
    with pytest.raises((msgspec.MsgspecError, RecursionError)) as raised:
        msgspec.json.decode(body, type=schema.CompletionBody)
    error = from_msgspec(raised.value)
    assert (error.status, error.param, error.type) == (400, param, "invalid_request_error")
    assert re.search(message, error.message)


def test_the_table_of_statuses_is_total() -> None:
    assert {rule.code for rule in errors.RULES.values()} <= set(HTTP_RULES)
    statuses = [rule.status for rule in HTTP_RULES.values()]
    assert len(set(statuses)) == len(statuses)


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (errors.InvalidArgument("why", field_path="input.text"), 400, "invalid_argument"),
        (errors.ContextLengthExceeded("why", field_path="input.text"), 400, "context_length_exceeded"),
        (errors.ModelNotFound("why", model="x"), 404, "model_not_found"),
        (errors.Unauthenticated("why"), 401, "invalid_api_key"),
        (errors.QueueFull("why"), 429, "queue_full"),
        (errors.SlowReader("why"), 429, "slow_reader"),
        (errors.Draining("why"), 503, "draining"),
        (errors.DeadlineExceeded("why"), 504, "deadline_exceeded"),
        (errors.InternalError("why"), 500, "internal"),
    ],
)
def test_errors_as_http_has_them(error: errors.ServiceError, status: int, code: str) -> None:
    found = to_http(error)
    assert (found.status, found.code) == (status, code)
    body = json.loads(found.body())["error"]
    assert body["message"] == "why"
    retries = [value for name, value in found.headers if name == b"retry-after"]
    assert retries == ([b"1"] if errors.RULES[type(error)].code in _RETRIED else [])


_RETRIED = {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE}


def test_long_messages_are_cut() -> None:
    assert len(to_http(errors.InvalidArgument("x" * 10**6, field_path="input.text")).body()) < 2000


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
NAMES = sorted({*schema.CompletionBody.__struct_fields__, *schema.ChatBody.__struct_fields__})
BOUNDS = Bounds(CONFIG, 300, 256, SamplingDefaults(), (256,))


def refusals(data: bytes, is_chat: bool) -> list[HttpError]:
    """Take a body as far as its prompt would be tokenised; nothing but typed errors may come out."""
    found = []
    try:
        if is_chat:
            translation = translate_chat(msgspec.json.decode(data, type=schema.ChatBody))
        else:
            translation = translate_completion(msgspec.json.decode(data, type=schema.CompletionBody), CONFIG)
        for number in range(len(translation)):
            one = translation.input(number)
            try:
                check_prompt_form(one, BOUNDS, 1000)
                check_params(one, BOUNDS)
            except errors.InvalidArgument as error:
                found.append(to_http(error, translation.param(error.field_path, number)))
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        found.append(from_msgspec(error))
    except HttpError as error:
        found.append(error)
    return found


@settings(max_examples=500, deadline=None)
@given(
    st.dictionaries(st.sampled_from(NAMES), JSON, max_size=4),
    st.fixed_dictionaries({}, optional={"prompt": st.text(max_size=3), "messages": st.just(HELLO)}),
    st.booleans(),
)
def test_no_json_breaks_the_door(body: dict[str, Any], prompt: dict[str, Any], is_chat: bool) -> None:
    for error in refusals(json.dumps(body | prompt).encode(), is_chat):
        assert error.status == 400
        assert error.param, error.message


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=40) | st.text('[]{}":,\\ud8c0promt1e', max_size=30).map(str.encode), st.booleans())
def test_no_bytes_break_the_door(data: bytes, is_chat: bool) -> None:
    assert all(error.status == 400 for error in refusals(data, is_chat))


@pytest.mark.parametrize("escape", [r"\ud800", r"\udc00", r"\ud800x", r"\udfff\ud800"])
def test_half_a_surrogate_pair_is_no_text(escape: str) -> None:
    data = b'{"prompt": "' + escape.encode() + b'"}'
    with pytest.raises((msgspec.MsgspecError, UnicodeError)) as raised:
        translate_completion(msgspec.json.decode(data, type=schema.CompletionBody), CONFIG).input(0)
    assert from_msgspec(raised.value).status == 400


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("fields", "kind", "value"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", True),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
                }
            },
            "json_schema",
            json.dumps(SCHEMA),
        ),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", json.dumps(SCHEMA)),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "json_schema", json.dumps(SCHEMA)),
        ({"structured_outputs": {"json_object": True}}, "json_object", True),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"structured_outputs": {"grammar": "root ::= x"}}, "grammar", "root ::= x"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", pb.StringList(values=["a", "b"])),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structural_tag", "{}"),
    ],
)
@pytest.mark.parametrize("translate", [completion, chat])
def test_forms_of_the_output(translate: Any, fields: dict[str, Any], kind: str, value: Any) -> None:
    constraint = translate(**fields).constraint
    assert constraint.WhichOneof("kind") == kind
    assert getattr(constraint, kind) == value


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            "response_format.json_schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "y": 1}}},
            "response_format.json_schema",
        ),
        ({"response_format": {"type": "json_object", "json_schema": {}}}, "response_format.json_schema"),
        ({"response_format": {"type": "text", "json_schema": {}}}, "response_format.json_schema"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": 3}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
    ],
)
def test_forms_that_are_none_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(HttpError) as raised:
        chat(**fields)
    assert (raised.value.status, raised.value.param) == (400, param)


@pytest.mark.parametrize(
    ("fields", "path", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "input.constraint.json_object", "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}},
            "input.constraint.json_schema",
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {"json": {}}}, "input.constraint.json_schema", "structured_outputs.json"),
        ({"structured_outputs": {"regex": "("}}, "input.constraint.regex", "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, "input.constraint.choice.values", "structured_outputs.choice"),
        ({"structured_outputs": {"choice": [""]}}, "input.constraint.choice.values[0]", "structured_outputs.choice[0]"),
        ({"structured_outputs": {"grammar": ""}}, "input.constraint.grammar", "structured_outputs.grammar"),
    ],
)
def test_errors_of_forms_have_their_json_names(fields: dict[str, Any], path: str, param: str) -> None:
    data = json.dumps({"messages": HELLO, **fields}).encode()
    assert translate_chat(msgspec.json.decode(data, type=schema.ChatBody)).param(path, 0) == param

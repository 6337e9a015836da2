"""Calls of tools and reasoning, as every door tells them of the same text; the scheduler says what the model writes."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat import ChatCompletionMessageFunctionToolCall

from octavo.v1 import generation_pb2 as pb
from octavo.wire.columns import unpack_ints
from octavo.wire.handshake import ServiceFacts
from octavo.wire.requests import FinishChoice, FinishReason, SubmitRequest
from tests.support.frontend_client import Collected, collect, parse, read
from tests.support.http_client import Doors, read_events, running_doors
from tests.support.scripted_scheduler import ScriptedScheduler
from tests.support.tiny_tokenizers import byte_level, write_model_folder
from tests.support.tool_templates import LLAMA, MISTRAL, OPENED, PYTHONIC, THINKING

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
EOS = 256
MARKER = 263
"""Of [TOOL_CALLS], which is a special token."""
FACTS = ServiceFacts(vocab_size=300, max_model_len=8192, block_size=16, max_num_seqs=8)
CHATS = "/v1/chat/completions"

SCHEMA = '{"type": "object", "properties": {"city": {"type": "string"}}}'
HTTP_TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("weather", "add")
]
GRPC_TOOLS = [{"name": name, "parametersJsonSchema": '{"type": "object"}'} for name in ("weather", "add")]
ASK: Any = [{"role": "user", "content": "Köln?"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
ADD = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
WEATHER = ("weather", '{"city": "Köln"}')


@dataclass
class Answer:
    """A choice as every door can tell it."""

    text: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    finish_reason: str = ""
    ids: list[int] = field(default_factory=list)
    num_logprobs: int = 0


REASONS = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_TOOL_CALLS: "tool_calls",
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["[TOOL_CALLS]"])
    templates = {"hermes": THINKING, "opened": OPENED, "mistral": MISTRAL, "llama": LLAMA, "pythonic": PYTHONIC}
    return {
        name: write_model_folder(tmp_path_factory.mktemp(name), tokenizer, chat_template=template)
        for name, template in templates.items()
    }


@pytest.fixture
async def scheduler(address: str) -> AsyncIterator[ScriptedScheduler]:
    with ScriptedScheduler(address, FACTS) as running:
        yield running


Open = Callable[..., Coroutine[Any, Any, Doors]]


@pytest.fixture
async def open_doors(folders: dict[str, Path], scheduler: ScriptedScheduler, address: str) -> AsyncIterator[Open]:
    running = []

    async def open_(name: str, **settings: Any) -> Doors:
        context = running_doors(folders[name], address, **settings)
        doors = await context.__aenter__()
        running.append(context)
        await scheduler.session_begun()
        await doors.grpc.until_health(serving=True)
        return doors

    yield open_
    for context in running:
        await context.__aexit__(None, None, None)


async def write(
    scheduler: ScriptedScheduler, text: Sequence[str], reason: FinishReason, *, at_once: int, logprobs: bool
) -> None:
    """Let the model write a text a choice, `at_once` ids a message."""
    request = await scheduler.next(SubmitRequest)
    scheduler.start_request(request)
    for choice, one in enumerate(text):
        before, marker, behind = one.partition("[TOOL_CALLS]")
        ids = [*before.encode(), *([MARKER] if marker else []), *behind.encode(), *([EOS] if reason is STOP else [])]
        for place in range(0, len(ids), at_once):
            last = place + at_once >= len(ids)
            scheduler.emit(
                request,
                ids[place : place + at_once],
                choice=choice,
                position=place,
                finish=reason if last else None,
                with_logprobs=1 if logprobs else None,
            )


def from_grpc(choice: pb.Choice) -> Answer:
    assert all(call.id for call in choice.tool_calls)
    return Answer(
        choice.text,
        choice.reasoning,
        [(call.name, call.arguments_json) for call in choice.tool_calls],
        REASONS[choice.finish_reason],
        list(choice.token_ids),
        len(choice.logprobs),
    )


def from_collected(found: Collected, index: int) -> Answer:
    assert all(call.id for call in found.calls.get(index, []))
    return Answer(
        found.text.get(index, ""),
        found.reasoning.get(index, ""),
        [(call.name, call.arguments_json) for call in found.calls.get(index, [])],
        REASONS[found.finished[index].finish_reason],
        found.ids.get(index, []),
        len(found.logprobs.get(index, [])),
    )


def from_http(choice: Any) -> Answer:
    message = choice.message
    thought = message.model_extra.get("reasoning", "")
    assert message.model_extra.get("reasoning_content", "") == thought
    for call in message.tool_calls or []:
        assert isinstance(call, ChatCompletionMessageFunctionToolCall)
        assert (bool(call.id), call.type) == (True, "function")
    assert (message.content is None) <= bool(message.tool_calls or thought)
    return Answer(
        message.content or "",
        thought,
        [(call.function.name, call.function.arguments) for call in message.tool_calls or []],
        choice.finish_reason,
        choice.model_extra.get("token_ids", []),
        len(choice.logprobs.content) if choice.logprobs else 0,
    )


async def from_http_stream(stream: Any, num_choices: int) -> list[Answer]:
    answers = [Answer() for _ in range(num_choices)]
    async for event in stream:
        for choice in event.choices:
            answer, delta = answers[choice.index], choice.delta
            answer.text += delta.content or ""
            answer.reasoning += delta.model_extra.get("reasoning", "")
            for call in delta.tool_calls or []:
                if call.function.name:
                    assert (call.index, call.type, bool(call.id)) == (len(answer.calls), "function", True)
                    assert call.function.arguments == ""
                    answer.calls.append((call.function.name, ""))
                else:
                    assert (call.index, call.type, call.id) == (len(answer.calls) - 1, None, None)
                    name, arguments = answer.calls[-1]
                    answer.calls[-1] = (name, arguments + call.function.arguments)
            answer.finish_reason = choice.finish_reason or answer.finish_reason
            answer.ids += choice.model_extra.get("token_ids") or []
            answer.num_logprobs += len(choice.logprobs.content) if choice.logprobs else 0
    return answers


async def through_all(
    doors: Doors,
    scheduler: ScriptedScheduler,
    texts: list[str],
    reason: FinishReason = STOP,
    *,
    tools: bool = True,
    details: bool = False,
    at_once: int = 7,
    **http: Any,
) -> list[Answer]:
    """Ask through all doors, and see that they answer the same."""
    extra: Any = {"return_token_ids": True} if details else {}
    asking: Any = {"model": "", "messages": ASK, "n": len(texts), **http}
    chat: dict[str, Any] = {"messages": ASK}
    if "parallel_tool_calls" in http:
        chat["parallelToolCalls"] = http["parallel_tool_calls"]
    if "extra_body" in http:
        extra |= asking.pop("extra_body")
        chat["templateKwargsJson"] = '{"enable_thinking": false}'
    if tools:
        asking["tools"], chat["tools"] = HTTP_TOOLS, GRPC_TOOLS
    fields: dict[str, Any] = {"chat": chat, "sampling": {"n": len(texts)}, "stopping": {}}
    if details:
        asking |= {"logprobs": True}
        fields["output"] = {"tokenIds": True, "logprobs": 0}
    if "stop" in http:
        fields["stopping"]["stopStrings"] = http["stop"]

    async def written(answering: Any) -> Any:
        task = asyncio.ensure_future(answering)
        await write(scheduler, texts, reason, at_once=at_once, logprobs=details)
        return await task

    create: Any = doors.openai.chat.completions.create
    whole = await written(doors.grpc.ask(**fields))
    expected = [from_grpc(choice) for choice in whole.choices]
    stream = await written(collect(doors.grpc.stream(**fields, chunk=3)))
    assert [from_collected(stream, i) for i in range(len(texts))] == expected
    assert stream.finished[0].usage.completion_tokens in (0, whole.usage.completion_tokens)
    found = await written(create(**asking, extra_body=extra))
    assert [from_http(choice) for choice in found.choices] == expected
    assert found.usage.completion_tokens == whole.usage.completion_tokens

    async def streamed() -> list[Answer]:
        return await from_http_stream(await create(**asking, extra_body=extra, stream=True), len(texts))

    assert await written(streamed()) == expected
    await doors.until_idle()
    return expected


async def test_a_call(open_doors: Open, scheduler: ScriptedScheduler) -> None:
    doors = await open_doors("hermes")
    for at_once in (1, 1000):
        (answer,) = await through_all(doors, scheduler, [f"I ask.\n{CALL}"], at_once=at_once)
        assert answer == Answer("I ask.", "", [WEATHER], "tool_calls")


async def test_choices_with_calls_text_and_what_only_looks_like_a_call(
    open_doors: Open, scheduler: ScriptedScheduler
) -> None:
    doors = await open_doors("hermes")
    odd = '<tool_call>{"name": "other", "arguments": {}}</tool_call>'
    answers = await through_all(doors, scheduler, [f"{CALL}\n{ADD}", "It rains.", odd], details=True)
    assert [(a.text, a.calls, a.finish_reason) for a in answers] == [
        ("", [WEATHER, ("add", '{"a": 1}')], "tool_calls"),
        ("It rains.", [], "stop"),
        (odd, [], "stop"),
    ]
    for answer, text in zip(answers, [f"{CALL}\n{ADD}", "It rains.", odd], strict=True):
        assert answer.ids == [*text.encode(), EOS], "every id is told once, whatever its text became"
        assert answer.num_logprobs == len(answer.ids)


async def test_a_call_that_the_limit_cut(open_doors: Open, scheduler: ScriptedScheduler) -> None:
    doors = await open_doors("hermes")
    (answer,) = await through_all(doors, scheduler, [CALL[:-20]], LENGTH)
    assert answer.calls == [("weather", WEATHER[1][: len(answer.calls[0][1])])]
    assert answer.finish_reason == "length"
    (answer,) = await through_all(doors, scheduler, [CALL[:20]], LENGTH)
    assert answer == Answer(CALL[:20], "", [], "length")


async def test_thoughts_then_calls(open_doors: Open, scheduler: ScriptedScheduler) -> None:
    doors = await open_doors("hermes")
    thought = "<think>\nShall I? <tool_call>\n</think>\n\n"
    (answer,) = await through_all(doors, scheduler, [thought + CALL], details=True)
    assert (answer.reasoning, answer.text, answer.calls) == ("Shall I? <tool_call>", "", [WEATHER])
    assert answer.ids == [*(thought + CALL).encode(), EOS]
    (answer,) = await through_all(doors, scheduler, [f"{thought}Yes."], tools=False)
    assert answer == Answer("Yes.", "Shall I? <tool_call>", [], "stop")
    (answer,) = await through_all(doors, scheduler, ["<think>Hm"], LENGTH, tools=False)
    assert answer == Answer("", "Hm", [], "length")


async def test_thoughts_that_the_template_opens(open_doors: Open, scheduler: ScriptedScheduler) -> None:
    doors = await open_doors("opened")
    (answer,) = await through_all(doors, scheduler, ["Hm.\n</think>\n\nYes."], tools=False)
    assert answer == Answer("Yes.", "Hm.", [], "stop")
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    (answer,) = await through_all(doors, scheduler, ["Yes. <think>"], tools=False, extra_body=off)
    assert answer == Answer("Yes. <think>", "", [], "stop")


async def test_a_text_of_a_given_form_has_no_thoughts(open_doors: Open, scheduler: ScriptedScheduler) -> None:
    doors = await open_doors("opened")
    create: Any = doors.openai.chat.completions.create
    asking = asyncio.ensure_future(create(model="", messages=ASK, response_format={"type": "json_object"}))
    request = await scheduler.next(SubmitRequest)
    assert request.grammar
    scheduler.answer(request, [[*b'{"a": 1}', EOS]], STOP)
    assert from_http((await asking).choices[0]) == Answer('{"a": 1}', "", [], "stop")


async def test_without_parsers_text_stays_as_it_is(open_doors: Open, scheduler: ScriptedScheduler) -> None:
    doors = await open_doors("hermes", reasoning_parser="none", tool_call_parser="none")
    text = f"<think>a</think>\n{CALL} "
    (answer,) = await through_all(doors, scheduler, [text], tools=False)
    assert answer == Answer(text, "", [], "stop")
    status, error = await doors.error(CHATS, messages=ASK, tools=HTTP_TOOLS)
    assert (status, error["param"]) == (400, "tools")


async def test_at_most_one_call(open_doors: Open, scheduler: ScriptedScheduler) -> None:
    doors = await open_doors("hermes")
    (answer,) = await through_all(doors, scheduler, [f"{CALL}{ADD}"], parallel_tool_calls=False)
    assert answer == Answer("", "", [WEATHER], "tool_calls")


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ("mistral", f"[TOOL_CALLS]weather{WEATHER[1]}"),
        ("mistral", f'[TOOL_CALLS] [{{"name": "weather", "arguments": {WEATHER[1]}}}]'),
        ("llama", f'{{"name": "weather", "parameters": {WEATHER[1]}}}'),
        ("pythonic", "[weather(city='Köln')]"),
    ],
)
async def test_other_dialects(open_doors: Open, scheduler: ScriptedScheduler, model: str, text: str) -> None:
    doors = await open_doors(model)
    (answer,) = await through_all(doors, scheduler, [text])
    assert answer == Answer("", "", [WEATHER], "tool_calls")


@pytest.mark.parametrize("name", ["hermes", "mistral"])
async def test_a_stop_string_in_the_arguments_leaves_no_call_to_make(
    open_doors: Open, scheduler: ScriptedScheduler, name: str
) -> None:
    doors = await open_doors(name)
    text = CALL if name == "hermes" else '[TOOL_CALLS]weather[ARGS]{"city": "Köln"}'
    asking = asyncio.create_task(
        doors.openai.chat.completions.create(model="", messages=ASK, tools=HTTP_TOOLS, stop=["ln"])
    )
    request = await scheduler.next(SubmitRequest)
    scheduler.start_request(request)
    before, marker, behind = text.partition("[TOOL_CALLS]")
    scheduler.emit(request, [*before.encode(), *([MARKER] if marker else []), *behind.encode()])
    await scheduler.next(FinishChoice)
    (choice,) = (await asking).choices
    assert (choice.finish_reason, choice.model_extra) == ("stop", {"stop_reason": "ln"})


async def test_stop_strings_end_the_raw_text(open_doors: Open, scheduler: ScriptedScheduler) -> None:
    doors = await open_doors("hermes")
    asking = asyncio.ensure_future(
        doors.openai.chat.completions.create(model="", messages=ASK, tools=HTTP_TOOLS, stop=["</tool_call>"])
    )
    request = await scheduler.next(SubmitRequest)
    scheduler.start_request(request)
    scheduler.emit(request, list(f"{CALL} more".encode()))
    (choice,) = (await asking).choices
    assert from_http(choice) == Answer("", "", [WEATHER], "tool_calls")
    assert choice.model_extra == {"stop_reason": "</tool_call>"}
    await scheduler.next(FinishChoice)


async def test_pieces_of_calls_are_sent_as_they_come(open_doors: Open, scheduler: ScriptedScheduler) -> None:
    doors = await open_doors("hermes")
    call = doors.grpc.stream(chat={"messages": ASK, "tools": GRPC_TOOLS})
    request = await scheduler.next(SubmitRequest)
    scheduler.start_request(request)
    assert (await read(call)).HasField("started")
    head = b'ok <tool_call>{"name": "add", "arguments": {'
    scheduler.emit(request, list(head))
    seen: list[pb.Delta] = []
    while not (seen and seen[-1].tool_calls):
        seen.append((await read(call)).delta)
    assert "".join(delta.text for delta in seen) == "ok"
    assert [(c.name, c.arguments_json) for c in seen[-1].tool_calls] == [("add", ""), ("", "{")]
    scheduler.emit(request, list(b'"a": 1'), position=len(head))
    piece = (await read(call)).delta
    assert piece.first_token == len(head)
    assert piece.tool_calls[0].arguments_json == '"a": 1'[: len(piece.tool_calls[0].arguments_json)]
    call.cancel()
    await doors.until_idle()


async def test_calls_survive_the_scheduler(open_doors: Open, scheduler: ScriptedScheduler, address: str) -> None:
    doors = await open_doors("hermes")
    call = doors.grpc.stream(chat={"messages": ASK, "tools": GRPC_TOOLS}, output={"tokenIds": True})
    request = await scheduler.next(SubmitRequest)
    scheduler.start_request(request)
    text = f"I ask. {CALL}{ADD}".encode()
    scheduler.emit(request, list(text[:60]))
    seen = Collected()
    while sum(len(ids) for ids in seen.ids.values()) < 60:
        seen.add(await read(call))
    scheduler.vanish()
    with ScriptedScheduler(address, FACTS) as second:
        again = await second.next(SubmitRequest)
        assert [list(unpack_ints(ids)) for ids in again.output_ids] == [list(text[:60])]
        second.start_request(again)
        second.emit(again, [*text[50:], EOS], position=50, finish=STOP)
        answer = from_collected(await collect(call, seen), 0)
        assert (answer.text, answer.calls) == ("I ask.", [WEATHER, ("add", '{"a": 1}')])
        assert (answer.ids, answer.finish_reason) == ([*text, EOS], "tool_calls")
        await doors.until_idle()


async def test_a_whole_conversation(open_doors: Open, scheduler: ScriptedScheduler) -> None:
    doors = await open_doors("hermes")
    create: Any = doors.openai.chat.completions.create
    asking = asyncio.ensure_future(create(model="", messages=ASK, tools=HTTP_TOOLS))
    await write(scheduler, [f"<think>Hm.</think>{CALL}"], STOP, at_once=9, logprobs=False)
    message = (await asking).choices[0].message
    # What clients send back is what they got, all of it.
    turns = [*ASK, message.model_dump(), {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "Rain."}]
    asking = asyncio.ensure_future(create(model="", messages=turns, tools=HTTP_TOOLS, tool_choice="auto"))
    request = await scheduler.next(SubmitRequest)
    tokens = await doors.http.post("/tokenize", json={"messages": turns, "tools": HTTP_TOOLS})
    ids = list(unpack_ints(request.prompt_ids))
    assert tokens.json()["tokens"] == ids
    prompt = (await doors.http.post("/detokenize", json={"tokens": ids})).json()["prompt"]
    assert CALL in prompt
    assert '{"type": "function", "function": {"name": "weather", "description": "", "parameters"' in prompt
    scheduler.answer(request, [[*b"Rain it is.", EOS]], STOP)
    assert (await asking).choices[0].message.content == "Rain it is."


async def test_events_of_a_call(open_doors: Open, scheduler: ScriptedScheduler) -> None:
    doors = await open_doors("hermes")
    reading = asyncio.ensure_future(read_events(doors.http, CHATS, messages=ASK, tools=HTTP_TOOLS))
    await write(scheduler, [f"<think>Hm</think>{ADD}"], STOP, at_once=1000, logprobs=False)
    deltas = [chunk["choices"][0]["delta"] for chunk in (await reading).chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert {"reasoning": "Hm", "reasoning_content": "Hm"}.items() <= deltas[1].items()
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert calls[0] | {"id": "x"} == {
        "index": 0,
        "id": "x",
        "type": "function",
        "function": {"name": "add", "arguments": ""},
    }
    assert calls[0]["id"].startswith("call_")
    assert all(set(call) == {"index", "function"} and set(call["function"]) == {"arguments"} for call in calls[1:])
    assert deltas[-1] == {}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
async def test_calls_that_must_be_made(open_doors: Open, scheduler: ScriptedScheduler, choice: Any) -> None:
    doors = await open_doors("mistral")
    create: Any = doors.openai.chat.completions.create
    asking = asyncio.ensure_future(create(model="", messages=ASK, tools=HTTP_TOOLS, tool_choice=choice))
    request = await scheduler.next(SubmitRequest)
    assert request.grammar
    # The marker is a special token, for which a form of text cannot ask.
    scheduler.answer(request, [[*b'[{"name": "add", "arguments": {"a": 1}}]', EOS]], STOP)
    (found,) = (await asking).choices
    assert from_http(found) == Answer("", "", [("add", '{"a": 1}')], "tool_calls")
    mode = {"mode": "TOOL_CHOICE_MODE_REQUIRED"} if choice == "required" else {"name": "add"}
    call = doors.grpc.ask(chat={"messages": ASK, "tools": GRPC_TOOLS, "toolChoice": mode})
    same = await scheduler.next(SubmitRequest)
    assert same.grammar == request.grammar, "compiled once for both doors"
    scheduler.answer(same, [[*b'[{"name": "add", "arguments": {}}]', EOS]], STOP)
    assert from_grpc((await call).choices[0]).calls == [("add", "{}")]
    await doors.until_idle()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"ignore_eos": True}, "ignore_eos"),
        ({"tool_choice": {"type": "function", "function": {"name": "nothing"}}}, "tool_choice.function.name"),
        ({"tools": []}, "tool_choice"),
        ({"use_beam_search": True, "n": 2}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}]}, "tools"),
    ],
)
async def test_calls_that_cannot_be_required(
    open_doors: Open, scheduler: ScriptedScheduler, fields: dict[str, Any], param: str
) -> None:
    doors = await open_doors("hermes")
    status, error = await doors.error(
        CHATS, **{"messages": ASK, "tools": HTTP_TOOLS, "tool_choice": "required", **fields}
    )
    assert (status, error["param"]) == (400, param)
    assert scheduler.nothing_came()


async def test_bad_tools_are_named_as_json_has_them(open_doors: Open) -> None:
    doors = await open_doors("hermes")
    bad: Any = [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]
    for path in (CHATS, "/tokenize"):
        _, error = await doors.error(path, messages=ASK, tools=bad)
        assert error["param"] == "tools[0].function.parameters"
        _, error = await doors.error(path, messages=ASK, tools=[{"type": "function", "function": {"name": "a b"}}])
        assert error["param"] == "tools[0].function.name"


def test_schema_of_tools_is_text() -> None:
    assert parse(chat={"tools": [{"parametersJsonSchema": SCHEMA}]}).chat.tools[0].parameters_json_schema == SCHEMA

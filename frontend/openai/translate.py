"""From JSON bodies to GenerationInputs, and from the field paths of those back to JSON names.

Nothing is checked here that `octavo.frontend.validation` checks: only what has no place in a GenerationInput.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from msgspec import Raw

from octavo.frontend.config import FrontendConfig
from octavo.frontend.openai import structured
from octavo.frontend.openai.errors import bad_field
from octavo.frontend.openai.schema import ChatBody, CompletionBody, GenerationBody, Message, TokenizeChatBody
from octavo.v1 import generation_pb2 as pb

DEFAULT_COMPLETION_TOKENS = 16
"""Of /v1/completions, as OpenAI has it; a chat may take the remaining context."""

FIELDS: Mapping[str, str] = {
    "model": "model",
    "n": "sampling.n",
    "temperature": "sampling.temperature",
    "top_p": "sampling.top_p",
    "top_k": "sampling.top_k",
    "min_p": "sampling.min_p",
    "presence_penalty": "sampling.presence_penalty",
    "frequency_penalty": "sampling.frequency_penalty",
    "repetition_penalty": "sampling.repetition_penalty",
    "seed": "sampling.seed",
    "logit_bias": "sampling.logit_bias",
    "allowed_token_ids": "sampling.allowed_token_ids",
    "bad_words": "sampling.bad_words",
    "max_tokens": "stopping.max_tokens",
    "min_tokens": "stopping.min_tokens",
    "stop": "stopping.stop_strings",
    "stop_token_ids": "stopping.stop_token_ids",
    "include_stop_str_in_output": "stopping.include_stop_string",
    "ignore_eos": "stopping.ignore_eos",
    "logprobs": "output.logprobs",
    "prompt_logprobs": "output.prompt_logprobs",
    "echo": "output.echo",
    "skip_special_tokens": "output.skip_special_tokens",
    "return_token_ids": "output.token_ids",
    "length_penalty": "sampling.beam_search.length_penalty",
    "early_stopping": "sampling.beam_search.early_stopping",
    "priority": "priority",
    "cache_salt": "cache_salt",
}
"""JSON names of fields, with their place in a GenerationInput."""

PROMPT_FIELDS: Mapping[str, str] = {
    "text": "prompt",
    "token_ids": "prompt",
    "token_ids.ids": "prompt",
    "prompt": "prompt",
    "chat": "messages",
    "chat.messages": "messages",
    "chat.add_generation_prompt": "add_generation_prompt",
    "chat.continue_final_message": "continue_final_message",
    "chat.template_kwargs_json": "chat_template_kwargs",
    "chat.tools": "tools",
    "chat.tool_choice": "tool_choice",
    "chat.parallel_tool_calls": "parallel_tool_calls",
}
"""Places in a GenerationInput that its prompt comes from, with their JSON names."""

_NAMES: Mapping[str, str] = {
    **{place: name for name, place in FIELDS.items()},
    **PROMPT_FIELDS,
    **{place: place for place in structured.PLACES},
    "sampling.beam_search": "use_beam_search",
    "sampling.beam_search.width": "n",
}
_LAST_STEP = re.compile(r"(\[[^\[\]]*\]|\.?[^.\[\]]+)$")


@dataclass(frozen=True)
class Translation:
    """A body as requests, one a prompt.

    Attributes:
        common: what they have in common; a chat is there whole.
        names: JSON names where they differ from FIELDS, by the latter.
        prompts: those of a completion.
        is_list: whether the body has a list of prompts, of which an error names one.
        echo: of a chat, what an echo repeats.
    """

    common: pb.GenerationInput
    names: Mapping[str, str]
    prompts: Sequence[str | list[int]] = ()
    is_list: bool = False
    echo: str | None = None

    def __len__(self) -> int:
        return len(self.prompts) or 1

    def input(self, index: int) -> pb.GenerationInput:
        """Return a request. Each is made when its turn comes to be checked: copies of long lists could be many.

        Raises:
            UnicodeError: a text is none.
        """
        if not self.prompts:
            return self.common
        one, prompt = pb.GenerationInput(), self.prompts[index]
        one.CopyFrom(self.common)
        if isinstance(prompt, str):
            one.text = prompt
        else:
            one.token_ids.ids.extend(prompt)
        return one

    def param(self, path: str, index: int) -> str | None:
        """Return the JSON name of a path in the `index`-th input; None if it is all of it."""
        name, rest = json_name(path)
        if name == "prompt" and self.is_list:
            rest = f"[{index}]{rest}"
        return self.names.get(name, name) + rest if name else None


def json_name(path: str) -> tuple[str, str]:
    """Return a field's JSON name, and what of its path lies below; both empty if it is the whole input."""
    place, rest = path.removeprefix("input").removeprefix("."), ""
    while place:
        if name := _NAMES.get(place):
            return name, json_rest(name, rest)
        step = _LAST_STEP.search(place)
        if step is None:
            break
        place, rest = place[: step.start()], step.group() + rest
    return "", ""


def json_rest(name: str, rest: str) -> str:
    """Return what of a path lies below a field, as JSON has it: what is known of functions lies in an object there."""
    if name == "tools" or ".tool_calls[" in rest:
        for field, place in _IN_FUNCTIONS.items():
            if rest.endswith(field):
                return rest.removesuffix(field) + place
    return ".function.name" if name == "tool_choice" and rest == ".name" else rest


_IN_FUNCTIONS = {
    ".name": ".function.name",
    ".description": ".function.description",
    ".parameters_json_schema": ".function.parameters",
    ".arguments_json": ".function.arguments",
}


def translate_completion(body: CompletionBody, config: FrontendConfig) -> Translation:
    """Return the requests of POST /v1/completions.

    Raises:
        HttpError: a field asks for what is not served, or there are too many choices.
    """
    _refuse_unserved(body, _UNSERVED_IN_COMPLETIONS)
    prompts = _prompts(body.prompt)
    if body.n == 0:
        raise bad_field("n", f"0 must be from 1 to {config.max_n}")
    num_choices = len(prompts) * (1 if body.n is None else body.n)
    if num_choices > config.max_n and len(prompts) > 1:
        message = f"{len(prompts)} prompts with n = {num_choices // len(prompts)} are {num_choices} choices"
        raise bad_field("prompt", f"{message}, limit {config.max_n}")
    common = _common(body)
    if body.logprobs is not None:
        common.output.logprobs = body.logprobs
        if body.echo:
            # Those of the output cover the prompt as well then.
            common.output.prompt_logprobs = max(body.logprobs, body.prompt_logprobs or 0)
    if body.max_tokens is None:
        common.stopping.max_tokens = DEFAULT_COMPLETION_TOKENS
    is_list = isinstance(body.prompt, list) and not all(isinstance(item, int) for item in body.prompt)
    return Translation(common, structured.constrain(body, common), prompts, is_list)


def translate_chat(body: ChatBody) -> Translation:
    """Return the request of POST /v1/chat/completions.

    Raises:
        HttpError: a field asks for what is not served.
    """
    _refuse_unserved(body, _UNSERVED_IN_CHATS)
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_field("top_logprobs", "logprobs must be true")
    one = _common(body)
    one.chat.CopyFrom(chat_prompt(body))
    _choose_tools(one.chat, body)
    if body.logprobs:
        one.output.logprobs = body.top_logprobs or 0
    names = {"logprobs": "top_logprobs", **structured.constrain(body, one)}
    if body.max_completion_tokens is not None:
        one.stopping.max_tokens = body.max_completion_tokens
        names["max_tokens"] = "max_completion_tokens"
    return Translation(one, names, echo=_chat_echo(body) if body.echo else None)


def _chat_echo(body: ChatBody) -> str:
    """Return what a chat's echo repeats: the last message, if the answer goes on with it as the same speaker's."""
    opens = not body.continue_final_message if body.add_generation_prompt is None else body.add_generation_prompt
    if not body.messages or (opens and body.messages[-1].role != "assistant"):
        return ""
    return _content(body.messages[-1], len(body.messages) - 1)


def chat_prompt(body: ChatBody | TokenizeChatBody) -> pb.ChatPrompt:
    """Return a conversation.

    Raises:
        HttpError: a message holds more than text.
    """
    chat = pb.ChatPrompt(continue_final_message=bool(body.continue_final_message))
    for i, message in enumerate(body.messages):
        _refuse_unserved(message, _UNSERVED_IN_MESSAGES, f"messages[{i}].")
        turn = chat.messages.add(role=message.role, content=_content(message, i), name=message.name or "")
        turn.tool_call_id = message.tool_call_id or ""
        turn.reasoning = message.reasoning or message.reasoning_content or ""
        for j, call in enumerate(message.tool_calls or ()):
            if call.type != "function" or call.function is None:
                raise bad_field(f"messages[{i}].tool_calls[{j}].type", "only functions are served")
            turn.tool_calls.add(id=call.id, name=call.function.name, arguments_json=call.function.arguments or "")
    for i, tool in enumerate(body.tools or ()):
        if tool.type != "function" or tool.function is None:
            raise bad_field(f"tools[{i}].type", "only functions are served")
        function = tool.function
        schema = bytes(function.parameters).decode() if given(function.parameters) else ""
        chat.tools.add(name=function.name, description=function.description or "", parameters_json_schema=schema)
    if body.add_generation_prompt is not None:
        chat.add_generation_prompt = body.add_generation_prompt
    if asks_for(body.chat_template_kwargs):
        chat.template_kwargs_json = bytes(body.chat_template_kwargs).decode()
    return chat


def given(raw: Raw) -> bool:
    """Say whether a field that is not looked into is there."""
    return bytes(raw) not in (b"", b"null")


def _choose_tools(chat: pb.ChatPrompt, body: ChatBody) -> None:
    choice = body.tool_choice
    if isinstance(choice, str):
        if choice not in _TOOL_CHOICES:
            raise bad_field("tool_choice", f"{choice[:80]!r} must be none, auto, required or an object")
        chat.tool_choice.mode = _TOOL_CHOICES[choice]
    elif choice is not None:
        if choice.type != "function" or choice.function is None:
            raise bad_field("tool_choice.type", "only functions are served")
        chat.tool_choice.name = choice.function.name
    if body.parallel_tool_calls is not None:
        chat.parallel_tool_calls = body.parallel_tool_calls


_TOOL_CHOICES: Mapping[str, pb.ToolChoiceMode.ValueType] = {
    "none": pb.TOOL_CHOICE_MODE_NONE,
    "auto": pb.TOOL_CHOICE_MODE_AUTO,
    "required": pb.TOOL_CHOICE_MODE_REQUIRED,
}


def asks_for(raw: Raw) -> bool:
    """Say whether a field that is not looked into holds something."""
    return bytes(raw) not in (b"", b"null", b"[]", b"{}", b"false")


def _content(message: Message, index: int) -> str:
    if isinstance(message.content, str):
        return message.content
    if message.content is None:
        if message.role == "assistant" and message.tool_calls:
            return ""
        raise bad_field(f"messages[{index}].content", "text is needed; only calls of tools may stand in its place")
    for i, part in enumerate(message.content):
        holds_more = any(_given(getattr(part, name)) for name in ("image_url", "input_audio", "file", "refusal"))
        if part.type != "text" or part.text is None or holds_more:
            raise bad_field(f"messages[{index}].content[{i}]", "only parts of type text, with text alone, are served")
    return "\n".join(part.text or "" for part in message.content)


def _prompts(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """Return the prompts that a body means by its own."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise bad_field("prompt", "it is empty")
    kinds = {type(item) for item in prompt}
    if len(kinds) > 1:
        raise bad_field("prompt", "it mixes texts, ids and lists of ids")
    if kinds == {int}:
        return [[item for item in prompt if isinstance(item, int)]]
    return [item for item in prompt if not isinstance(item, int)]


def _common(body: GenerationBody) -> pb.GenerationInput:
    found = pb.GenerationInput()
    for name, place in FIELDS.items():
        value = getattr(body, name, None)
        if value is None or name == "logprobs":
            continue
        group, _, field = place.rpartition(".")
        target: Any = found
        for part in group.split(".") if group else ():
            target = getattr(target, part)
        if name == "seed":
            value = _seed(value)
        if name == "stop" and isinstance(value, str):
            value = [value]
        if isinstance(value, list):
            getattr(target, field).extend(value)
        elif isinstance(value, dict):
            getattr(target, field).update(value)
        else:
            setattr(target, field, value)
    _search(body, found.sampling)
    return found


def _search(body: GenerationBody, sampling: pb.SamplingParams) -> None:
    """Let n be the width of a search, of which all come back; without one, see that nothing is said of it."""
    if body.use_beam_search:
        sampling.n = sampling.beam_search.width = 1 if body.n is None else body.n
        return
    if not sampling.HasField("beam_search"):
        return
    for name, asks in (
        ("length_penalty", body.length_penalty not in (None, 1.0)),
        ("early_stopping", body.early_stopping),
    ):
        if asks:
            raise bad_field(name, "use_beam_search must be true")
    sampling.ClearField("beam_search")


def _seed(value: int) -> int:
    """Return a seed as the 64 bits that it is: clients send signed and unsigned ones."""
    if not -(2**63) <= value < 2**64:
        raise bad_field("seed", f"{value} has more than 64 bits")
    return value % 2**64


def _given(value: object) -> bool:
    return asks_for(value) if isinstance(value, Raw) else value not in (None, False, "", [])


def _is_choice(value: object) -> bool:
    return isinstance(value, Raw) and bytes(value) not in (b"", b"null", b'"none"')


_Asks: TypeAlias = Callable[[Any], bool]

_UNSERVED_IN_COMPLETIONS: Mapping[str, tuple[_Asks, str]] = {
    "best_of": (lambda value: value not in (None, 1), "only 1 is served"),
    "suffix": (_given, "it is not served"),
}
_UNSERVED_IN_CHATS: Mapping[str, tuple[_Asks, str]] = {
    "functions": (_given, "it is not served: send tools"),
    "function_call": (_is_choice, "it is not served: send tool_choice"),
    "modalities": (lambda value: value not in (None, ["text"]), "only text is served"),
    "audio": (_given, "only text is served"),
    "web_search_options": (_given, "it is not served"),
    "reasoning_effort": (_given, "it is a variable of the chat template: set it in chat_template_kwargs"),
}
_UNSERVED_IN_MESSAGES: Mapping[str, tuple[_Asks, str]] = {
    "function_call": (_given, "it is not served: send tool_calls"),
    "audio": (_given, "only text is served"),
}
"""Fields that are taken as long as they ask for nothing, with what tells whether they do."""


def _refuse_unserved(body: object, table: Mapping[str, tuple[_Asks, str]], prefix: str = "") -> None:
    for name, (asks, message) in table.items():
        if asks(getattr(body, name)):
            raise bad_field(prefix + name, message)


def refuse_stream_options(body: GenerationBody) -> None:
    """See that stream_options come with a stream, and prompt_logprobs with none, as vLLM has it.

    Raises:
        HttpError: they do not, or ask for what is not served.
    """
    if body.stream and body.prompt_logprobs is not None:
        raise bad_field("prompt_logprobs", "streams do not have them")
    options = body.stream_options
    if options is None:
        return
    if not body.stream:
        raise bad_field("stream_options", "stream must be true")
    if options.continuous_usage_stats:
        raise bad_field("stream_options.continuous_usage_stats", "it is not served")

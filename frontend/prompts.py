"""A request's prompt to ids: plain text, ids, or a conversation. Runs in a thread: it may take a while."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from octavo.frontend.chat_template import END_MARK, TemplateError
from octavo.frontend.constraint import Constraint
from octavo.frontend.errors import InvalidArgument
from octavo.frontend.model import ModelFiles
from octavo.frontend.tools.definitions import ToolUse, check_calls, check_tools, describe_calls, describe_tools
from octavo.frontend.tools.detect import find_start
from octavo.frontend.tools.parser import OutputForm
from octavo.frontend.tools.reasoning import Start
from octavo.frontend.tools.required import required_calls, required_dialect
from octavo.v1 import generation_pb2 as pb

TEMPLATE_KWARGS: Mapping[str, tuple[type, ...]] = {
    "enable_thinking": (bool,),
    "reasoning_effort": (str,),
    "date_string": (str,),
}
"""Template variables that callers may set, with their types: others could replace what the template relies on."""

MAX_TEMPLATE_KWARGS_CHARS = 4096

_MARKS = [chr(code) for code in range(0xFDD0, ord(END_MARK[0]))]
"""Noncharacters of Unicode (never in interchanged text): one that no message holds marks what callers wrote."""

_Message: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class CheckedChat:
    """What of a conversation is known before it is rendered.

    Attributes:
        variables: extra variables of the template.
        tools: what the model may call; None if nothing.
    """

    variables: Mapping[str, object] = field(default_factory=dict)
    tools: ToolUse | None = None


@dataclass(frozen=True)
class RenderedChat:
    """A conversation as a prompt.

    Attributes:
        text: of the prompt.
        ids: its tokens.
        start: where the text begins that the model answers with; None if it has no reasoning.
    """

    text: str
    ids: list[int]
    start: Start | None


def check_chat(chat: pb.ChatPrompt, model: ModelFiles) -> CheckedChat:
    """Check a conversation as far as the template need not run and long JSON need not be read.

    Raises:
        InvalidArgument: names the field.
    """
    path = "input.chat"
    template = model.chat_template
    if template is None:
        raise InvalidArgument("the model has no chat template: send text or token ids", field_path=path)
    for i, message in enumerate(chat.messages):
        if not message.role:
            raise InvalidArgument("a message needs a role", field_path=f"{path}.messages[{i}].role")
    check_calls(chat.messages)
    if chat.continue_final_message:
        if chat.HasField("add_generation_prompt") and chat.add_generation_prompt:
            text = "excludes add_generation_prompt: a message is either continued or a new one begun"
            raise InvalidArgument(text, field_path=f"{path}.continue_final_message")
        if not template.reads_content:
            text = "the chat template does not read the content of messages"
            raise InvalidArgument(text, field_path=f"{path}.continue_final_message")
        if chat.messages and chat.messages[-1].tool_calls:
            text = "a message that calls tools cannot be continued"
            raise InvalidArgument(text, field_path=f"{path}.continue_final_message")
    tools = check_tools(chat)
    if tools is not None:
        if not template.reads_tools:
            text = "the model's chat template does not show tools to the model"
            raise InvalidArgument(text, field_path=f"{path}.tools")
        if model.tool_dialect is None:
            text = "how the model writes calls is not known: the service needs --tool-call-parser"
            raise InvalidArgument(text, field_path=f"{path}.tools")
    return CheckedChat(_template_kwargs(chat.template_kwargs_json), tools)


def output_form(model: ModelFiles, checked: CheckedChat, start: Start | None) -> OutputForm | None:
    """Return what reads the model's answers to a conversation; None if they are plain text."""
    tools, dialect = checked.tools, model.tool_dialect
    if tools is None or dialect is None:
        return None if start is None else OutputForm(start=start)
    if tools.required:
        dialect = required_dialect(dialect)
    return OutputForm(dialect, frozenset(tools.names), None if tools.parallel else 1, start)


def required_form(
    model: ModelFiles, chat: pb.ChatPrompt, checked: CheckedChat, start: Start | None
) -> Constraint | None:
    """Return the form of the calls that must be made; None if none must.

    Raises:
        InvalidArgument: the tools' schemas are none, or too large.
    """
    if checked.tools is None or not checked.tools.required or model.tool_dialect is None:
        return None
    return required_calls(model.tool_dialect, checked.tools, describe_tools(chat.tools), start)


def render_chat(model: ModelFiles, chat: pb.ChatPrompt, checked: CheckedChat) -> RenderedChat:
    """Render and encode a conversation that `check_chat` has passed.

    Raises:
        InvalidArgument: the template refuses the conversation (the message is the template's own), or JSON in it is none.
    """
    template, variables = model.chat_template, checked.variables
    messages = _as_dicts(chat.messages, template is not None and template.knows_developers)
    tools = describe_tools(chat.tools) if checked.tools is not None else None
    texts = [*_texts_of(messages), *_texts_of(tools), *_texts_of(variables)]
    if not model.tokenizer.has_special_tokens(texts):
        text = _render(model, chat, messages, variables, tools)
        ids = model.tokenizer.encode_template(text)
    else:
        # Somebody wrote a special token: it must stay text, while those of the template must not.
        mark = _unused_mark(texts)

        def defuse(text: str) -> str:
            return model.tokenizer.defuse(text, mark)

        kwargs = _mapped(variables, defuse)
        marked = _render(model, chat, _mapped(messages, defuse), kwargs, _mapped(tools, defuse))
        text, ids = marked.replace(mark, ""), model.tokenizer.encode_marked_template(marked, mark)
    continued = chat.messages[-1].content if chat.continue_final_message else None
    return RenderedChat(text, ids, find_start(model.reasoning, text, continued))


def _render(
    model: ModelFiles,
    chat: pb.ChatPrompt,
    messages: Sequence[_Message],
    variables: Mapping[str, object],
    tools: Sequence[dict[str, Any]] | None,
) -> str:
    if model.chat_template is None:
        raise InvalidArgument("the model has no chat template", field_path="input.chat")
    opens = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else not chat.continue_final_message
    try:
        return model.chat_template.render(messages, opens, chat.continue_final_message, variables, tools)
    except TemplateError as error:
        raise InvalidArgument(str(error), field_path="input.chat.messages") from error


def _as_dicts(messages: Sequence[pb.ChatMessage], knows_developers: bool) -> list[_Message]:
    """Return messages as templates have them; what is not there has no key, as templates ask for it.

    A message without text has the empty one: templates take it where None would break some of them.
    """
    found: list[_Message] = []
    names_by_id: dict[str, str] = {}
    for i, message in enumerate(messages):
        role = "system" if message.role == "developer" and not knows_developers else message.role
        fields: _Message = {"role": role, "content": message.content}
        name = message.name or names_by_id.get(message.tool_call_id, "")
        if name:
            fields["name"] = name
        if message.reasoning:
            fields["reasoning_content"] = fields["reasoning"] = fields["thinking"] = message.reasoning
        if message.tool_calls:
            fields["tool_calls"] = describe_calls(message.tool_calls, i)
            names_by_id.update((call.id, call.name) for call in message.tool_calls if call.id)
        if message.tool_call_id:
            fields["tool_call_id"] = message.tool_call_id
        found.append(fields)
    return found


def _texts_of(value: object) -> Iterator[str]:
    """Yield the texts in a value of JSON, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield key
            yield from _texts_of(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts_of(item)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """Return a value of JSON with every text in it changed, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key): _mapped(item, change) for key, item in value.items()}
    return [_mapped(item, change) for item in value] if isinstance(value, list) else value


def _unused_mark(texts: Sequence[str]) -> str:
    for mark in _MARKS:
        if not any(mark in text for text in texts):
            return mark
    raise InvalidArgument(
        "special tokens beside all of the noncharacters U+FDD0 to U+FDEE", field_path="input.chat.messages"
    )


def _template_kwargs(text: str) -> dict[str, object]:
    path = "input.chat.template_kwargs_json"
    if not text:
        return {}
    if len(text) > MAX_TEMPLATE_KWARGS_CHARS:
        raise InvalidArgument(f"{len(text)} characters, limit {MAX_TEMPLATE_KWARGS_CHARS}", field_path=path)
    try:
        pairs = json.loads(text, object_pairs_hook=lambda pairs: pairs)
    except (ValueError, RecursionError):
        raise InvalidArgument("no valid JSON", field_path=path) from None
    # An object comes as its pairs, so that a key given twice shows.
    if not text.lstrip().startswith("{"):
        raise InvalidArgument("no JSON object", field_path=path)
    kwargs = dict(pairs)
    if len(kwargs) < len(pairs):
        raise InvalidArgument("a key comes twice", field_path=path)
    for key, value in kwargs.items():
        if key not in TEMPLATE_KWARGS:
            raise InvalidArgument(f"unknown key {key[:80]!r}; known are {', '.join(TEMPLATE_KWARGS)}", field_path=path)
        if not isinstance(value, TEMPLATE_KWARGS[key]):
            expected = " or ".join(t.__name__ for t in TEMPLATE_KWARGS[key])
            raise InvalidArgument(f"{key} must be a {expected}", field_path=path)
    return kwargs

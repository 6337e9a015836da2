"""A request's prompt to ids: plain text, ids, or a conversation. Runs in a thread: it may take a while."""

import json
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from octavo.frontend.chat_template import END_MARK, ChatTemplate, TemplateError
from octavo.frontend.errors import InvalidArgument
from octavo.frontend.model import ModelFiles
from octavo.frontend.unserved import refuse_unserved_chat
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

_Message: TypeAlias = dict[str, str]


def check_chat(chat: pb.ChatPrompt, template: ChatTemplate | None) -> dict[str, object]:
    """Check a conversation as far as the template need not run; return the extra template variables.

    Raises:
        InvalidArgument: names the field.
    """
    path = "input.chat"
    refuse_unserved_chat(chat)
    if template is None:
        raise InvalidArgument("the model has no chat template: send text or token ids", field_path=path)
    for i, message in enumerate(chat.messages):
        if not message.role:
            raise InvalidArgument("a message needs a role", field_path=f"{path}.messages[{i}].role")
    if chat.continue_final_message:
        if chat.HasField("add_generation_prompt") and chat.add_generation_prompt:
            text = "excludes add_generation_prompt: a message is either continued or a new one begun"
            raise InvalidArgument(text, field_path=f"{path}.continue_final_message")
        if not template.reads_content:
            text = "the chat template does not read the content of messages"
            raise InvalidArgument(text, field_path=f"{path}.continue_final_message")
    return _template_kwargs(chat.template_kwargs_json)


def encode_chat(model: ModelFiles, chat: pb.ChatPrompt, variables: Mapping[str, object]) -> list[int]:
    """Return the ids of a conversation that `check_chat` has passed.

    Raises:
        InvalidArgument: the template refuses the conversation; the message is the template's own.
    """
    return render_chat(model, chat, variables)[1]


def render_chat(model: ModelFiles, chat: pb.ChatPrompt, variables: Mapping[str, object]) -> tuple[str, list[int]]:
    """Render and encode a conversation that `check_chat` has passed; return the text and its ids.

    Raises:
        InvalidArgument: the template refuses the conversation; the message is the template's own.
    """
    messages = [_as_dict(message) for message in chat.messages]
    texts = [text for message in messages for text in message.values()]
    texts += [value for value in variables.values() if isinstance(value, str)]
    if not model.tokenizer.has_special_tokens(texts):
        rendered = _render(model, chat, messages, variables)
        return rendered, model.tokenizer.encode_template(rendered)
    # Somebody wrote a special token: it must stay text, while those of the template must not.
    mark = _unused_mark(texts)
    defuse = model.tokenizer.defuse
    messages = [{key: defuse(text, mark) for key, text in message.items()} for message in messages]
    variables = {key: defuse(v, mark) if isinstance(v, str) else v for key, v in variables.items()}
    rendered = _render(model, chat, messages, variables)
    return rendered.replace(mark, ""), model.tokenizer.encode_marked_template(rendered, mark)


def _render(
    model: ModelFiles, chat: pb.ChatPrompt, messages: Sequence[_Message], variables: Mapping[str, object]
) -> str:
    if model.chat_template is None:
        raise InvalidArgument("the model has no chat template", field_path="input.chat")
    opens = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else not chat.continue_final_message
    try:
        return model.chat_template.render(messages, opens, chat.continue_final_message, variables)
    except TemplateError as error:
        raise InvalidArgument(str(error), field_path="input.chat.messages") from error


def _as_dict(message: pb.ChatMessage) -> _Message:
    fields = {"role": message.role, "content": message.content}
    if message.name:
        fields["name"] = message.name
    return fields


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

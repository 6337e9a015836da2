"""The tools of a chat and the calls in its messages: checked, and described as chat templates expect them."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from octavo.frontend.errors import InvalidArgument
from octavo.v1 import generation_pb2 as pb

MAX_TOOLS = 128
MAX_CALLS = 128
"""Of one message."""
MAX_JSON_BYTES = 65536
"""Of a tool's schema, and of a call's arguments."""
MAX_JSON_DEPTH = 32
MAX_SHOWN = 80

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_PATH = "input.chat"
_MODES = pb.ToolChoiceMode


@dataclass(frozen=True)
class ToolUse:
    """What a chat says of tools.

    Attributes:
        names: of the tools, in order.
        required: whether one must be called.
        named: the tool that must be called; '' if any may.
        parallel: whether several calls may be made.
    """

    names: tuple[str, ...]
    required: bool = False
    named: str = ""
    parallel: bool = True


def check_tools(chat: pb.ChatPrompt) -> ToolUse | None:
    """Check tools and their choice as far as JSON need not be read; return None if none may be called.

    Raises:
        InvalidArgument: names the field.
    """
    names = _check_names(chat.tools)
    choice = chat.tool_choice
    kind = choice.WhichOneof("kind")
    if kind == "mode" and choice.mode not in _MODES.values():
        raise InvalidArgument(f"{choice.mode} is no mode", field_path=f"{_PATH}.tool_choice.mode")
    required = kind == "name" or (kind == "mode" and choice.mode == pb.TOOL_CHOICE_MODE_REQUIRED)
    if required and not names:
        raise InvalidArgument("a call is asked for, and there are no tools", field_path=f"{_PATH}.tool_choice")
    if kind == "name" and choice.name not in names:
        shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
        message = f"no tool is named {choice.name[:MAX_SHOWN]!r}; there is {shown}"
        raise InvalidArgument(message, field_path=f"{_PATH}.tool_choice.name")
    if not names or (kind == "mode" and choice.mode == pb.TOOL_CHOICE_MODE_NONE):
        return None
    parallel = chat.parallel_tool_calls if chat.HasField("parallel_tool_calls") else True
    return ToolUse(names, required, choice.name if kind == "name" else "", parallel and kind != "name")


def check_calls(messages: Sequence[pb.ChatMessage]) -> None:
    """Check the calls in a conversation's messages as far as JSON need not be read.

    Raises:
        InvalidArgument: names the field.
    """
    for i, message in enumerate(messages):
        if not message.tool_calls:
            continue
        path = f"{_PATH}.messages[{i}].tool_calls"
        if message.role != "assistant":
            raise InvalidArgument(f"only the assistant calls tools, not {message.role[:MAX_SHOWN]!r}", field_path=path)
        if len(message.tool_calls) > MAX_CALLS:
            raise InvalidArgument(f"{len(message.tool_calls)} calls, limit {MAX_CALLS}", field_path=path)
        for j, call in enumerate(message.tool_calls):
            if not call.name:
                raise InvalidArgument("a call needs a name", field_path=f"{path}[{j}].name")


def describe_tools(tools: Sequence[pb.Tool]) -> list[dict[str, Any]]:
    """Return tools in OpenAI's shape, as templates have them.

    Raises:
        InvalidArgument: a schema is no JSON object within its bounds.
    """
    described = []
    for i, tool in enumerate(tools):
        function = {"name": tool.name, "description": tool.description, "parameters": tool_schema(tool, i)}
        described.append({"type": "function", "function": function})
    return described


def tool_schema(tool: pb.Tool, index: int) -> dict[str, Any]:
    """Return the schema of a tool's arguments; no schema means no arguments.

    Raises:
        InvalidArgument: it is no JSON object within its bounds.
    """
    if not tool.parameters_json_schema:
        return {"type": "object", "properties": {}}
    path = f"{_PATH}.tools[{index}].parameters_json_schema"
    schema = _read_object(tool.parameters_json_schema, path)
    if schema.get("type", "object") != "object":
        raise InvalidArgument("arguments are an object: its type must be 'object'", field_path=path)
    return schema


def describe_calls(calls: Sequence[pb.ToolCall], index: int) -> list[dict[str, Any]]:
    """Return the calls of the `index`-th message in OpenAI's shape, their arguments as objects: templates write them as
    JSON themselves, or go through them.

    Raises:
        InvalidArgument: arguments are no JSON object within its bounds.
    """
    described = []
    for j, call in enumerate(calls):
        path = f"{_PATH}.messages[{index}].tool_calls[{j}].arguments_json"
        arguments = _read_object(call.arguments_json, path) if call.arguments_json else {}
        described.append({"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}})
    return described


def num_tool_bytes(chat: pb.ChatPrompt) -> int:
    """Return how much text tools and calls are."""
    num_bytes = sum(
        len(t.name) + len(t.description.encode()) + len(t.parameters_json_schema.encode()) for t in chat.tools
    )
    for message in chat.messages:
        num_bytes += len(message.tool_call_id.encode()) + len(message.reasoning.encode())
        num_bytes += sum(len((c.id + c.name + c.arguments_json).encode()) for c in message.tool_calls)
    return num_bytes


def _check_names(tools: Sequence[pb.Tool]) -> tuple[str, ...]:
    path = f"{_PATH}.tools"
    if len(tools) > MAX_TOOLS:
        raise InvalidArgument(f"{len(tools)} tools, limit {MAX_TOOLS}", field_path=path)
    places: dict[str, int] = {}
    for i, tool in enumerate(tools):
        if not _NAME.fullmatch(tool.name):
            message = f"{tool.name[:MAX_SHOWN]!r} must be 1 to 64 letters, digits, '_' and '-'"
            raise InvalidArgument(message, field_path=f"{path}[{i}].name")
        if tool.name in places:
            message = f"{tool.name!r} is the name of tools[{places[tool.name]}] already"
            raise InvalidArgument(message, field_path=f"{path}[{i}].name")
        places[tool.name] = i
    return tuple(places)


def _read_object(text: str, path: str) -> dict[str, Any]:
    num_bytes = len(text.encode())
    if num_bytes > MAX_JSON_BYTES:
        raise InvalidArgument(f"{num_bytes} bytes, limit {MAX_JSON_BYTES}", field_path=path)
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
        deepest = _depth(value)
        # Escapes can write halves of characters.
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise InvalidArgument("a text holds half of a surrogate pair", field_path=path) from None
    except (ValueError, RecursionError):
        raise InvalidArgument("no valid JSON", field_path=path) from None
    if not isinstance(value, dict):
        raise InvalidArgument("no JSON object", field_path=path)
    if deepest > MAX_JSON_DEPTH:
        raise InvalidArgument(f"nested {deepest} deep, limit {MAX_JSON_DEPTH}", field_path=path)
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(name)


def _depth(value: object) -> int:
    if isinstance(value, Mapping):
        return 1 + max(map(_depth, value.values()), default=0)
    if isinstance(value, list):
        return 1 + max(map(_depth, value), default=0)
    return 0

"""What the assistant says in a chat, whole and piece by piece: text, calls of tools, what was thought."""

from msgspec import UNSET, Struct, UnsetType

from octavo.frontend.choice import Chunk


class CalledFunction(Struct):
    """A function that is called, or what is new of it."""

    arguments: str
    name: str | UnsetType = UNSET


class ToolCall(Struct):
    """A call of a tool, or what is new of it, with its place among the choice's calls."""

    function: CalledFunction
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    index: int | UnsetType = UNSET


class Turn(Struct):
    """A message of the assistant. What it thought has two names: clients look for either."""

    content: str | None
    role: str = "assistant"
    refusal: None = None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class Delta(Struct):
    """What is new of a message."""

    content: str | UnsetType = UNSET
    role: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


def delta_of(chunk: Chunk) -> Delta:
    """Return what a chunk says."""
    if not (chunk.reasoning or chunk.calls):
        return Delta(content=chunk.text)
    reasoning = chunk.reasoning or UNSET
    calls = [
        ToolCall(CalledFunction(call.arguments, call.name), call.call_id, "function", call.number)
        if call.name
        else ToolCall(CalledFunction(call.arguments), index=call.number)
        for call in chunk.calls
    ]
    return Delta(chunk.text or UNSET, UNSET, reasoning, reasoning, calls or UNSET)


def turn_of(chunk: Chunk) -> Turn:
    """Return a whole answer, which is one chunk."""
    calls: list[ToolCall] = []
    for call in chunk.calls:
        if call.name:
            calls.append(ToolCall(CalledFunction("", call.name), call.call_id, "function"))
        calls[call.number].function.arguments += call.arguments
    reasoning = chunk.reasoning or UNSET
    content = chunk.text or (None if calls or chunk.reasoning else "")
    return Turn(content, reasoning=reasoning, reasoning_content=reasoning, tool_calls=calls or UNSET)

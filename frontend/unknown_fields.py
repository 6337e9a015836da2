"""Fields that this version does not know: what they ask for would be silently left out, so they are refused."""

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from octavo.frontend.errors import InvalidArgument
from octavo.v1 import generation_pb2 as pb


def check_known(message: Message, path: str) -> None:
    """Check that a message has no field of its own (not of its submessages) that this version does not know.

    Raises:
        InvalidArgument: names the number of the field.
    """
    if len(unknown := UnknownFieldSet(message)):
        number = unknown[0].field_number
        raise InvalidArgument(f"field number {number} is not known to this version", field_path=path)


def submessages(request: pb.GenerationInput) -> list[tuple[str, Message]]:
    """Return a request and all messages in it, with their paths."""
    found: list[tuple[str, Message]] = [("input", request)]
    for name in ("sampling", "stopping", "constraint", "output", "token_ids"):
        if request.HasField(name):
            found.append((f"input.{name}", getattr(request, name)))
    if request.constraint.HasField("choice"):
        found.append(("input.constraint.choice", request.constraint.choice))
    if request.sampling.HasField("beam_search"):
        found.append(("input.sampling.beam_search", request.sampling.beam_search))
    return found + chat_messages(request.chat) if request.HasField("chat") else found


def chat_messages(chat: pb.ChatPrompt) -> list[tuple[str, Message]]:
    """Return a conversation and all messages in it, with their paths in a request."""
    found: list[tuple[str, Message]] = [("input.chat", chat), ("input.chat.tool_choice", chat.tool_choice)]
    found += [(f"input.chat.tools[{i}]", tool) for i, tool in enumerate(chat.tools)]
    for i, message in enumerate(chat.messages):
        path = f"input.chat.messages[{i}]"
        found.append((path, message))
        found += [(f"{path}.tool_calls[{j}]", call) for j, call in enumerate(message.tool_calls)]
    return found

"""Fields of the public surface that are not served yet: asking for one is refused by its name, never ignored."""

from collections.abc import Callable, Mapping

from octavo.frontend.errors import InvalidArgument
from octavo.v1 import generation_pb2 as pb

_UNSERVED: Mapping[str, Callable[[pb.GenerationInput], bool]] = {
    "input.sampling.beam_search": lambda one: one.sampling.HasField("beam_search"),
    "input.output.prompt_logprobs": lambda one: one.output.HasField("prompt_logprobs"),
    "input.output.echo": lambda one: one.output.echo,
}

_UNSERVED_IN_CHATS: Mapping[str, Callable[[pb.ChatPrompt], bool]] = {
    "input.chat.tools": lambda chat: bool(chat.tools),
    "input.chat.tool_choice": lambda chat: chat.HasField("tool_choice"),
    "input.chat.messages": lambda chat: any(m.tool_calls or m.tool_call_id for m in chat.messages),
}


def refuse_unserved(request: pb.GenerationInput) -> None:
    """See that a request asks for nothing that is not served yet.

    Raises:
        InvalidArgument: names the field.
    """
    for path, asks in _UNSERVED.items():
        if asks(request):
            raise InvalidArgument("not served yet", field_path=path)


def refuse_unserved_chat(chat: pb.ChatPrompt) -> None:
    """See that a conversation asks for nothing that is not served yet.

    Raises:
        InvalidArgument: names the field.
    """
    for path, asks in _UNSERVED_IN_CHATS.items():
        if asks(chat):
            raise InvalidArgument("not served yet", field_path=path)

"""Fields of the public surface that are not served yet: asking for one is refused by its name, never ignored."""

from collections.abc import Callable, Mapping

from octavo.frontend.errors import InvalidArgument
from octavo.frontend.tools.definitions import ToolUse
from octavo.v1 import generation_pb2 as pb

_UNSERVED: Mapping[str, Callable[[pb.GenerationInput], bool]] = {
    "input.sampling.beam_search": lambda one: one.sampling.HasField("beam_search"),
}


def refuse_unserved(request: pb.GenerationInput) -> None:
    """See that a request asks for nothing that is not served yet.

    Raises:
        InvalidArgument: names the field.
    """
    for path, asks in _UNSERVED.items():
        if asks(request):
            raise InvalidArgument("not served yet", field_path=path)


def refuse_unserved_tools(tools: ToolUse) -> None:
    """See that a conversation asks for nothing that is not served yet.

    Raises:
        InvalidArgument: names the field.
    """
    if tools.required:
        message = "not served yet: the model may call tools or not (auto), or is shown none (none)"
        raise InvalidArgument(message, field_path="input.chat.tool_choice")

"""Fields of the public surface that are not served yet: asking for one is refused by its name, never ignored."""

from collections.abc import Callable, Mapping

from octavo.frontend.errors import InvalidArgument
from octavo.v1 import generation_pb2 as pb

_UNSERVED: Mapping[str, Callable[[pb.GenerationInput], bool]] = {}


def refuse_unserved(request: pb.GenerationInput) -> None:
    """See that a request asks for nothing that is not served yet.

    Raises:
        InvalidArgument: names the field.
    """
    for path, asks in _UNSERVED.items():
        if asks(request):
            raise InvalidArgument("not served yet", field_path=path)

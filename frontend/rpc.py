"""How requests are read: gRPC itself would answer bytes that are no message with UNKNOWN, in Python's words."""

from collections.abc import Callable
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

M = TypeVar("M", bound=Message)


def parse(kind: type[M]) -> Callable[[bytes], M | None]:
    """Return a deserializer that answers None to bytes that are no such message; the method then refuses them."""

    def read(data: bytes) -> M | None:
        try:
            return kind.FromString(data)
        except DecodeError:
            return None

    return read

"""Large messages of protobuf: what they hold is counted before they are parsed, and both is done in a thread.

A field of two bytes can become an object of a hundred: a message of the largest size, made of nothing but such fields,
would take a gigabyte, and the event loop for a second.
"""

from functools import cache
from typing import Generic, TypeVar, cast

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message

from octavo.frontend.errors import InvalidArgument

INLINE_BYTES = 32768
"""Messages up to this size are parsed at once."""

MAX_FIELDS = 131_072
"""Of a message with all that it contains; a list of numbers in packed form (as all libraries write it) is one field."""

MAX_NUMBERS = 2**20
"""Of one packed list: more than any context has tokens."""

_PIECE_BYTES = 2**18

_CONTINUED = bytes(range(128, 256))
"""Bytes that end no number."""

M = TypeVar("M", bound=Message)


class Unread(Generic[M]):
    """A large message that has not been parsed yet.

    Args:
        kind: its type.
        data: its bytes.
    """

    def __init__(self, kind: type[M], data: bytes) -> None:
        self.kind = kind
        self._data = data

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return len(self._data)

    def read(self) -> M:
        """Parse it, once; it may take some tens of milliseconds.

        Raises:
            InvalidArgument: the bytes are no such message, or it has too many fields or an unknown one.
        """
        data, self._data = self._data, b""
        check_fields(data, self.kind)
        try:
            return self.kind.FromString(data)
        except DecodeError:
            raise malformed(self.kind) from None


def malformed(kind: type[Message]) -> InvalidArgument:
    """Return what is told of bytes that are no message of a kind."""
    return InvalidArgument(f"the bytes are no {kind.DESCRIPTOR.full_name}", field_path="")


def check_fields(data: bytes, message: type[Message], limit: int = MAX_FIELDS) -> None:
    """Count the fields of a message and of all in it. Bytes that are no message pass: parsing them will tell.

    Raises:
        InvalidArgument: there are more than the limit, one that is not known, or one with more than MAX_NUMBERS numbers.
    """
    count = 0
    left = [(0, len(data), cast(Descriptor, message.DESCRIPTOR), "")]
    while left:
        place, end, kind, path = left.pop()
        known = _fields(kind)
        while place < end:
            count += 1
            if count > limit:
                raise InvalidArgument(f"the message has more than {limit} fields", field_path=path)
            tag, place = _varint(data, place, end)
            if tag >> 3 not in known:
                raise InvalidArgument(f"field number {tag >> 3} is not known to this version", field_path=path)
            name, contained, is_packed = known[tag >> 3]
            match tag & 7:
                case 0:
                    _, place = _varint(data, place, end)
                case 1:
                    place += 8
                case 2:
                    size, place = _varint(data, place, end)
                    inner = f"{path}.{name}" if path else name
                    if contained is not None and place + size <= end:
                        left.append((place, place + size, contained, inner))
                    elif is_packed and size > MAX_NUMBERS:
                        _check_numbers(memoryview(data)[place : place + size], inner)
                    place += size
                case 5:
                    place += 4
                case _:
                    return


def _check_numbers(data: memoryview, path: str) -> None:
    count = 0
    for start in range(0, len(data), _PIECE_BYTES):  # in pieces: other threads get the interpreter in between
        count += len(bytes(data[start : start + _PIECE_BYTES]).translate(None, _CONTINUED))
        if count > MAX_NUMBERS:
            raise InvalidArgument(f"more than {MAX_NUMBERS} numbers", field_path=path)


def _varint(data: bytes, place: int, end: int) -> tuple[int, int]:
    """Return a number and where it ends; beyond `end` where it does not."""
    value = shift = 0
    while place < end:
        byte = data[place]
        place += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, place
        shift += 7
        if shift > 63:
            break
    return value, end + 1


@cache
def _fields(descriptor: Descriptor) -> dict[int, tuple[str, Descriptor | None, bool]]:
    return {one.number: (one.name, one.message_type, one.is_packed) for one in descriptor.fields}

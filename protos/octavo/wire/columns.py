"""Integer and float columns: raw little-endian 32-bit buffers inside msgpack messages.

A column costs one copy to write and none to read, whatever its length (msgpack lists cost about 20 ns an element).
"""

import sys
from array import array
from collections.abc import Iterable, Sequence

from octavo.wire.errors import MalformedMessage

INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1


def pack_ints(values: Iterable[int]) -> bytes:
    """Pack integers into a column of int32.

    Raises:
        OverflowError: a value does not fit 32 bits.
    """
    return _to_little(array("i", values))


def deinterleave(values: Iterable[int], count: int) -> list[bytes]:
    """Pack integers that come in groups of `count` into as many columns of int32.

    Raises:
        OverflowError: a value does not fit 32 bits.
    """
    together = array("i", values)
    return [_to_little(together[i::count]) for i in range(count)]


def pack_floats(values: Iterable[float]) -> bytes:
    """Pack numbers into a column of float32."""
    return _to_little(array("f", values))


def unpack_ints(column: bytes) -> Sequence[int]:
    """Read a column of int32.

    Raises:
        MalformedMessage: the length is no multiple of 4.
    """
    return _from_little("i", column)


def unpack_floats(column: bytes) -> Sequence[float]:
    """Read a column of float32.

    Raises:
        MalformedMessage: the length is no multiple of 4.
    """
    return _from_little("f", column)


def column_length(column: bytes) -> int:
    """Return the number of elements of a column.

    Raises:
        MalformedMessage: the length is no multiple of 4.
    """
    if len(column) % 4:
        raise MalformedMessage(f"column of {len(column)} bytes: not a multiple of 4")
    return len(column) // 4


def same_length(what: str, *columns: bytes) -> int:
    """Return the common number of elements of several columns.

    Raises:
        MalformedMessage: they differ, or one is no column.
    """
    lengths = [column_length(c) for c in columns]
    if any(n != lengths[0] for n in lengths):
        raise MalformedMessage(f"columns of {what} differ in length: {lengths}")
    return lengths[0]


def _to_little(values: "array[int] | array[float]") -> bytes:
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def _from_little(typecode: str, column: bytes) -> "array[int]":
    column_length(column)
    values = array(typecode)
    values.frombytes(column)
    if sys.byteorder == "big":
        values.byteswap()
    return values

"""What the frontend and its compiling process say to each other: one frame each, its length first."""

import struct

import msgspec

LENGTH = struct.Struct("<I")
"""Before each frame's body, which is msgpack."""


class Job(msgspec.Struct, frozen=True, array_like=True):
    """A constraint to compile."""

    kind: str
    text: str


class Outcome(msgspec.Struct, frozen=True, array_like=True):
    """What became of a job: a grammar, or why there is none; `ready` is said once, before the first job."""

    body: bytes = b""
    error: str = ""
    ready: bool = False

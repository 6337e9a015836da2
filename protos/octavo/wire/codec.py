"""Messages to bytes and back: one frame, a fixed header and a msgpack body.

Header (24 bytes, little-endian): magic "OV", protocol version (uint16), reserved (uint32), session (uint64), number of
the message in its session and direction (uint64). Both are 0 in the handshake.
"""

import struct
from typing import NamedTuple, TypeAlias, TypeVar

import msgspec

from octavo.wire import handshake, held_rows, plan, requests
from octavo.wire.errors import MalformedMessage, ProtocolMismatch
from octavo.wire.ids import SessionId

MAX_MESSAGE_BYTES = 64 * 2**20
"""Largest frame that a socket takes (ZMQ_MAXMSGSIZE); a prompt of a million ids has 4 MiB."""

_HEADER = struct.Struct("<2sHIQQ")
_MAGIC = b"OV"

FromFrontend: TypeAlias = (
    handshake.FrontendHello
    | handshake.Heartbeat
    | handshake.Goodbye
    | requests.SubmitRequest
    | requests.CancelRequest
    | requests.FinishChoice
    | requests.StatusRequest
    | requests.ResetPrefixCache
    | requests.DrainService
    | requests.ReplaceScheduler
    | requests.FrontendDrains
)
FromWorker: TypeAlias = (
    handshake.WorkerHello
    | handshake.Heartbeat
    | handshake.Goodbye
    | held_rows.HeldRows
    | plan.StepResult
    | requests.WorkerFigures
)
FromPeer: TypeAlias = FromFrontend | FromWorker
ToFrontend: TypeAlias = (
    handshake.FrontendWelcome
    | handshake.Wait
    | handshake.Refuse
    | handshake.UnknownSession
    | handshake.Heartbeat
    | handshake.Goodbye
    | handshake.WorkerState
    | requests.StepOutput
    | requests.StatusReport
    | requests.PrefixCacheReset
    | requests.DrainBegun
    | requests.SchedulerLeaves
    | requests.ServiceDrains
)
ToWorker: TypeAlias = (
    handshake.WorkerWelcome
    | handshake.Wait
    | handshake.Refuse
    | handshake.UnknownSession
    | handshake.Heartbeat
    | handshake.Goodbye
    | plan.StepPlan
)
FromScheduler: TypeAlias = ToFrontend | ToWorker

T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()
_from_peer = msgspec.msgpack.Decoder(FromPeer)
_from_scheduler = msgspec.msgpack.Decoder(FromScheduler)


class Envelope(NamedTuple):
    """Session and number of a message."""

    session: SessionId
    number: int


def encode(message: FromPeer | FromScheduler, session: int = 0, number: int = 0) -> bytes:
    """Encode a message with its header."""
    return _HEADER.pack(_MAGIC, handshake.PROTOCOL_VERSION, 0, session, number) + _encoder.encode(message)


def decode_from_peer(frame: bytes) -> tuple[Envelope, FromPeer]:
    """Decode what a frontend or worker sent.

    Raises:
        MalformedMessage: the frame is no message of this contract.
        ProtocolMismatch: the frame is of another protocol version.
    """
    return _decode(frame, _from_peer)


def decode_from_scheduler(frame: bytes) -> tuple[Envelope, FromScheduler]:
    """Decode what the scheduler sent.

    Raises:
        MalformedMessage: the frame is no message of this contract.
        ProtocolMismatch: the frame is of another protocol version.
    """
    return _decode(frame, _from_scheduler)


def _decode(frame: bytes, decoder: msgspec.msgpack.Decoder[T]) -> tuple[Envelope, T]:
    envelope = _decode_header(frame)
    try:
        return envelope, decoder.decode(memoryview(frame)[_HEADER.size :])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedMessage(str(error)) from error


def _decode_header(frame: bytes) -> Envelope:
    if len(frame) < _HEADER.size:
        raise MalformedMessage(f"frame of {len(frame)} bytes: shorter than its header of {_HEADER.size}")
    magic, version, _, session, number = _HEADER.unpack_from(frame)
    if magic != _MAGIC:
        raise MalformedMessage("frame does not begin with the magic bytes")
    if version != handshake.PROTOCOL_VERSION:
        raise ProtocolMismatch(
            f"the peer speaks protocol version {version}, this process speaks {handshake.PROTOCOL_VERSION}"
        )
    return Envelope(SessionId(session), number)

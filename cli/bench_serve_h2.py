"""A gRPC client that costs little: HTTP/2 frames of our own, one connection for many calls.

grpc.aio takes a load generator about ten times the CPU time a message that this does, and on a small machine the service
would have to share the cores with it. It does what gRPC's HTTP/2 mapping asks of a client of trusted benchmarks: prior
knowledge or ALPN, flow control in both directions, PING, GOAWAY, RST_STREAM, trailers; no compression, no push.
"""

import asyncio
import itertools
import struct
from collections.abc import Iterable
from urllib.parse import unquote

import grpc
from hpack import Decoder, Encoder, HPACKError

from octavo.cli.bench_serve_transport import CallFailed, ConnectionLost, OnMessage

Headers = Iterable[tuple[str, str]]

DATA, HEADERS, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 5, 6, 7, 8, 9
END_STREAM, ACK, END_HEADERS, PADDED, PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20
CANCEL = 8
INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE, ENABLE_PUSH, MAX_CONCURRENT_STREAMS = 4, 5, 2, 3

MAX_MESSAGE_BYTES = 64 * 2**20
"""Largest message of an answer; a larger one fails its call."""

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_WINDOW = 2**24
"""What the server may send unread on a stream and on the connection; given back in halves."""
_FIRST_WINDOW = 65535
_FRAME_BYTES = 2**14
_HEAD = 9

_STATUS_NAMES = {str(code.value[0]): code.name for code in grpc.StatusCode}


class _Call:
    """One call: what has come of the message that is not whole yet, and how the call ends."""

    __slots__ = ("buffer", "credit", "done", "on_message", "status", "unsent", "window")

    def __init__(self, on_message: OnMessage, body: bytes, window: int, done: "asyncio.Future[None]") -> None:
        self.on_message = on_message
        self.unsent = body
        self.window = window  # bytes of DATA that the server takes now
        self.credit = 0  # bytes that came since the server's window was last topped up
        self.buffer = b""
        self.done = done
        self.status: tuple[str, str] | None = None


class H2Connection(asyncio.Protocol):
    """Calls over one connection."""

    def __init__(self) -> None:
        self.lost: ConnectionLost | None = None
        self._transport: asyncio.Transport | None = None
        self._encoder, self._decoder = Encoder(), Decoder()
        self._calls: dict[int, _Call] = {}
        self._ids = itertools.count(1, 2)
        self._buffer = b""
        self._window = self._stream_window = _FIRST_WINDOW
        self._frame_bytes = _FRAME_BYTES
        self._max_calls = 2**31
        self._credit = 0
        self._block: tuple[int, int, bytes] | None = None  # of headers that continue: stream, flags, what came
        self._closed = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin HTTP/2."""
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 (for the type alone)
        self._transport = transport
        settings = struct.pack(">HIHI", ENABLE_PUSH, 0, INITIAL_WINDOW_SIZE, _WINDOW)
        grow = struct.pack(">I", _WINDOW - _FIRST_WINDOW)
        transport.write(_PREFACE + _frame(SETTINGS, 0, 0, settings) + _frame(WINDOW_UPDATE, 0, 0, grow))

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail what is under way."""
        self._lose(f"the connection was closed{f': {exc}' if exc else ''}")
        if not self._closed.done():
            self._closed.set_result(None)

    @property
    def num_calls(self) -> int:
        """Calls under way."""
        return len(self._calls)

    async def call(self, headers: Headers, message: bytes, on_message: OnMessage) -> None:
        """Send one request message and take the answer's messages until the status.

        Args:
            headers: all of the request, pseudo-headers first.
            message: the request, encoded.
            on_message: gets each message of the answer.

        Raises:
            CallFailed: the status is not OK, or there is none.
        """
        if self.lost is not None or self._transport is None:
            raise ConnectionLost(self.lost.message if self.lost else "not connected")
        if len(self._calls) >= self._max_calls:
            raise CallFailed("connection", f"the server allows {self._max_calls} calls a connection: use more of them")
        stream = next(self._ids)
        body = struct.pack(">BI", 0, len(message)) + message
        call = _Call(on_message, body, self._stream_window, asyncio.get_running_loop().create_future())
        self._calls[stream] = call
        block = self._encoder.encode(headers)
        self._transport.write(_frame(HEADERS, END_HEADERS, stream, block))
        self._send_body(stream, call)
        try:
            await call.done
        finally:
            if self._calls.pop(stream, None) is not None and self.lost is None:
                self._transport.write(_frame(RST_STREAM, 0, stream, struct.pack(">I", CANCEL)))
        name, words = call.status or ("UNKNOWN", "the answer has no grpc-status")
        if name != "OK":
            raise CallFailed(name, words)

    async def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.close()
            await self._closed

    def data_received(self, data: bytes) -> None:
        """Take frames."""
        if self._buffer:
            data = self._buffer + data
        at, end = 0, len(data)
        try:
            while end - at >= _HEAD:
                length = int.from_bytes(data[at : at + 3], "big")
                if end - at - _HEAD < length:
                    if length > _FRAME_BYTES:
                        raise CallFailed("protocol", f"a frame of {length} bytes; HTTP/2 is not what the server speaks")
                    break
                kind, flags = data[at + 3], data[at + 4]
                stream = int.from_bytes(data[at + 5 : at + 9], "big") & 0x7FFFFFFF
                at += _HEAD
                self._on_frame(kind, flags, stream, data[at : at + length])
                at += length
        except (CallFailed, HPACKError, struct.error, IndexError) as error:
            self._lose(f"not HTTP/2 as gRPC has it: {error}")
            self._abort()
            return
        self._buffer = data[at:]

    def _on_frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == DATA:
            self._on_data(flags, stream, payload)
        elif kind in (HEADERS, CONTINUATION):
            self._on_headers(kind, flags, stream, payload)
        elif kind == WINDOW_UPDATE:
            self._on_window(stream, int.from_bytes(payload, "big") & 0x7FFFFFFF)
        elif kind == PING and not flags & ACK:
            self._write(_frame(PING, ACK, 0, payload))
        elif kind == SETTINGS and not flags & ACK:
            self._on_settings(payload)
        elif kind == RST_STREAM:
            code = int.from_bytes(payload, "big")
            self._end(stream, ("RST_STREAM", f"the server reset the stream with code {code}"))
        elif kind == GOAWAY:
            last = int.from_bytes(payload[:4], "big") & 0x7FFFFFFF
            words = payload[8:].decode("utf-8", "replace")
            self.lost = ConnectionLost(f"the server says GOAWAY {words}".rstrip())
            for number in [number for number in self._calls if number > last]:
                self._fail(number, self.lost)

    def _on_data(self, flags: int, stream: int, payload: bytes) -> None:
        self._credit += len(payload)
        if self._credit > _WINDOW // 2:
            self._write(_frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", self._credit)))
            self._credit = 0
        call = self._calls.get(stream)
        if call is None:
            return
        call.credit += len(payload)
        if call.credit > _WINDOW // 2:
            self._write(_frame(WINDOW_UPDATE, 0, stream, struct.pack(">I", call.credit)))
            call.credit = 0
        if flags & PADDED:
            payload = payload[1 : len(payload) - payload[0]]
        try:
            _take_messages(call, payload)
        except Exception as error:  # noqa: BLE001 (whatever the taker says of a message fails its call alone)
            self._fail(stream, error)
        if flags & END_STREAM:
            self._end(stream, call.status)

    def _on_headers(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == HEADERS:
            if flags & PADDED:
                payload = payload[1 : len(payload) - payload[0]]
            if flags & PRIORITY:
                payload = payload[5:]
            self._block = stream, flags, payload
        elif self._block is None or self._block[0] != stream:
            raise CallFailed("protocol", "CONTINUATION without HEADERS")
        else:
            self._block = stream, self._block[1], self._block[2] + payload
        if not flags & END_HEADERS:
            return
        _, first_flags, block = self._block
        self._block = None
        # Even of calls that are gone: the table is the connection's.
        raw = dict(self._decoder.decode(block, raw=True))
        fields = {name.decode("latin-1"): value.decode("latin-1") for name, value in raw.items()}
        call = self._calls.get(stream)
        if call is None:
            return
        if (code := fields.get("grpc-status")) is not None:
            call.status = _STATUS_NAMES.get(code, f"grpc-status {code}"), unquote(fields.get("grpc-message", ""))
        elif fields.get(":status", "200") != "200":
            call.status = f"HTTP {fields[':status']}", "not gRPC's answer"
        if first_flags & END_STREAM:
            self._end(stream, call.status)

    def _on_settings(self, payload: bytes) -> None:
        for key, value in struct.iter_unpack(">HI", payload):
            if key == INITIAL_WINDOW_SIZE:
                for call in self._calls.values():
                    call.window += value - self._stream_window
                self._stream_window = value
            elif key == MAX_FRAME_SIZE:
                self._frame_bytes = value
            elif key == MAX_CONCURRENT_STREAMS:
                self._max_calls = value
        self._write(_frame(SETTINGS, ACK, 0, b""))
        self._send_bodies()

    def _on_window(self, stream: int, increment: int) -> None:
        if stream == 0:
            self._window += increment
            self._send_bodies()
        elif (call := self._calls.get(stream)) is not None:
            call.window += increment
            self._send_body(stream, call)

    def _send_bodies(self) -> None:
        for stream, call in self._calls.items():
            self._send_body(stream, call)

    def _send_body(self, stream: int, call: _Call) -> None:
        """Send as much of a request as the server's windows take."""
        while call.unsent and (size := min(len(call.unsent), self._frame_bytes, self._window, call.window)) > 0:
            part, call.unsent = call.unsent[:size], call.unsent[size:]
            call.window -= size
            self._window -= size
            self._write(_frame(DATA, 0 if call.unsent else END_STREAM, stream, part))

    def _end(self, stream: int, status: tuple[str, str] | None) -> None:
        call = self._calls.pop(stream, None)
        if call is not None and not call.done.done():
            call.status = status
            call.done.set_result(None)

    def _fail(self, stream: int, error: Exception) -> None:
        call = self._calls.pop(stream, None)
        if call is not None and not call.done.done():
            call.done.set_exception(error)

    def _lose(self, message: str) -> None:
        self.lost = self.lost or ConnectionLost(message)
        for stream in list(self._calls):
            self._fail(stream, ConnectionLost(self.lost.message))

    def _abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _write(self, frame: bytes) -> None:
        if self._transport is not None:
            self._transport.write(frame)


def request_headers(authority: str, path: str, is_tls: bool, metadata: Headers = ()) -> list[tuple[str, str]]:
    """Return the headers of a call of a method; `path` is /package.Service/Method."""
    return [
        (":method", "POST"),
        (":scheme", "https" if is_tls else "http"),
        (":path", path),
        (":authority", authority),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        ("user-agent", "octavo-bench"),
        *metadata,
    ]


def _take_messages(call: _Call, data: bytes) -> None:
    """Give whole messages to who waits for them; keep the rest."""
    if call.buffer:
        data = call.buffer + data
    at, end = 0, len(data)
    while end - at >= 5:
        length = int.from_bytes(data[at + 1 : at + 5], "big")
        if data[at] or length > MAX_MESSAGE_BYTES:
            raise CallFailed("protocol", f"a message of {length} bytes, compressed: {bool(data[at])}")
        if end - at - 5 < length:
            break
        call.on_message(data[at + 5 : at + 5 + length])
        at += 5 + length
    call.buffer = data[at:]


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload

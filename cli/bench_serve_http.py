"""An HTTP client for server-sent events that costs little: one connection a call at a time, kept for the next call."""

import asyncio
import re
from collections.abc import Iterable

import httptools
import msgspec

from octavo.cli.bench_serve_transport import CallFailed, ConnectionLost, OnMessage

MAX_EVENT_BYTES = 64 * 2**20
"""Largest event or answer; a larger one fails its call."""

_EVENT_END = re.compile(rb"\r?\n\r?\n")
_DATA = b"data:"
_DONE = b"[DONE]"


class _ErrorBody(msgspec.Struct):
    """OpenAI's shape of an error; older servers have the fields outside."""

    error: dict[str, object] | str = ""
    message: object = ""


class HttpConnection(asyncio.Protocol):
    """One call at a time over one connection."""

    def __init__(self) -> None:
        self.lost: ConnectionLost | None = None
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._done: asyncio.Future[None] | None = None
        self._on_message: OnMessage | None = None
        self._buffer = b""
        self._is_whole = False  # [DONE] has come
        self._closed = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 (for the type alone)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail what is under way."""
        self._lose(f"the connection was closed{f': {exc}' if exc else ''}")
        if not self._closed.done():
            self._closed.set_result(None)

    async def post(
        self, host: str, path: str, headers: Iterable[tuple[str, str]], body: bytes, take: OnMessage
    ) -> None:
        """Send a request and take the data of each event of its answer, but [DONE].

        Args:
            host: HOST:PORT.
            path: of the resource.
            headers: beside those that every request has.
            body: JSON.
            take: gets the data of each event.

        Raises:
            CallFailed: the status is not 200, or the stream does not end with [DONE].
        """
        if self.lost is not None or self._transport is None:
            raise ConnectionLost(self.lost.message if self.lost else "not connected")
        fields = [("host", host), ("content-type", "application/json"), ("content-length", str(len(body))), *headers]
        head = "".join(f"{name}: {value}\r\n" for name, value in fields)
        self._parser = httptools.HttpResponseParser(self)
        self._done = asyncio.get_running_loop().create_future()
        self._on_message, self._buffer, self._is_whole = take, b"", False
        self._transport.write(f"POST {path} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + body)
        try:
            await self._done
        except BaseException:
            self._lose("a call was given up")  # what is left of its answer would be taken for the next one's
            self._transport.abort()
            raise
        finally:
            self._done = None

    async def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.close()
            await self._closed

    def data_received(self, data: bytes) -> None:
        """Take a part of the answer."""
        if self._parser is None or self._done is None:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            cause = error.__context__  # what a callback raised
            self._fail(cause if isinstance(cause, Exception) else ConnectionLost(f"no HTTP: {error}"))

    def on_body(self, body: bytes) -> None:
        """Take a part of the body (of httptools)."""
        if self._parser is None or self._done is None or self._done.done():
            return
        if self._buffer:
            body = self._buffer + body
        if self._parser.get_status_code() == 200:
            at = 0
            for found in _EVENT_END.finditer(body):
                self._on_event(body[at : found.start()])
                at = found.end()
            body = body[at:]
        self._buffer = body
        if len(body) > MAX_EVENT_BYTES:
            self._fail(CallFailed("protocol", f"an answer of more than {MAX_EVENT_BYTES} bytes"))

    def on_message_complete(self) -> None:
        """Tell the caller that the answer is there (of httptools)."""
        if self._parser is None or self._done is None or self._done.done():
            return
        if not self._parser.should_keep_alive():
            self._lose_later("the server does not keep the connection")
        status = self._parser.get_status_code()
        if status != 200:
            self._done.set_exception(CallFailed(f"HTTP {status}", _words_of(self._buffer)))
        elif not self._is_whole:
            self._done.set_exception(CallFailed("incomplete", "the stream ended without [DONE]"))
        else:
            self._done.set_result(None)

    def _on_event(self, event: bytes) -> None:
        lines = event.splitlines() if b"\n" in event else (event,)
        data = b"\n".join(line[len(_DATA) :].strip() for line in lines if line.startswith(_DATA))
        if data == _DONE:
            self._is_whole = True
        elif data and self._on_message is not None:
            try:
                self._on_message(data)
            except Exception as error:  # noqa: BLE001 (whatever the taker says of an event fails its call)
                self._fail(error)

    def _lose_later(self, message: str) -> None:
        self.lost = self.lost or ConnectionLost(message)

    def _fail(self, error: Exception) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)

    def _lose(self, message: str) -> None:
        self._lose_later(message)
        if self.lost is not None:
            self._fail(ConnectionLost(self.lost.message))


def _words_of(body: bytes) -> str:
    """Return what an error says, cut to a line."""
    try:
        answer = msgspec.json.decode(body, type=_ErrorBody)
    except msgspec.MsgspecError:
        return body[:200].decode("utf-8", "replace")
    error = answer.error
    words = error.get("message", "") if isinstance(error, dict) else error or answer.message
    return str(words)[:500]

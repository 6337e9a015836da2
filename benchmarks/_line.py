"""Connections that can be cut."""

import asyncio
import contextlib


class Line:
    """A connection to the service over a relay of ours, which can be cut as no well-behaved client does it."""

    def __init__(self) -> None:
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.address = ""

    @classmethod
    async def open(cls, target: str) -> "Line":
        """Listen for connections to pass on to a target, host:port."""
        line = cls()
        host, _, port = target.rpartition(":")

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
            line._writers += [writer, far_writer]
            line._tasks |= {asyncio.ensure_future(_pass_on(far_reader, writer))}
            await _pass_on(reader, far_writer)

        line._server = await asyncio.start_server(relay, "127.0.0.1", 0)
        line.address = f"127.0.0.1:{line._server.sockets[0].getsockname()[1]}"
        return line

    def cut(self) -> None:
        """Reset all connections and listen no more."""
        for writer in self._writers:
            writer.transport.abort()
        for task in self._tasks:
            task.cancel()
        if self._server is not None:
            self._server.close()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()

"""Finds out that a process lives but does not answer."""

import asyncio
import contextlib

PROBE_INTERVAL_S = 1.0
MAX_START_S = 120.0
"""How long a process may take from its start to its first answer."""

_REQUEST = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
_MAX_ANSWER_BYTES = 65536


async def until_stalled(path: str, timeout_s: float) -> str:
    """Ask a process at its Unix socket for its health, again and again; return what is wrong once it does not answer.

    One answer may be late: two in a row must be missing, so that a pause of the whole machine is not taken for a stall.

    Args:
        path: where it answers HTTP; nobody listens there before it has started and after it has ended.
        timeout_s: how long it may be silent.
    """
    now = asyncio.get_running_loop().time
    started, has_answered, num_missed = now(), False, 0
    while True:
        try:
            async with asyncio.timeout(timeout_s / 2):
                await _ask(path)
        except TimeoutError:
            num_missed += 1
            if num_missed >= 2:
                return f"it has not answered for {timeout_s:g} s"
            continue
        except OSError:
            # It starts, or ends, which whoever waits for its end will see.
            if not has_answered and now() - started > MAX_START_S:
                return f"it has not begun to serve within {MAX_START_S:g} s"
        else:
            has_answered = True
        num_missed = 0
        await asyncio.sleep(PROBE_INTERVAL_S)


async def _ask(path: str) -> None:
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        writer.write(_REQUEST)
        answer = await reader.read(_MAX_ANSWER_BYTES)
        if not answer.startswith(b"HTTP/1.1 200 "):
            raise ConnectionError(f"{path} answered {answer[:40]!r}")
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

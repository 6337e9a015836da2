"""Finds out that a process lives but does not answer, or says itself that it hangs."""

import asyncio
import contextlib
import json
from collections.abc import Callable

PROBE_INTERVAL_S = 1.0
MAX_START_S = 120.0
"""How long a process may take from its start to its first answer."""

LOADING_SILENCE_S = 600.0
"""How long a process that loads may be silent: a library read from a slow disk holds up all its threads meanwhile."""

MAX_ANSWER_BYTES = 65536


def request_for(what: str) -> bytes:
    """Return the HTTP request for a path."""
    return f"GET {what} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode()


class Stalled(Exception):
    """The process says itself that it makes no progress."""


async def until_stalled(path: str, timeout_s: float, on_well: Callable[[], object] = lambda: None) -> str:
    """Ask a process at its Unix socket for its health, again and again; return what is wrong once it does not answer.

    One answer may be late: two in a row must be missing, so that a pause of the whole machine is not taken for a stall.

    Args:
        path: where it answers HTTP; nobody listens there before it has started and after it has ended.
        timeout_s: how long it may be silent, unless it loads.
        on_well: called at each answer that it is well and does not load.
    """
    now = asyncio.get_running_loop().time
    started, has_answered, num_missed, patience_s = now(), False, 0, timeout_s
    while True:
        try:
            async with asyncio.timeout(patience_s / 2):
                is_loading = await _ask(path)
        except TimeoutError:
            num_missed += 1
            if num_missed >= 2:
                return f"it has not answered for {patience_s:g} s"
            continue
        except Stalled as error:
            return str(error)
        except OSError:
            # It starts, or ends, which whoever waits for its end will see.
            if not has_answered and now() - started > MAX_START_S:
                return f"it has not begun to serve within {MAX_START_S:g} s"
        else:
            has_answered = True
            if not is_loading:
                on_well()
            patience_s = max(timeout_s, LOADING_SILENCE_S) if is_loading else timeout_s
        num_missed = 0
        await asyncio.sleep(PROBE_INTERVAL_S)


async def _ask(path: str) -> bool:
    """Return whether the process, which is well, is still loading.

    Raises:
        Stalled: it is not well, and says why.
        OSError: it does not answer, or not what a process that is well does.
    """
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        writer.write(request_for("/health"))
        answer = await reader.read(MAX_ANSWER_BYTES)
        body = _body(answer)
        if body.get("state") == "stalled":
            raise Stalled(str(body.get("reason")))
        if not answer.startswith(b"HTTP/1.1 200 "):
            raise ConnectionError(f"{path} answered {answer[:40]!r}")
        return body.get("state") == "loading"
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def _body(answer: bytes) -> dict[str, object]:
    """Return what the answer says, {} if that is no JSON object."""
    try:
        body = json.loads(answer.partition(b"\r\n\r\n")[2])
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}

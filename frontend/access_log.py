"""One line a call of a client, at its end, if --access-log asks for it: what it was, its status, tokens and times; no text.

Whoever configures logging turns it on by the level of this module's logger.
"""

import logging
import time
from contextvars import ContextVar
from dataclasses import dataclass

from octavo.frontend.streams import Stream

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Call:
    request_id: str
    arrived_at: float  # monotonic
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    ttft_s: float | None = None


_current: ContextVar[_Call | None] = ContextVar("access_log_call", default=None)


def begin_call(request_id: str) -> None:
    """Take note of a call, in its own task."""
    if _log.isEnabledFor(logging.INFO):
        _current.set(_Call(request_id, time.monotonic()))


def note_stream(stream: Stream, arrived_at: float) -> None:
    """Take note of a request of the call that has ended; a call may have several.

    Args:
        stream: of the request.
        arrived_at: when the call came, on the clock of the stream.
    """
    if (call := _current.get()) is None:
        return
    call.prompt_tokens += stream.journal.call.num_prompt_tokens
    call.cached_tokens += stream.num_cached_tokens
    call.completion_tokens += stream.journal.num_completion_tokens
    if stream.first_token_at is not None:
        ttft_s = stream.first_token_at - arrived_at
        call.ttft_s = ttft_s if call.ttft_s is None else min(ttft_s, call.ttft_s)


def end_call(door: str, method: str, status: str) -> None:
    """Tell of a call that has ended.

    Args:
        door: grpc or http.
        method: its method or route, as metrics name it.
        status: as that door has it.
    """
    if not _log.isEnabledFor(logging.INFO):
        return
    call = _current.get() or _Call("-", time.monotonic())
    fields = {
        "request_id": call.request_id,
        "door": door,
        "method": method,
        "status": status,
        "duration_s": round(time.monotonic() - call.arrived_at, 6),
        "prompt_tokens": call.prompt_tokens,
        "cached_tokens": call.cached_tokens,
        "completion_tokens": call.completion_tokens,
        "ttft_s": None if call.ttft_s is None else round(call.ttft_s, 6),
    }
    _log.info(
        "%s %s %s: request %s, %.3f s, prompt %d tokens (%d cached), output %d tokens%s",
        door,
        method,
        status,
        call.request_id,
        fields["duration_s"],
        call.prompt_tokens,
        call.cached_tokens,
        call.completion_tokens,
        "" if call.ttft_s is None else f", first after {call.ttft_s:.3f} s",
        extra={"fields": fields},
    )

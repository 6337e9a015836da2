"""Counts what requests do. The event loop's thread alone writes; the hot path is one call for each flush of a stream."""

import mmap
import os
import time
from array import array
from bisect import bisect_left
from collections.abc import Callable
from pathlib import Path

from octavo.frontend import metrics_layout as layout
from octavo.frontend.errors import (
    CallerLimitExceeded,
    DeadlineExceeded,
    QueueFull,
    ServiceError,
    SlowReader,
    Unavailable,
)
from octavo.frontend.metrics_layout import LAYOUT, OTHER
from octavo.frontend.streams import Stream
from octavo.wire.metrics import Counter

NUM_BYTES = LAYOUT.num_bytes
SUFFIX = ".metrics"
MAX_FILES = 64
"""Frontends whose numbers are added up."""


class MetricsError(Exception):
    """The file of the numbers cannot be used."""


class Metrics:
    """The numbers of this frontend, and of those that it shares its ports with.

    Several frontends keep their rows in files of one folder, mapped into memory, so that whichever is asked can read
    all of them, even of one that stalls, and one that is started again goes on counting where it was.

    Args:
        path: the file, which ends with .metrics in a folder that holds those of all frontends of the ports; None: the
            numbers are this process's alone.

    Raises (on construction):
        MetricsError: the file cannot be used.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        # The map is let go of with the process: streams that are given up late still count.
        self.cells = memoryview(bytearray(NUM_BYTES) if path is None else _map(path)).cast("d")
        self.cells[LAYOUT.PID] = os.getpid()
        self.cells[LAYOUT.STARTED_AT] = time.time()
        self._calls = {value: layout.REQUESTS.first + i for i, value in enumerate(layout.REQUESTS.values)}

    def count_call(self, door: str, method: str, code: str) -> None:
        """Count a call that has ended; what is not known counts as `other`."""
        cell = self._calls.get((door, method, code))
        if cell is None:
            cell = self._calls.get((door, OTHER, code)) or self._calls.get((door, method, OTHER))
        self.cells[self._calls[door, OTHER, OTHER] if cell is None else cell] += 1.0

    def meter(self, stream: Stream, arrived_at: float, clock: Callable[[], float]) -> "StreamMeter":
        """Return what counts a stream from now on."""
        return StreamMeter(self.cells, stream, arrived_at, clock)

    def rows(self) -> "dict[str, array[float]]":
        """Return the cells of each frontend by its name, ours included; reads files."""
        if self._path is None:
            return {"frontend": array("d", self.cells)}
        found = {}
        for path in sorted(self._path.parent.glob(f"*{SUFFIX}"))[:MAX_FILES]:
            data = path.read_bytes()
            if len(data) == NUM_BYTES:
                found[path.stem] = array("d", data)
        return found


class StreamMeter:
    """Counts one request: at each flush of its stream, and at its end."""

    __slots__ = ("_arrived_at", "_cells", "_clock", "_flushed_at", "_num_counted", "_outputs", "_stream")

    def __init__(
        self, cells: "memoryview[float]", stream: Stream, arrived_at: float, clock: Callable[[], float]
    ) -> None:
        self._cells = cells
        self._stream = stream
        self._outputs = stream.journal.outputs
        self._arrived_at = arrived_at
        self._clock = clock
        self._flushed_at = 0.0
        self._num_counted = 0

    def flush(self) -> None:
        """Count the tokens that have come since the last time."""
        outputs, num_counted = self._outputs, self._num_counted
        # Of one choice, as nearly always: this is what each message of a stream pays for.
        num_tokens = len(outputs[0]) if len(outputs) == 1 else sum(map(len, outputs))
        num_new = num_tokens - num_counted
        if num_new <= 0:
            return
        cells, now = self._cells, self._clock()
        if num_counted:
            waited = now - self._flushed_at
            if len(outputs) > 1:
                waited *= max(1, len(outputs) - len(self._stream.journal.finished))
            cells[_ITL_FIRST + bisect_left(_ITL_BOUNDS, waited / num_new)] += num_new
            cells[_ITL_SUM] += waited
        else:
            self._begin()
        cells[_GENERATION_TOKENS] += num_new
        self._flushed_at, self._num_counted = now, num_tokens

    def end(self) -> None:
        """Count what is known once the request has ended, or is given up."""
        stream, cells = self._stream, self._cells
        if stream.started and not self._num_counted:
            self._begin()
        cells[_GENERATION_TOKENS] += sum(map(len, self._outputs)) - self._num_counted
        for choice in stream.choices:
            if choice.end is not None:
                _count(cells, layout.FINISHED, choice.end.reason.name.lower())
        if (stream.error is not None or not stream.ended) and not isinstance(stream.error, _REFUSALS):
            _count(cells, layout.ABORTED, _reason(stream.error))
        if stream.started:
            timings = stream.timings
            layout.E2E.observe(cells, self._clock() - self._arrived_at)
            layout.QUEUE.observe(cells, timings.queue_s)
            longest = max(map(len, self._outputs))
            if longest:
                layout.PREFILL.observe(cells, timings.prefill_s)
                layout.DECODE.observe(cells, timings.decode_s)
            if longest > 1:
                layout.TPOT.observe(cells, timings.decode_s / (longest - 1))

    def _begin(self) -> None:
        """Count what is known with the first token, or at the end of a request that has none."""
        stream, cells = self._stream, self._cells
        if (first_token_at := stream.first_token_at) is not None:
            layout.TTFT.observe(cells, first_token_at - self._arrived_at)
        cells[layout.PROMPT_TOKENS.first] += len(stream.journal.call.prompt_ids) // 4
        cells[layout.CACHED_TOKENS.first] += stream.num_cached_tokens


_REFUSALS = (QueueFull, CallerLimitExceeded)
"""Such a request has not begun: its call's status says it all."""
_GENERATION_TOKENS = layout.GENERATION_TOKENS.first
_ITL_FIRST, _ITL_BOUNDS, _ITL_SUM = layout.ITL.first, layout.ITL.bounds, layout.ITL.first + layout.ITL.num_cells - 1


def _count(cells: "memoryview[float]", counter: Counter, value: str) -> None:
    if (value,) in counter.values:
        cells[counter.first + counter.values.index((value,))] += 1.0


def _reason(error: ServiceError | None) -> str:
    if error is None:
        return "cancelled"
    kinds = {DeadlineExceeded: "deadline", SlowReader: "slow_reader", Unavailable: "unavailable"}
    return kinds.get(type(error), "failed")


def _map(path: Path) -> mmap.mmap:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(descriptor).st_size != NUM_BYTES:
                os.ftruncate(descriptor, 0)
                os.ftruncate(descriptor, NUM_BYTES)
            return mmap.mmap(descriptor, NUM_BYTES)
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:
        raise MetricsError(f"the file of metrics {path} cannot be used: {error}") from error

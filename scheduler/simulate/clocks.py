"""Proof that nobody looks at a real clock: while it is forbidden, looking raises."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from octavo.scheduler.simulate.world import Violation

_FORBIDDEN = ("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "sleep")


def _refuse(*_: Any) -> NoReturn:
    raise Violation("somebody looked at a real clock")


@contextmanager
def forbidden_clocks() -> Iterator[None]:
    """Let every look at a real clock, and every sleep, raise Violation; log nothing, since a log record has a time."""
    real = {name: getattr(time, name) for name in _FORBIDDEN}
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        for name in _FORBIDDEN:
            setattr(time, name, _refuse)
        yield
    finally:
        for name, function in real.items():
            setattr(time, name, function)
        logging.disable(disabled)

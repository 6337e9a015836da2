"""Fail points: places between the steps of a process where a test lets it die, stop, fail or wait.

    OCTAVO_FAULT="worker.after_compute:kill@3,scheduler.after_receive:stop@10:once=/tmp/hit"

is a list of POINT:ACTION[@N][:once=FILE], read once when a process starts; nothing that comes through a socket can change
it, and without it a point costs one test for None. The action is taken at the N-th time (1 by default) that the process
passes the point, once in its life. Each life of a process that is started again reads the variable anew; with `once=FILE`
only the first one that comes so far acts: it creates the file, and whoever finds it passes.
"""

import logging
import os
import re
import signal
import time
from dataclasses import dataclass

from octavo.wire.errors import WireError

VARIABLE = "OCTAVO_FAULT"

PLACES = ("before_receive", "after_receive", "after_compute", "before_reply", "after_reply")

POINTS = frozenset(f"{role}.{place}" for role in ("worker", "scheduler", "frontend") for place in PLACES)
"""Where a worker, a scheduler and a frontend have them:

before_receive: before it looks for messages. after_receive: it has a plan (worker), news for its core (scheduler), output
for its streams (frontend). after_compute: results are there and not sent; the core has decided and nothing of it is
sent; the streams have the output and nobody has read it. before_reply: before a result is sent; plans are sent, and
output for frontends is not; before a client of a stream is written to. after_reply: after that.
"""

MAX_DELAY_S = 3600.0

EXIT_CODE = 1
"""Of a process that a fault let exit."""

_ITEM = re.compile(
    r"(?P<point>[^:]+):(?P<action>[a-z]+)(=(?P<seconds>[^@:]+))?(@(?P<count>[0-9]{1,10}))?(:once=(?P<once>.+))?"
)
_ACTIONS = ("kill", "stop", "exit", "raise", "delay")

_log = logging.getLogger(__name__)


class FaultSpecError(WireError):
    """The variable does not say what is to happen where."""


class FaultInjected(Exception):
    """What the action `raise` raises."""


@dataclass
class Fault:
    """What is to happen at a point.

    Attributes:
        action: kill (SIGKILL), stop (SIGSTOP), exit, raise, or delay.
        seconds: of a delay.
        left: how often the point is still to be passed until then; 0: it has happened.
        once: path of the file that says that it has happened in some life; '' if each life is to have it.
    """

    action: str
    seconds: float
    left: int
    once: str


class _Armed:
    """The faults of this process by their points; None: it has none."""

    faults: dict[str, list[Fault]] | None = None


def parse(text: str) -> dict[str, list[Fault]]:
    """Return the faults that a text names, by their points.

    Raises:
        FaultSpecError: names what is wrong.
    """
    faults: dict[str, list[Fault]] = {}
    for item in filter(None, text.split(",")):
        found = _ITEM.fullmatch(item)
        if found is None:
            raise FaultSpecError(f"{VARIABLE}: {item!r} is not POINT:ACTION[@N][:once=FILE]")
        point, action, count = found["point"], found["action"], int(found["count"] or 1)
        if point not in POINTS:
            raise FaultSpecError(f"{VARIABLE}: there is no fail point {point!r}; there are {', '.join(sorted(POINTS))}")
        if action not in _ACTIONS:
            raise FaultSpecError(f"{VARIABLE}: there is no action {action!r}; there are {', '.join(_ACTIONS)}")
        if not 0 < count < 2**31:
            raise FaultSpecError(f"{VARIABLE}: {item!r}: {count} must be at least 1 and below 2^31")
        seconds = _seconds(item, action, found["seconds"])
        faults.setdefault(point, []).append(Fault(action, seconds, count, found["once"] or ""))
    return faults


def arm(text: str) -> None:
    """Take the faults that a text names in place of all others; an empty text: none.

    Raises:
        FaultSpecError: names what is wrong.
    """
    _Armed.faults = parse(text) or None
    if _Armed.faults is not None:
        _log.warning("fail points are armed, this process is to fail: %s", text)


def failpoint(name: str) -> None:
    """Pass a point; what it is armed with happens here."""
    if _Armed.faults is not None:
        for fault in _Armed.faults.get(name, ()):
            if fault.left:
                fault.left -= 1
                if not fault.left and _is_first(fault):
                    _act(name, fault)


def _seconds(item: str, action: str, text: str | None) -> float:
    if (action == "delay") != (text is not None):
        raise FaultSpecError(f"{VARIABLE}: {item!r}: a delay, and nothing else, has seconds (delay=SECONDS)")
    try:
        seconds = float(text or 0)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= MAX_DELAY_S:
        raise FaultSpecError(f"{VARIABLE}: {item!r}: the delay must be a number from 0 to {MAX_DELAY_S:g} (seconds)")
    return seconds


def _is_first(fault: Fault) -> bool:
    if not fault.once:
        return True
    try:
        os.close(os.open(fault.once, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return False
    return True


def _act(name: str, fault: Fault) -> None:
    _log.warning("fail point %s: %s", name, fault.action)
    match fault.action:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "exit":
            logging.shutdown()
            os._exit(EXIT_CODE)
        case "delay":
            time.sleep(fault.seconds)
        case _:
            raise FaultInjected(f"fail point {name}")

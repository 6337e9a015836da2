"""The core without a fake model: the test itself gives the worker's answers."""

from collections.abc import Sequence
from typing import Any

from octavo.scheduler.core import Scheduler
from octavo.scheduler.events import StepCompleted, WorkerReady
from octavo.scheduler.simulate.model import make_facts
from octavo.wire.columns import pack_ints
from octavo.wire.handshake import WorkerFacts
from octavo.wire.ids import BootId, SessionId
from octavo.wire.plan import StepResult
from tests.support.core_driver import CoreDriver, make_config

EPOCH = SessionId(5)


def started(facts: WorkerFacts | None = None, **settings: Any) -> Scheduler:
    """Return a core with a worker."""
    core = Scheduler(make_config(**settings))
    assert core.on_event(WorkerReady(EPOCH, facts or make_facts(), BootId("w")), 100.0) == []
    return core


def result(
    step: int,
    row: Sequence[int],
    token: Sequence[int],
    *,
    fault_row: Sequence[int] = (),
    fault: Sequence[int] = (),
    epoch: int = EPOCH,
) -> StepCompleted:
    """Return the event of a worker's answer."""
    columns = [pack_ints(column) for column in (row, token, fault_row, fault)]
    return StepCompleted(StepResult(epoch, step, columns[0], columns[1], columns[2], columns[3]))


def counting(vocab_size: int = 1000) -> CoreDriver:
    """Return a driver whose model counts upwards, with its worker ready."""
    driver = CoreDriver(make_facts(vocab_size=vocab_size), rule=lambda ids, seed, choice: (ids[-1] + 1) % vocab_size)
    driver.worker_ready()
    return driver

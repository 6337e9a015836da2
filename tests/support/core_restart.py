"""Lets the scheduler under a core driver be replaced: the worker reports its rows, the frontends submit again."""

from collections.abc import Callable, Sequence

import msgspec

from octavo.scheduler.core import Scheduler
from octavo.scheduler.events import RequestSubmitted, WorkerReady
from octavo.wire.columns import pack_ints
from octavo.wire.held_rows import HeldRow
from octavo.wire.ids import BootId, SessionId
from octavo.wire.requests import SubmitRequest
from tests.support.core_driver import Client, CoreDriver

Report = Callable[[list[HeldRow]], Sequence[HeldRow]]


def restart(driver: CoreDriver, report: Report = list) -> list[HeldRow]:
    """Begin a new scheduler, to which the worker that goes on reports; return the rows that it had.

    Args:
        driver: its frontends have not come back yet.
        report: makes of the worker's rows what it tells.
    """
    assert driver.model is not None
    held = driver.model.report()
    driver.model.forget(held)
    driver.core = Scheduler(driver.config)
    driver.epoch = SessionId(driver.epoch + 1)
    driver.sent.clear()
    driver.results.clear()
    driver._row_names.clear()
    driver.tell(WorkerReady(driver.epoch, driver.facts, BootId("w"), tuple(report(held))))
    return held


def replayed(driver: CoreDriver, client: Client, *, num_lost: int = 0) -> SubmitRequest:
    """Return a request as its frontend submits it again; it has not received its newest ids, so many."""
    received = driver._received(client.frontend)
    outputs = []
    for choice in range(len(client.expected)):
        ids = received.tokens[client.handle, choice]
        del ids[max(0, len(ids) - num_lost) :]
        outputs.append(pack_ints(ids))
    is_started = client.handle in received.started
    received.started.pop(client.handle, None)
    finished = set(range(len(client.expected))) - client.choices_left
    return msgspec.structs.replace(
        client.message,
        output_ids=tuple(outputs) if is_started else (),
        finished_choices=pack_ints(sorted(finished)),
    )


def resubmit(driver: CoreDriver, *clients: Client, num_lost: int = 0) -> None:
    """Let frontends submit what lives again, in one turn; all of it, if nothing is named."""
    chosen = clients or [client for client in driver.clients.values() if client.is_live]
    messages = [(client.frontend, replayed(driver, client, num_lost=num_lost)) for client in chosen if client.is_live]
    driver.tell(*(RequestSubmitted(frontend, message) for frontend, message in messages))

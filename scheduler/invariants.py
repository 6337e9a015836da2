"""What must hold between the parts of the core's state, whatever has happened."""

from octavo.scheduler.deadlines import Deadlines
from octavo.scheduler.errors import InvariantViolation
from octavo.scheduler.pipeline import Pipeline
from octavo.scheduler.planner import Planner
from octavo.scheduler.queues import WaitingQueue
from octavo.scheduler.sequence import Request, Status
from octavo.scheduler.state import RequestTable


def check_state(
    requests: RequestTable,
    waiting: WaitingQueue,
    deadlines: Deadlines,
    worker: tuple[Planner, Pipeline] | None,
    max_waiting_requests: int,
) -> None:
    """Prove requests, queue, batch, blocks and outstanding plans against each other.

    Raises:
        InvariantViolation: they contradict.
    """
    requests.check()
    waiting.check()
    running_numbers: set[int] = set()
    if worker is not None:
        planner, pipeline = worker
        planner.check()
        pipeline.check(s for r in requests for s in r.sequences)
        running_numbers = {s.number for s in planner.batch}
    waiting_numbers = {s.number for s in waiting}
    unfinished_sequences = [s for r in requests for s in r.sequences if s.status is not Status.FINISHED]
    alive = {s.number for s in unfinished_sequences}
    held = {s.number for s in unfinished_sequences if s.status is Status.HELD}
    is_apart = waiting_numbers.isdisjoint(running_numbers | held) and running_numbers.isdisjoint(held)
    if not is_apart or waiting_numbers | running_numbers | held != alive:
        raise InvariantViolation(
            f"sequences alive {alive}, waiting {waiting_numbers}, running {running_numbers}, held {held}"
        )
    for request in requests:
        _check_request(request)
    num_held_rows = sum(_num_held_rows(request) for request in requests)
    if worker is not None and worker[0].batch.num_held != num_held_rows:
        raise InvariantViolation(f"{worker[0].batch.num_held} rows are held, groups lack {num_held_rows}")
    timed = sum(r.deadline != float("inf") for r in requests)
    if timed != len(deadlines):
        raise InvariantViolation(f"{len(deadlines)} deadlines for {timed} requests")
    if requests.num_unstarted > max_waiting_requests:
        raise InvariantViolation(f"{requests.num_unstarted} requests wait")
    if worker is not None and not alive and worker[0].pool.num_free != worker[0].pool.num_blocks - 1:
        raise InvariantViolation(f"idle, but only {worker[0].pool.num_free} blocks are free")


def _check_request(request: Request) -> None:
    unfinished = sum(s.status is not Status.FINISHED for s in request.sequences)
    if unfinished != request.num_unfinished or unfinished == 0:
        raise InvariantViolation(f"{request.name} counts {request.num_unfinished} choices, has {unfinished}")
    if len(request.held) == unfinished:
        raise InvariantViolation(f"{request.name}: all choices wait for each other")
    if (group := request.group) is None:
        return
    running = [s for s in request.sequences if s.status is Status.RUNNING]
    if set(group.beams) != set(running) or len({s.num_planned for s in running}) > 1:
        raise InvariantViolation(f"{request.name} has {len(group.beams)} beams, {len(running)} of its sequences run")
    if not running and request.sequences[0].status is not Status.WAITING:
        raise InvariantViolation(f"{request.name} neither runs nor waits")
    if not {parent for parent, _ in group.children} <= set(running):
        raise InvariantViolation(f"{request.name} goes on from beams that have left")


def _num_held_rows(request: Request) -> int:
    group = request.group
    return len(request.sequences) - len(group.beams) if group is not None and group.beams else 0

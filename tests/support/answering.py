"""A frontend with both doors in a thread of its own, with a scheduler that answers every request at once."""

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from octavo.wire.requests import FinishReason, SubmitRequest
from tests.support.http_client import Doors, running_doors
from tests.support.scripted_scheduler import ScriptedScheduler

WAIT_S = 60.0
ANSWER = b"answer"

T = TypeVar("T")


class Running:
    """What runs there, for a test without a loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, doors: Doors, scheduler: ScriptedScheduler) -> None:
        self.doors, self.scheduler = doors, scheduler
        self._loop = loop

    def do(self, work: Awaitable[T]) -> T:
        """Return what some work comes to there; longer than WAIT_S is a hang."""

        async def run() -> T:
            return await work

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(WAIT_S)


async def answer_all(scheduler: ScriptedScheduler) -> None:
    """Answer every request, for as long as this runs."""
    while True:
        scheduler._changed.clear()
        while scheduler._received:
            message = scheduler._received.popleft()
            if isinstance(message, SubmitRequest):
                answer(scheduler, message)
        await scheduler._changed.wait()


def answer(scheduler: ScriptedScheduler, request: SubmitRequest) -> None:
    """Answer a request with a few tokens a choice."""
    scheduler.start_request(request)
    ids = list(ANSWER[: request.max_tokens])
    with_logprobs = None if request.sampling.logprobs < 0 else request.sampling.logprobs
    for choice in range(request.num_choices):
        scheduler.emit(request, ids, choice=choice, finish=FinishReason.LENGTH, with_logprobs=with_logprobs)


@contextmanager
def answering_service(model: Path, address: str) -> Iterator[Running]:
    """Run a frontend and its scheduler."""
    loop, begun, over = asyncio.new_event_loop(), threading.Event(), asyncio.Event()
    found: list[Running] = []

    async def serve() -> None:
        with ScriptedScheduler(address) as scheduler:
            async with running_doors(model, address) as doors:
                await scheduler.session_begun()
                await doors.grpc.until_health(serving=True)
                answering = asyncio.create_task(answer_all(scheduler))
                found.append(Running(loop, doors, scheduler))
                begun.set()
                await over.wait()
                answering.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await answering

    def run() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(serve())

    thread = threading.Thread(target=run, name="service")
    thread.start()
    assert begun.wait(WAIT_S)
    yield found[0]
    loop.call_soon_threadsafe(over.set)
    thread.join(WAIT_S)
    assert not thread.is_alive()

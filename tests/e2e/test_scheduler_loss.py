"""F40: the scheduler is killed under streams. The worker's rows go on from the blocks that they have: nothing is computed
again but ids that nobody had computed, and no stream shows that anything happened."""

import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from octavo.v1 import admin_pb2
from octavo.v1 import generation_pb2 as pb
from tests.support.service import Service, request

MakeService = Callable[[], Service]


class Moment:
    """Does something once, when so many streams have got so many tokens."""

    def __init__(self, num_streams: int, act: Callable[[], None], num_tokens: int = 6) -> None:
        self._num_left = num_streams
        self._act = act
        self._num_tokens = num_tokens
        self._lock = threading.Lock()

    def reached(self, before: int, after: int) -> None:
        if before < self._num_tokens <= after:
            with self._lock:
                self._num_left -= 1
                if self._num_left == 0:
                    self._act()


def read(service: Service, message: pb.GenerateStreamRequest, moment: Moment | None = None) -> list[list[int]]:
    """Return the ids of each choice, whose positions are without gap or repetition."""
    num_choices = max(1, message.input.sampling.n)
    ids: list[list[int]] = [[] for _ in range(num_choices)]
    ended: set[int] = set()
    for event in service.generation.GenerateStream(message, timeout=240):
        if event.WhichOneof("event") == "delta":
            own = ids[event.delta.index]
            assert event.delta.first_token == len(own), "positions are not contiguous"
            before = len(own)
            own += event.delta.token_ids
            if moment is not None and event.delta.index == 0:
                moment.reached(before, len(own))
        elif event.WhichOneof("event") == "finished":
            assert event.finished.index not in ended
            ended.add(event.finished.index)
    assert ended == set(range(num_choices)), "not every choice ended"
    return ids


def read_all(
    service: Service, messages: list[pb.GenerateStreamRequest], moment: Moment | None
) -> list[list[list[int]]]:
    with ThreadPoolExecutor(len(messages)) as pool:
        return list(pool.map(lambda message: read(service, message, moment), messages))


def disturbed(service: Service, messages: list[pb.GenerateStreamRequest], num_begun: int) -> admin_pb2.SchedulerStatus:
    """Kill the scheduler when some streams have begun, and compare all of them with their undisturbed run."""
    expected = read_all(service, messages, None)
    worker, scheduler = service.pid_of("worker"), service.pid_of("scheduler")
    moment = Moment(num_begun, lambda: os.kill(scheduler, signal.SIGKILL))
    assert read_all(service, messages, moment) == expected
    assert service.pid_of("worker") == worker, "the weights are loaded still"
    assert service.pid_of("scheduler") != scheduler
    held = service.wait_until_idle()
    assert held.failed_checks == 0
    assert held.free_blocks == held.total_blocks
    return held


def every_kind() -> list[pb.GenerateStreamRequest]:
    """Return eight requests whose past decides what comes next: several choices, penalties, a grammar, bad words."""
    messages = [request([1000 + 37 * n + i for i in range(12 + 5 * n)], 24, ignore_eos=True) for n in range(8)]
    for number, message in enumerate(messages):
        message.input.sampling.seed = 3 + number
        message.input.sampling.temperature = 0.9
    messages[1].input.sampling.n = 2
    for penalised in messages[2:4]:
        penalised.input.sampling.presence_penalty = 0.5
        penalised.input.sampling.repetition_penalty = 1.2
    messages[4].input.constraint.regex = "[a-z]{60,90}"
    messages[4].input.stopping.ignore_eos = False
    messages[5].input.sampling.bad_words.append("the")
    return messages


def test_rows_are_adopted_and_streams_go_on(make_service: MakeService, demo_model: Path) -> None:
    service = make_service().serve(str(demo_model), "--backend", "reference").wait_until_ready()
    held = disturbed(service, every_kind(), num_begun=8)
    assert held.adopted_rows == 9
    assert held.adopted_tokens > 9 * 12
    assert held.recomputed_tokens <= 9, "of each row its last known token at most"


def test_who_waits_for_blocks_is_computed_again_and_takes_nobodys(make_service: MakeService, demo_model: Path) -> None:
    service = make_service()
    service.serve(str(demo_model), "--backend", "reference", "--num-gpu-blocks-override", "13").wait_until_ready()
    messages = [request([1000 + 37 * n + i for i in range(30)], 34, ignore_eos=True) for n in range(5)]
    held = disturbed(service, messages, num_begun=1)
    assert held.adopted_rows >= 1

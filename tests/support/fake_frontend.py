"""A frontend without text over real sockets, stepped by the test's own thread, and a scheduler loop in a thread."""

import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import zmq

from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.loop import Loop
from octavo.wire.channel import HEARTBEAT_INTERVAL_S, DealerChannel
from octavo.wire.codec import FromFrontend, FromScheduler
from octavo.wire.columns import pack_ints, unpack_ints
from octavo.wire.handshake import PROTOCOL_VERSION, FrontendHello, WorkerState
from octavo.wire.ids import new_boot_id
from octavo.wire.peer import Peer, PeerEvent, SessionBegan, SessionEnded
from octavo.wire.plan import RowSampling
from octavo.wire.prefix import prompt_keys
from octavo.wire.prompt_logprobs import PromptLogprobs
from octavo.wire.requests import (
    BeamParams,
    ChoiceFinished,
    ChoiceLogprobs,
    RequestFailed,
    RequestStarted,
    StepOutput,
    SubmitRequest,
    num_candidates,
)

WAIT_S = 30.0
"""Bound of every wait in here: longer means that the test has failed."""


def make_submit(
    handle: int,
    prompt: Sequence[int],
    max_tokens: int,
    *,
    num_choices: int = 1,
    stop_ids: Sequence[int] = (),
    min_tokens: int = 0,
    seed: int = 0,
    deadline_s: float | None = None,
    output_ids: Sequence[Sequence[int]] = (),
    finished: Sequence[int] = (),
    logprobs: int = -1,
    prompt_logprobs: int = -1,
    num_prompt_told: int = 0,
    caller: str = "",
    priority: int = 0,
    prefix_root: bytes = b"",
    block_size: int = 16,
    beams: BeamParams | None = None,
) -> SubmitRequest:
    """Return a request as a frontend would send it."""
    distinct = sorted(set(stop_ids))
    stops = pack_ints(distinct)
    return SubmitRequest(
        handle=handle,
        prompt_ids=pack_ints(prompt),
        num_choices=num_choices,
        max_tokens=max_tokens,
        sampling=RowSampling(
            seed=seed,
            min_tokens=min_tokens,
            stop_token_ids=stops if beams is None else b"",
            logprobs=logprobs if beams is None else num_candidates(beams, len(distinct)),
            prompt_logprobs=prompt_logprobs,
        ),
        stop_token_ids=stops,
        output_ids=tuple(pack_ints(ids) for ids in output_ids),
        finished_choices=pack_ints(finished),
        deadline_s=deadline_s,
        caller=caller,
        priority=priority,
        prefix_root=prefix_root,
        prefix_keys=prompt_keys(prefix_root, pack_ints(prompt), block_size) if prefix_root else b"",
        num_prompt_told=num_prompt_told,
        beams=beams,
    )


class Received:
    """What a frontend has got, with the rules of a stream checked on the way: positions contiguous, nothing after an
    end, ends once."""

    def __init__(self) -> None:
        self.started: dict[int, RequestStarted] = {}
        self.tokens: dict[tuple[int, int], list[int]] = defaultdict(list)
        self.first_position: dict[tuple[int, int], int] = {}
        self.finished: dict[tuple[int, int], ChoiceFinished] = {}
        self.failed: dict[int, RequestFailed] = {}
        self.logprobs: list[ChoiceLogprobs] = []
        self.prompts: dict[int, list[PromptLogprobs]] = defaultdict(list)

    def num_prompt_told(self, handle: int) -> int:
        """Return how many positions of a prompt need not be told, the first among them."""
        told = self.prompts[handle]
        return told[-1].first_position + told[-1].count if told else 1

    def resume(self, handle: int, choice: int, ids: Sequence[int]) -> None:
        """Say that a choice goes on after ids that were received in an earlier session."""
        self.tokens[handle, choice] = list(ids)

    def take(self, output: StepOutput) -> None:
        """Add a message."""
        for started in output.started:
            assert started.handle not in self.started, f"started twice: {started}"
            self.started[started.handle] = started
        for told in output.prompt_logprobs:
            assert told.of in self.started, f"log-probabilities of {told.of} before its start"
            assert told.first_position == self.num_prompt_told(told.of), f"positions of {told.of} are missing"
            assert not any(ids for (handle, _), ids in self.tokens.items() if handle == told.of), "after its tokens"
            self.prompts[told.of].append(told)
        columns = (output.handle, output.choice, output.position, output.token)
        for handle, choice, position, token in zip(*map(unpack_ints, columns), strict=True):
            assert handle in self.started, f"token of {handle} before its start"
            assert handle not in self.failed, f"token of {handle} after its failure"
            assert (handle, choice) not in self.finished, f"token of {handle}/{choice} after its end"
            assert position == len(self.tokens[handle, choice]), f"{handle}/{choice} jumps to position {position}"
            self.tokens[handle, choice].append(token)
        self.logprobs += output.logprobs
        for finished in output.finished:
            key = (finished.handle, finished.choice)
            assert key not in self.finished, f"ended twice: {finished}"
            assert finished.handle not in self.failed, f"ended twice: {finished}"
            assert finished.num_tokens == len(self.tokens[key]), f"{finished} after {len(self.tokens[key])} tokens"
            self.finished[key] = finished
        for failed in output.failed:
            assert failed.handle not in self.failed, f"failed twice: {failed}"
            self.failed[failed.handle] = failed


class FakeFrontend:
    """A frontend's session. Nothing happens but in `until` and `send`."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        address: str,
        digest: str,
        protocol_version: int = PROTOCOL_VERSION,
    ) -> None:
        self.boot_id = new_boot_id()
        self.received = Received()
        self.states: list[WorkerState] = []
        self.events: list[PeerEvent | FromScheduler] = []
        self._hello = FrontendHello(protocol_version, digest, self.boot_id, os.getpid())
        self.peer = Peer(DealerChannel(context, address, self.boot_id), lambda: self._hello, time.monotonic)

    def connect(self) -> SessionBegan:
        """Wait for a session to begin."""
        self.until(lambda: self.peer.session_id is not None)
        return next(event for event in reversed(self.events) if isinstance(event, SessionBegan))

    def send(self, message: FromFrontend) -> None:
        """Send a message of the session."""
        assert self.peer.send(message)

    def until(self, condition: Callable[[], bool]) -> None:
        """Handle what comes until something holds."""
        end = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < end, f"waited {WAIT_S} s in vain; seen: {self.events[-5:]}"
            poller = zmq.Poller()
            poller.register(self.peer.channel.socket, zmq.POLLIN)
            poller.register(self.peer.channel.monitor, zmq.POLLIN)
            poller.poll(20 if self.peer.session_id is None else int(HEARTBEAT_INTERVAL_S * 1000))
            for event in self.peer.step():
                self._note(event)

    def until_event(self, kind: type[PeerEvent | FromScheduler]) -> None:
        """Handle what comes until one more event of a kind has been seen."""
        seen = sum(isinstance(event, kind) for event in self.events)
        self.until(lambda: sum(isinstance(event, kind) for event in self.events) > seen)

    def close(self) -> None:
        """Vanish without a Goodbye."""
        if not self.peer.channel.socket.closed:
            self.peer.channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _note(self, event: PeerEvent | FromScheduler) -> None:
        self.events.append(event)
        if isinstance(event, StepOutput):
            self.received.take(event)
        elif isinstance(event, WorkerState):
            self.states.append(event)
        elif isinstance(event, SessionEnded):
            self.received = Received()


class LoopThread:
    """A scheduler's loop in a thread; leaving the context stops it and raises what it raised."""

    def __init__(self, config: SchedulerConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.loop = Loop(config, clock)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="scheduler-loop", daemon=True)

    def stop(self) -> None:
        """Stop the loop and wait for it."""
        self.loop.stop()
        self._thread.join(WAIT_S)

    def __enter__(self) -> Loop:
        self._thread.start()
        return self.loop

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread.is_alive():
            self.stop()
        self.loop.close()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self.loop.run()
        except BaseException as error:  # noqa: BLE001  told to the test's own thread
            self._error = error

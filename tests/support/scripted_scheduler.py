"""A scheduler that does what a test says, on the test's own event loop, over a real socket."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Self, TypeVar

import zmq

from octavo.wire.channel import HEARTBEAT_INTERVAL_S, RouterChannel
from octavo.wire.codec import FromPeer, FromScheduler
from octavo.wire.columns import pack_floats, pack_ints
from octavo.wire.handshake import FrontendHello, FrontendWelcome, Goodbye, Heartbeat, Refuse, ServiceFacts, Wait
from octavo.wire.ids import new_session_id
from octavo.wire.prompt_logprobs import PromptLogprobs
from octavo.wire.requests import (
    ChoiceFinished,
    ChoiceLogprobs,
    DrainBegun,
    DrainService,
    FailureCode,
    FinishChoice,
    FinishReason,
    FrontendDrains,
    RequestFailed,
    RequestStarted,
    ServiceDrains,
    StepOutput,
    SubmitRequest,
)
from octavo.wire.session import Session

WAIT_S = 20.0
"""Bound of every wait in here: longer means that the test has failed."""

FACTS = ServiceFacts(vocab_size=300, max_model_len=256, block_size=16, max_num_seqs=8)

M = TypeVar("M", bound=FromPeer)


class ScriptedScheduler:
    """Welcomes frontends (or not) and keeps what they send.

    Args:
        address: where it listens.
        facts: what it welcomes with; None: frontends are told to wait.
    """

    def __init__(self, address: str, facts: ServiceFacts | None = FACTS) -> None:
        self.facts = facts
        self.refusal: str | None = None
        self.hellos: list[FrontendHello] = []
        self.num_heartbeats = 0
        self.num_requests = 0  # what it says to a drain
        self.drains: list[FrontendDrains] = []
        self.num_drains = 0
        self._address = address
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._loop = asyncio.get_running_loop()
        self._received: deque[FromPeer] = deque()
        self._changed = asyncio.Event()
        self._channel: RouterChannel | None = None
        self._descriptor = -1
        self._peer = b""
        self._session: Session | None = None
        self._heartbeat: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Listen."""
        self._channel = RouterChannel(self._context, self._address)
        self._descriptor = int(self._channel.socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._descriptor, self._drain)
        self._drain()
        self._beat()

    def vanish(self) -> None:
        """Go away as after kill -9."""
        if self._heartbeat is not None:
            self._heartbeat.cancel()
        if self._channel is not None:
            self._loop.remove_reader(self._descriptor)
            self._channel.close()
        self._channel = self._session = None
        self._received.clear()

    def close(self) -> None:
        """Release everything."""
        self.vanish()
        self._context.destroy(linger=0)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def has_session(self) -> bool:
        """Whether a frontend has been welcomed and has not left."""
        return self._session is not None

    async def session_begun(self) -> None:
        """Wait for a frontend."""
        await self._wait(lambda: self._session is not None)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until something is so that only a message can make so."""
        await self._wait(condition)

    async def session_over(self) -> None:
        """Wait until the frontend has left."""
        await self._wait(lambda: self._session is None)

    async def next(self, kind: type[M]) -> M:
        """Return the next message; it must be of this kind."""
        await self._wait(lambda: bool(self._received))
        message = self._received.popleft()
        assert isinstance(message, kind), message
        return message

    async def next_submit(self) -> SubmitRequest:
        """Return the next request, past choices of earlier ones that the frontend ended."""
        await self._wait(lambda: any(isinstance(message, SubmitRequest) for message in self._received))
        while isinstance(self._received[0], FinishChoice):
            self._received.popleft()
        return await self.next(SubmitRequest)

    def nothing_came(self) -> bool:
        """Whether everything received has been asked for."""
        self._drain()
        return not self._received

    def send(self, message: FromScheduler, number: int | None = None) -> None:
        """Send a message of the session, numbered as it should be unless told otherwise."""
        assert self._channel is not None
        assert self._session is not None
        own = self._session.next_number()
        self._channel.send(self._peer, message, self._session.id, own if number is None else number)
        self._drain()

    def start_request(self, request: SubmitRequest, num_cached_tokens: int = 0, queue_s: float = 0.0) -> None:
        """Say that a request runs."""
        self.send(StepOutput(started=(RequestStarted(request.handle, num_cached_tokens, queue_s),)))

    def emit(
        self,
        request: SubmitRequest,
        ids: Sequence[int],
        *,
        choice: int = 0,
        position: int = 0,
        finish: FinishReason | None = None,
        with_logprobs: int | None = None,
    ) -> None:
        """Send ids of one choice from a position on, and perhaps its end."""
        places = range(position, position + len(ids))
        logprobs: tuple[ChoiceLogprobs, ...] = ()
        if with_logprobs is not None:
            top = pack_ints(range(with_logprobs)), pack_floats([-1.0] * with_logprobs)
            logprobs = tuple(ChoiceLogprobs(request.handle, choice, place, -0.5, 1, *top) for place in places)
        end = (
            () if finish is None else (ChoiceFinished(request.handle, choice, finish, position + len(ids), 0.25, 0.5),)
        )
        self.send(
            StepOutput(
                handle=pack_ints([request.handle] * len(ids)),
                choice=pack_ints([choice] * len(ids)),
                position=pack_ints(places),
                token=pack_ints(ids),
                logprobs=logprobs,
                finished=end,
            )
        )

    def tell_prompt(self, request: SubmitRequest, first: int, end: int) -> None:
        """Tell log-probabilities of positions of a prompt: -1/2 for position 1, -2/2 for position 2, ..."""
        top, count = request.sampling.prompt_logprobs, end - first
        told = PromptLogprobs(
            request.handle,
            first,
            pack_floats([-position / 2 for position in range(first, end)]),
            pack_ints(range(first, end)),
            pack_ints([(position + i) % 256 for position in range(first, end) for i in range(top)]),
            pack_floats([-i / 4 for _ in range(count) for i in range(top)]),
        )
        self.send(StepOutput(prompt_logprobs=(told,)))

    def answer(self, request: SubmitRequest, outputs: Iterable[Sequence[int]], finish: FinishReason) -> None:
        """Answer a request: all choices whole, one id of each a message."""
        self.start_request(request)
        for choice, ids in enumerate(outputs):
            for position, token_id in enumerate(ids):
                last = position == len(ids) - 1
                self.emit(request, [token_id], choice=choice, position=position, finish=finish if last else None)

    def fail(self, request: SubmitRequest, code: FailureCode, message: str, retry_after_s: float = 0.0) -> None:
        """End a request without an answer."""
        self.send(StepOutput(failed=(RequestFailed(request.handle, code, message, retry_after_s),)))

    def _beat(self) -> None:
        if self._session is not None:
            self.send(Heartbeat())
        self._heartbeat = self._loop.call_later(HEARTBEAT_INTERVAL_S, self._beat)

    async def _wait(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    def _drain(self) -> None:
        while self._channel is not None:
            for identity, envelope, message in self._channel.receive(1000):
                self._on_message(identity, envelope.session, message)
            # The descriptor is edge-triggered: silent until the socket has been asked for its events.
            if self._channel is None or not int(self._channel.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                break
        self._changed.set()

    def _on_message(self, identity: bytes, session: int, message: FromPeer) -> None:
        assert self._channel is not None
        if isinstance(message, FrontendHello):
            self.hellos.append(message)
            if self.refusal is not None:
                self._channel.send(identity, Refuse(self.refusal))
            elif self.facts is None:
                self._channel.send(identity, Wait("the worker loads its weights"))
            else:
                self._peer, self._session = identity, Session(new_session_id())
                self._channel.send(identity, FrontendWelcome("5c4ed0000000b001", self.facts), self._session.id)
        elif self._session is None or session != self._session.id:
            return
        elif isinstance(message, Heartbeat):
            self.num_heartbeats += 1
        elif isinstance(message, Goodbye):
            self._session = None
        elif isinstance(message, FrontendDrains):
            self.drains.append(message)
        elif isinstance(message, DrainService):
            self.num_drains += 1
            if message.tag_id is not None:
                self._channel.send(identity, ServiceDrains(), self._session.id, self._session.next_number())
                answer = DrainBegun(message.tag_id, self.num_requests)
                self._channel.send(identity, answer, self._session.id, self._session.next_number())
        else:
            self._received.append(message)

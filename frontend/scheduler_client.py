"""The frontend's session with the scheduler, on the asyncio loop.

A ZeroMQ socket's descriptor is edge-triggered: it becomes readable when something has changed, and is silent until it
has been asked what. So after everything that touches the socket its events are read, and it is drained.
"""

import asyncio
import logging
import os
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import zmq

from octavo.frontend.config import FrontendConfig
from octavo.frontend.errors import Unavailable
from octavo.frontend.stream_table import StreamTable
from octavo.frontend.streams import Stream
from octavo.wire.channel import HEARTBEAT_INTERVAL_S, DealerChannel
from octavo.wire.codec import FromPeer, FromScheduler
from octavo.wire.curve import load_peer_keys
from octavo.wire.errors import WireError
from octavo.wire.failpoints import failpoint
from octavo.wire.handshake import PROTOCOL_VERSION, FrontendHello, FrontendWelcome, ServiceFacts, WorkerState
from octavo.wire.ids import BootId
from octavo.wire.peer import Peer, PeerEvent, PeerRefused, SessionBegan, SessionEnded, Waiting
from octavo.wire.requests import (
    CancelRequest,
    DrainBegun,
    DrainService,
    FinishChoice,
    PrefixCacheReset,
    ReplaceScheduler,
    ResetPrefixCache,
    SchedulerLeaves,
    ServiceDrains,
    StatusReport,
    StatusRequest,
    StepOutput,
    SubmitRequest,
)

SEEK_INTERVAL_S = 0.1
"""How often a frontend without a session looks whether the scheduler is there."""

MAX_OUTBOX_MESSAGES = 65536
"""Messages that wait for the socket; more means that the scheduler does not keep up, and ends the session."""

MAX_QUESTIONS = 64
"""Answers (status reports, resets of the prefix cache) awaited at one time."""

Answer: TypeAlias = StatusReport | PrefixCacheReset | DrainBegun | SchedulerLeaves

_log = logging.getLogger(__name__)


class SchedulerClient:
    """Owns the session, the streams and what waits to be sent.

    The law: while there is a session the scheduler knows of every stream here; when one begins, each stream is begun
    there again from its journal. Nothing that was queued for an older session is ever sent.

    Args:
        context: of the sockets.
        config: address and patience.
        digest: identity of the model.
        boot_id: identity of this process's life.
        on_change: called when `serving` may have changed.

    Attributes:
        facts: of the newest session, None before the first.
        reason: why steps cannot be made, '' while they can.
        check_facts: says why the model cannot be served with these facts, None if it can.
        on_drain: called when the scheduler says that no frontend is to take new requests.
        greetings: makes what the scheduler is to be told at the beginning of each session.
        refused: done when the scheduler, or this frontend, finds that the two can never work together; says why.

    Raises (on construction):
        WireError: the address is malformed, or its CURVE keys cannot be used.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        config: FrontendConfig,
        digest: str,
        boot_id: BootId,
        on_change: Callable[[], None],
    ) -> None:
        self.boot_id = boot_id
        self.facts: ServiceFacts | None = None  # of the newest session
        self.reason = "the scheduler cannot be reached yet"
        self.check_facts: Callable[[ServiceFacts], str | None] = lambda _facts: None
        self.on_drain: Callable[[], None] = lambda: None
        self.greetings: Callable[[], list[FromPeer]] = list
        self.streams = StreamTable(asyncio.get_running_loop())
        self.refused: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._config = config
        self._digest = digest
        self._on_change = on_change
        self._loop = asyncio.get_running_loop()
        keys = load_peer_keys(config.curve_keys, "frontend")
        channel = DealerChannel(context, config.address, boot_id, keys)
        self._peer = Peer(channel, self._make_hello, self._loop.time)
        self._descriptors: tuple[int, ...] = ()
        self._watched: zmq.Socket[bytes] | None = None
        self._outbox: deque[FromPeer] = deque()
        self._pump_due: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._paused_since: float | None = None  # steps cannot be made since; None while they can
        self._lost_since: float | None = None  # there is no session since
        self._questions: dict[int, asyncio.Future[Answer | None]] = {}  # by tag
        self._next_tag = 0
        self._closed = False

    @property
    def epoch(self) -> int:
        """Identity of the session, 0 while there is none."""
        return self._peer.session_id or 0

    @property
    def serving(self) -> bool:
        """Whether health says SERVING: the model is known, and no pause is longer than `unready_after_s`."""
        return self._paused_at_most(self._config.unready_after_s)

    @property
    def accepting(self) -> bool:
        """Whether new requests are taken: in a pause they wait as the running ones do, for `recovery_timeout_s`."""
        return self._paused_at_most(self._config.recovery_timeout_s)

    def start(self) -> None:
        """Begin to look for the scheduler."""
        self._watch()
        self._on_timer()

    def leave(self, reason: str) -> None:
        """Say Goodbye and close the sockets."""
        self._closed = True
        for handle in (self._timer, self._pump_due):
            if handle is not None:
                handle.cancel()
        self._unwatch()
        self._peer.leave(reason)

    def add(self, stream: Stream) -> None:
        """Hold a stream and begin it; without a session it begins with the next one."""
        self.streams.add(stream)
        if self.epoch and self.facts is not None:
            stream.begin(self.facts)

    def release(self, stream: Stream) -> None:
        """Let go of a stream; if it has not ended, the scheduler is told."""
        self.streams.remove(stream)
        if not stream.ended:
            self.cancel(stream.handle)

    def submit(self, request: SubmitRequest) -> None:
        """Begin a request or go on with it."""
        self._send(request)

    def cancel(self, handle: int) -> None:
        """End a request without an answer."""
        self._send(CancelRequest(handle))

    def finish_choice(self, handle: int, choice: int, num_tokens: int) -> bool:
        """End one choice at its `num_tokens`-th token, or a search; say whether there is somebody to tell."""
        self._send(FinishChoice(handle, choice, num_tokens))
        return bool(self.epoch)

    async def status(self, with_metrics: bool = False) -> StatusReport | None:
        """Ask the scheduler what it holds; None if it does not answer in time or cannot be asked."""
        answer = await self._ask(partial(StatusRequest, with_metrics=with_metrics))
        return answer if isinstance(answer, StatusReport) else None

    async def reset_prefix_cache(self) -> int | None:
        """Make the scheduler forget all cached prefixes; return how many blocks could be found until then.

        None: it did not answer in time or cannot be asked; the cache may or may not have been reset.
        """
        answer = await self._ask(ResetPrefixCache)
        return answer.num_blocks if isinstance(answer, PrefixCacheReset) else None

    async def drain_service(self) -> int | None:
        """Make all frontends take no new requests; return how many requests have begun and not ended.

        None: the scheduler did not answer in time or cannot be asked.
        """
        answer = await self._ask(DrainService)
        return answer.num_requests if isinstance(answer, DrainBegun) else None

    async def replace_scheduler(self) -> int | None:
        """Make the scheduler leave for the next one; return how many requests have begun and not ended.

        None: it did not answer in time or cannot be asked; it may or may not leave.
        """
        answer = await self._ask(ReplaceScheduler)
        return answer.num_requests if isinstance(answer, SchedulerLeaves) else None

    def tell(self, message: FromPeer) -> None:
        """Send a message if there is a session."""
        self._send(message)

    async def _ask(self, make: Callable[[int], FromPeer]) -> Answer | None:
        if not self.epoch or len(self._questions) >= MAX_QUESTIONS:
            return None
        tag = self._next_tag
        self._next_tag = (tag + 1) % 2**31
        answer: asyncio.Future[Answer | None] = self._loop.create_future()
        self._questions[tag] = answer
        self._send(make(tag))
        try:
            return await asyncio.wait_for(answer, self._config.status_timeout_s)
        except TimeoutError:
            return None
        finally:
            self._questions.pop(tag, None)

    def _paused_at_most(self, limit_s: float) -> bool:
        if self.facts is None:
            return False
        return self._paused_since is None or self._loop.time() - self._paused_since < limit_s

    def _make_hello(self) -> FrontendHello:
        return FrontendHello(PROTOCOL_VERSION, self._digest, self.boot_id, os.getpid())

    def _send(self, message: FromPeer) -> None:
        if not self.epoch:
            return
        self._outbox.append(message)
        self._pump_soon()

    def _pump_soon(self) -> None:
        if self._pump_due is None and not self._closed:
            self._pump_due = self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        """Receive what has come, send what waits, and come back if there is more."""
        self._pump_due = None
        if self._closed:
            return
        failpoint("frontend.before_receive")
        try:
            for event in self._peer.step():
                self._on_event(event)
        except PeerRefused as error:
            self._closed = True
            self._unwatch()
            self.refused.set_result(str(error))
            return
        if self._peer.channel.socket is not self._watched:
            self._watch()
        self._flush()
        if _events(self._peer.channel.socket) & zmq.POLLIN:
            self._pump_soon()

    def _flush(self) -> None:
        socket = self._peer.channel.socket
        while self._outbox and _events(socket) & zmq.POLLOUT:
            if not self._peer.send(self._outbox.popleft()):
                self._pump_soon()
                return
        if len(self._outbox) > MAX_OUTBOX_MESSAGES:
            event = self._peer.reset(f"{len(self._outbox)} messages wait for the scheduler")
            if event is not None:
                self._on_event(event)
            self._watch()

    def _on_event(self, event: PeerEvent | FromScheduler) -> None:
        if isinstance(event, StepOutput):
            self._on_output(event)
        elif isinstance(event, SessionBegan):
            self._on_session_began(event)
        elif isinstance(event, SessionEnded):
            self._on_session_ended(event)
        elif isinstance(event, WorkerState):
            self._set_paused(None if event.ready else event.reason or "no worker is ready")
        elif isinstance(event, ServiceDrains):
            self.on_drain()
        elif isinstance(event, Answer):
            answer = self._questions.get(event.tag_id)
            if answer is not None and not answer.done():
                answer.set_result(event)
        elif isinstance(event, Waiting) and self.facts is None:
            self.reason = event.reason

    def _on_output(self, output: StepOutput) -> None:
        failpoint("frontend.after_receive")
        try:
            self.streams.apply(output)
        except WireError as error:
            event = self._peer.reset(str(error))
            if event is not None:
                self._on_event(event)
        failpoint("frontend.after_compute")

    def _on_session_began(self, event: SessionBegan) -> None:
        if not isinstance(event.welcome, FrontendWelcome):
            raise PeerRefused("the scheduler takes this frontend for a worker")
        _log.info("session %016x with scheduler %s", event.session, event.welcome.scheduler_boot_id)
        if (objection := self.check_facts(event.welcome.facts)) is not None:
            raise PeerRefused(objection)
        self.facts = event.welcome.facts
        self._lost_since = None
        self._outbox.clear()
        for stream in self.streams:
            if not stream.ended:
                stream.begin(event.welcome.facts)
        for message in self.greetings():
            self._send(message)
        self._set_paused(None)

    def _on_session_ended(self, event: SessionEnded) -> None:
        reason, num_waiting = event.reason, len(self.streams)
        level = logging.WARNING if num_waiting or not event.is_orderly else logging.INFO
        _log.log(
            level, "session with the scheduler is over: %s; requests that wait for the next: %d", reason, num_waiting
        )
        self._outbox.clear()
        for answer in self._questions.values():
            if not answer.done():
                answer.set_result(None)  # nobody is left to answer
        self._lost_since = self._loop.time()
        self._set_paused(f"the scheduler is gone: {reason}")

    def _set_paused(self, reason: str | None) -> None:
        self.reason = reason or ""
        if reason is None and self._paused_since is not None:
            self.streams.watch("octavo.resume", {})
        elif reason is not None and self._paused_since is None:
            self.streams.watch("octavo.pause", {"octavo.reason": reason[:200]})
        if reason is None:
            self._paused_since = None
        elif self._paused_since is None:
            self._paused_since = self._loop.time()
        self._on_change()

    def _on_timer(self) -> None:
        interval = HEARTBEAT_INTERVAL_S if self.epoch else SEEK_INTERVAL_S
        self._timer = self._loop.call_later(interval, self._on_timer)
        self._pump_soon()
        if self._paused_since is not None:
            self._on_change()
        lost_for = 0.0 if self._lost_since is None else self._loop.time() - self._lost_since
        if lost_for > self._config.recovery_timeout_s:
            for stream in self.streams:
                stream.fail(Unavailable(f"no scheduler for {lost_for:.0f} s: {self.reason}"))

    def _watch(self) -> None:
        """Listen to the channel's sockets, which are new after each session."""
        self._unwatch()
        channel = self._peer.channel
        self._watched = channel.socket
        self._descriptors = (int(channel.socket.getsockopt(zmq.FD)), int(channel.monitor.getsockopt(zmq.FD)))
        for descriptor in self._descriptors:
            self._loop.add_reader(descriptor, self._pump_soon)
        self._pump_soon()

    def _unwatch(self) -> None:
        for descriptor in self._descriptors:
            self._loop.remove_reader(descriptor)
        self._descriptors = ()


def _events(socket: "zmq.Socket[bytes]") -> int:
    return int(socket.getsockopt(zmq.EVENTS))

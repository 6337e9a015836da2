"""A worker without torch over real sockets: a Peer on a DealerChannel around the FakeModel.

In a test::

    with FakeWorker(address, digest, make_facts(), lambda ids: (ids[-1] + 1) % 1000) as worker:
        ...                     # a scheduler on `address` welcomes it; requests count upwards from their last id
        worker.hold()           # from here on plans are kept and not answered
        worker.wait_for_plans(2)
        worker.release()        # answers what was kept, and goes on

By hand: ``python -m tests.support.fake_worker ipc:///folder/socket DIGEST [--seconds-per-step 0.02]``.
"""

import argparse
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import zmq

from octavo.scheduler.simulate.model import FakeModel, FaultRule, make_facts
from octavo.wire.channel import HEARTBEAT_INTERVAL_S, DealerChannel
from octavo.wire.codec import FromScheduler
from octavo.wire.handshake import PROTOCOL_VERSION, WorkerFacts, WorkerHello
from octavo.wire.ids import BootId, new_boot_id
from octavo.wire.peer import Peer, PeerEvent, PeerRefused, SessionBegan, SessionEnded, Waiting
from octavo.wire.plan import StepPlan

NextToken = Callable[[Sequence[int]], int]
WAIT_S = 30.0
"""Bound of every wait in here: longer means that the test has failed."""


def count_upwards(vocab_size: int) -> NextToken:
    """Return the rule that every id is one more than the last."""
    return lambda ids: (ids[-1] + 1) % vocab_size


class FakeWorker:
    """A worker in a thread of its own.

    Args:
        address: the scheduler's address.
        digest: of the model, as the scheduler was told.
        facts: what it reports; None: it never gets past loading.
        next_token: the model: all token ids of a sequence (prompt, then output) -> its next id. Ids that `min_tokens`
            masks are skipped upwards. Default: one more than the last id.
        fault_rule: which sampling rows report non-finite logits instead.
        seconds_per_step: computing time, for trying things by hand.
        protocol_version: what its Hello says.

    What happens in the thread and breaks the contract (PlanError) or ends it (PeerRefused) is in `error`, and raised by
    `stop` unless expected.
    """

    def __init__(
        self,
        address: str,
        digest: str,
        facts: WorkerFacts | None,
        next_token: NextToken | None = None,
        *,
        fault_rule: FaultRule | None = None,
        seconds_per_step: float = 0.0,
        protocol_version: int = PROTOCOL_VERSION,
        rank: int = 0,
        boot_id: BootId | None = None,
    ) -> None:
        self.facts = facts
        self.boot_id = boot_id or new_boot_id()
        self.error: Exception | None = None
        self.plans: list[StepPlan] = []  # of all epochs, as received
        self.epochs: list[int] = []  # sessions begun
        self.endings: list[str] = []  # why sessions ended
        self.waits: list[str] = []  # why the scheduler told it to wait
        self._address = address
        self._hello = (protocol_version, digest, rank)
        self._next_token = next_token or count_upwards(facts.vocab_size if facts else 1)
        self._fault_rule = fault_rule
        self._seconds_per_step = seconds_per_step
        self._model: FakeModel | None = None
        self._kept: deque[StepPlan] = deque()
        self._allowed: int | None = None  # answers that may still be given; None: any number
        self._changed = threading.Condition()
        self._wake, self._wake_end = socket.socketpair()
        self._ending = ""  # "stop" or "kill"
        self._thread = threading.Thread(target=self._run, name="fake-worker", daemon=True)

    def start(self) -> Self:
        """Start the thread."""
        self._thread.start()
        return self

    def hold(self) -> None:
        """Answer no plan from now on."""
        with self._changed:
            self._allowed = 0

    def release(self, count: int | None = None) -> None:
        """Answer `count` more plans, or all from now on."""
        with self._changed:
            self._allowed = None if count is None else (self._allowed or 0) + count
        if not self._ending:
            self._wake_end.send(b"x")

    def wait_for_plans(self, count: int) -> None:
        """Wait until `count` plans have been received in all."""
        self.wait_until(lambda: len(self.plans) >= count)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until something about this worker holds; checked whenever something happens to it."""
        with self._changed:
            if not self._changed.wait_for(lambda: condition() or self.error is not None, WAIT_S):
                raise AssertionError(f"waited {WAIT_S} s in vain")
            if not condition() and self.error is not None:
                raise self.error

    def stop(self) -> None:
        """Leave in good order; raise what went wrong in the thread."""
        self._end("stop")
        if self.error is not None:
            raise self.error

    def kill(self) -> None:
        """Vanish without a Goodbye, as after kill -9."""
        self._end("kill")

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end("stop")
        if error is None and self.error is not None and not isinstance(self.error, PeerRefused):
            raise self.error

    def _end(self, how: str) -> None:
        if not self._ending:
            self._ending = how
            self._wake_end.send(b"x")
            self._thread.join(WAIT_S)
            self._wake.close()
            self._wake_end.close()

    def _make_hello(self) -> WorkerHello:
        version, digest, rank = self._hello
        return WorkerHello(version, digest, self.boot_id, os.getpid(), rank, self.facts)

    def _run(self) -> None:
        with zmq.Context() as context:
            channel = DealerChannel(context, self._address, self.boot_id)
            peer = Peer(channel, self._make_hello, time.monotonic)
            try:
                self._serve(peer)
            except Exception as error:  # noqa: BLE001  told to the test's own thread
                with self._changed:
                    self.error = error
                    self._changed.notify_all()
            finally:
                if self._ending == "stop":
                    peer.leave("the test ends")
                elif not peer.channel.socket.closed:
                    peer.channel.close()

    def _serve(self, peer: Peer) -> None:
        while not self._ending:
            for event in peer.step():
                with self._changed:
                    self._note(event)
                    self._changed.notify_all()
            self._answer(peer)
            poller = zmq.Poller()
            poller.register(peer.channel.socket, zmq.POLLIN)
            poller.register(peer.channel.monitor, zmq.POLLIN)
            poller.register(self._wake.fileno(), zmq.POLLIN)
            unsettled = peer.session_id is None
            ready = dict(poller.poll(50 if unsettled else int(HEARTBEAT_INTERVAL_S * 1000)))
            if self._wake.fileno() in ready:
                self._wake.recv(4096)

    def _note(self, event: PeerEvent | FromScheduler) -> None:
        if isinstance(event, SessionBegan):
            if self.facts is None:
                raise AssertionError("welcomed without facts")
            rule = self._next_token
            self._model = FakeModel(self.facts, lambda ids, seed, choice: rule(ids), self._fault_rule)
            self._kept.clear()
            self.epochs.append(event.session)
        elif isinstance(event, SessionEnded):
            self._model = None
            self._kept.clear()
            self.endings.append(event.reason)
        elif isinstance(event, Waiting):
            self.waits.append(event.reason)
        elif isinstance(event, StepPlan):
            self.plans.append(event)
            self._kept.append(event)

    def _answer(self, peer: Peer) -> None:
        while self._kept and self._model is not None:
            with self._changed:
                if self._allowed is not None:
                    if self._allowed == 0:
                        return
                    self._allowed -= 1
            if self._seconds_per_step:
                time.sleep(self._seconds_per_step)
            result = self._model.execute(self._kept.popleft())
            peer.send(result)


def main() -> None:
    """Run one by hand until interrupted."""
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("digest")
    parser.add_argument("--vocab-size", type=int, default=1000)
    parser.add_argument("--num-blocks", type=int, default=65)
    parser.add_argument("--max-model-len", type=int, default=512)
    parser.add_argument("--seconds-per-step", type=float, default=0.0)
    args = parser.parse_args()
    facts = make_facts(vocab_size=args.vocab_size, num_blocks=args.num_blocks, max_model_len=args.max_model_len)
    worker = FakeWorker(args.address, args.digest, facts, seconds_per_step=args.seconds_per_step).start()
    try:
        while worker.error is None:
            time.sleep(0.5)
    except KeyboardInterrupt:
        worker.stop()


if __name__ == "__main__":
    main()

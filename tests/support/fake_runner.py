"""`octavo worker` without torch: the real worker's loop around the model that reads its ids through the block tables.

As a process: ``python -m tests.support.chaos_process fake-worker MODEL --scheduler-address ADDRESS [...]``.
"""

import argparse
import logging
import time
from pathlib import Path

import zmq

from octavo.cli.parent import exit_with_parent
from octavo.scheduler.simulate.model import FakeModel, hash_rule, make_facts
from octavo.wire import handshake
from octavo.wire.channel import DealerChannel
from octavo.wire.handshake import WorkerFacts
from octavo.wire.held_rows import HeldRow
from octavo.wire.ids import new_boot_id
from octavo.wire.model_digest import model_digest
from octavo.wire.peer import Peer, PeerRefused
from octavo.wire.plan import StepPlan, StepResult
from octavo.wire.signals import StopSignal
from octavo.worker.loop import WorkerIdentity, WorkerLoop
from octavo.worker.mirror import RowLimits

EXIT_CONFIGURATION = 2

_log = logging.getLogger(__name__)


class FakeRows:
    """Rows as the loop knows them."""

    def __init__(self, facts: WorkerFacts) -> None:
        names = ("max_num_seqs", "max_model_len", "max_num_batched_tokens", "block_size", "num_blocks", "vocab_size")
        self.limits = RowLimits(*(getattr(facts, name) for name in names))
        self.model: FakeModel | None = None

    def clear(self) -> None:
        self.model = None

    def __len__(self) -> int:
        return 0 if self.model is None else len(self.model.rows)


class FakeRunner:
    """Executes each plan at once. A plan that breaks the contract raises the model's PlanError, which ends the process."""

    def __init__(self, facts: WorkerFacts, seconds_per_step: float) -> None:
        self.rows = FakeRows(facts)
        self._facts = facts
        self._seconds_per_step = seconds_per_step
        self._results: list[StepResult] = []

    @property
    def num_in_flight(self) -> int:
        return len(self._results)

    def profile(self) -> None:
        """There is nothing to measure."""

    def profile_sampling(self) -> None:
        """There is nothing to measure."""

    def capture(self) -> None:
        """There is nothing to capture."""

    def rehearse(self, *, prompts: bool) -> None:
        """There is nothing to compile."""

    def launch(self, plan: StepPlan) -> None:
        self._results.append(self.execute(plan))

    def take_results(self) -> list[StepResult]:
        results, self._results = self._results, []
        return results

    def execute(self, plan: StepPlan) -> StepResult:
        if self.rows.model is None:
            self.rows.model = FakeModel(self._facts, hash_rule(self._facts.vocab_size))
        time.sleep(self._seconds_per_step)
        return self.rows.model.execute(plan)

    def hold(self) -> list[HeldRow]:
        self._results = []
        if self.rows.model is None:
            return []
        held = self.rows.model.report()
        self.rows.model.forget(held)
        return held

    def clear(self) -> None:
        self.rows.clear()
        self._results = []


def main(arguments: list[str]) -> int:
    """Serve plans until a stop signal; return the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--scheduler-address", required=True)
    parser.add_argument("--exit-with-parent", type=int)
    parser.add_argument("--log-level", default="info")
    parser.add_argument("--vocab-size", type=int, default=1000)
    parser.add_argument("--num-blocks", type=int, default=65)
    parser.add_argument("--max-model-len", type=int, default=512)
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--seconds-per-step", type=float, default=0.0)
    parser.add_argument("--protocol-version", type=int, default=handshake.PROTOCOL_VERSION)
    args = parser.parse_args(arguments)
    if args.exit_with_parent is not None:
        exit_with_parent(args.exit_with_parent)
    handshake.PROTOCOL_VERSION = args.protocol_version  # of the header of every message
    facts = make_facts(
        vocab_size=args.vocab_size,
        num_blocks=args.num_blocks,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
    )
    boot_id = new_boot_id()
    identity = WorkerIdentity(model_digest(args.model), boot_id)
    identity.facts = facts
    try:
        with StopSignal() as stop, zmq.Context() as context:
            peer = Peer(DealerChannel(context, args.scheduler_address, boot_id), identity.hello, time.monotonic)
            try:
                WorkerLoop(peer, identity, FakeRunner(facts, args.seconds_per_step), stop).run()
            finally:
                if not peer.channel.socket.closed:
                    peer.channel.close()
    except PeerRefused as error:
        _log.error("%s", error)
        return EXIT_CONFIGURATION
    return 0

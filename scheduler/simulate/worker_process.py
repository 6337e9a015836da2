"""A simulated worker: the real Peer around the model that reads its ids through the block tables."""

from collections import deque
from random import Random
from typing import Any, cast

from msgspec.structs import replace

from octavo.scheduler.simulate.links import DealerLink, Network
from octavo.scheduler.simulate.model import FakeModel, hash_rule
from octavo.scheduler.simulate.scenario import DIGEST, VOCAB_SIZE
from octavo.scheduler.simulate.workload import is_deadly, is_sick
from octavo.scheduler.simulate.world import Process, Violation, World
from octavo.wire.channel import HEARTBEAT_INTERVAL_S, DealerChannel
from octavo.wire.codec import FromScheduler
from octavo.wire.columns import pack_ints, unpack_ints
from octavo.wire.handshake import PROTOCOL_VERSION, WorkerFacts, WorkerHello, WorkerWelcome
from octavo.wire.held_rows import HeldRow, HeldRows
from octavo.wire.ids import NULL_BLOCK, BootId
from octavo.wire.peer import Peer, PeerEvent, PeerRefused, SessionBegan, SessionEnded, Waiting
from octavo.wire.plan import StepPlan

DOOMS = ("before receive", "after receive", "after compute", "after reply")
"""Where a worker may die."""


class SimWorker(Process):
    """Executes plans in order, one at a time, and neither hears nor says anything meanwhile.

    Attributes:
        doom: where it dies next, one of DOOMS; None: nowhere.
        hang_s: how much longer the next step takes.
        refused: why the scheduler will not have it; the process is at its end.
    """

    def __init__(
        self, world: World, network: Network, boot_id: BootId, facts: WorkerFacts, compute_s: float, load_s: float
    ) -> None:
        super().__init__(world)
        self.boot_id = boot_id
        self.facts = facts
        self.doom: str | None = None
        self.hang_s = 0.0
        self.refused: str | None = None
        self.model: FakeModel | None = None  # of the present session
        self._cache = FakeModel(facts, hash_rule(VOCAB_SIZE), is_sick)
        self._held: list[HeldRow] = []  # of the newest session that had plans
        self._compute_s = compute_s
        self._loaded_at = world.now + load_s
        self._plans: deque[StepPlan] = deque()
        self._busy_until: float | None = None
        self.link = DealerLink(network, boot_id, self.wake)
        self.peer = Peer(cast(DealerChannel, self.link), self._make_hello, world.clock)
        self.wake()

    def turn(self) -> None:
        """Finish the step, if its time has come; else hear what is new and begin the next one."""
        now = self.world.now
        if self._busy_until is not None:
            if now < self._busy_until:
                self.wake_at(self._busy_until)
                return
            self._busy_until = None
            self._execute()
            if not self.is_alive:
                return
        if not self._plans:
            self._listen()
        if self._plans and self.is_alive:
            self._begin_step()
        elif self.is_alive:
            interval = HEARTBEAT_INTERVAL_S if self.peer.session_id else HEARTBEAT_INTERVAL_S / 10
            self.wake_at(now + interval)

    def vanish(self) -> None:
        """Die."""
        super().vanish()
        self.link.close()

    def leave(self) -> None:
        """Say Goodbye and end."""
        super().vanish()
        self.peer.leave("the worker was told to stop")

    def wake(self) -> None:
        """Let it take a turn soon, if it does not compute."""
        if self._busy_until is None:
            super().wake()

    def _make_hello(self) -> WorkerHello:
        is_loaded = self.world.now >= self._loaded_at
        facts = self.facts if is_loaded else None
        return WorkerHello(PROTOCOL_VERSION, DIGEST, self.boot_id, 2, facts=facts, num_held_rows=len(self._held))

    def _listen(self) -> None:
        if self.doom == "before receive" and self.peer.session_id and len(self.link):
            self._die()
            return
        try:
            for event in self.peer.step():
                self._on_event(event)
        except PeerRefused as error:
            self.refused = str(error)
            self.vanish()

    def _on_event(self, event: PeerEvent | FromScheduler) -> None:
        match event:
            case SessionBegan(_, welcome):
                if not isinstance(welcome, WorkerWelcome) or self.world.now < self._loaded_at:
                    raise Violation(f"a worker was welcomed with {welcome}")
                self.model = self._cache
                self._plans.clear()
                self.world.stats["worker sessions"] += 1
                self._report()
            case SessionEnded():
                self._remember()
                self.model = None
                self._plans.clear()
                self.world.stats["worker sessions ended"] += 1
            case StepPlan():
                if event.epoch != self.peer.session_id:
                    raise Violation(f"plan {event.step} of epoch {event.epoch:x} came in {self.peer.session_id}")
                self._plans.append(event)
            case Waiting():
                pass
            case _:
                raise Violation(f"a worker was sent {event}")

    def _remember(self) -> None:
        """Keep what the session leaves behind; a part of it, where all would be too much to tell."""
        if self._cache.num_steps:
            self._held = self._cache.report()
            if self.world.chance(0.1):
                self._held = [row for row in self._held if self.world.chance(0.5)]
        self._cache.forget(self._held)

    def _report(self) -> None:
        """Tell what is held, in one message or in several; now and then what cannot be true."""
        if not self._held:
            return
        rows, random = self._held, self.world.random
        self.world.stats["rows reported"] += len(rows)
        if self.world.chance(0.1):
            rows = spoil(rows, random)
            self.world.stats["reports that lie"] += 1
        cut = random.randint(0, len(rows))
        parts = [HeldRows(tuple(rows[:cut]), False), HeldRows(tuple(rows[cut:]), True)]
        for part in parts if self.world.chance(0.5) else [HeldRows(tuple(rows), True)]:
            self.peer.send(part)

    def _begin_step(self) -> None:
        if self.doom == "after receive":
            self._die()
            return
        compute_s = self.world.random.uniform(0.1, 1.0) * self._compute_s
        if self.hang_s:
            self.world.stats["worker hangs"] += 1
        self._busy_until = self.world.now + compute_s + self.hang_s
        self.hang_s = 0.0
        self.wake_at(self._busy_until)

    def _execute(self) -> None:
        plan = self._plans.popleft()
        if self.model is None:
            raise Violation("a plan without a session")
        result = self.model.execute(plan)
        self.world.num_steps += 1
        computed = [self.model.rows[row] for row in unpack_ints(plan.row)]
        if any(is_deadly(s.ids[: s.num_computed], s.sampling.seed, s.choice) for s in computed):
            self.world.stats["worker died of a request"] += 1
            self.vanish()
            return
        if self.doom == "after compute":
            self._die()
            return
        if not self.peer.send(result):
            self.world.stats["results not sent"] += 1
        if self.doom == "after reply":
            self._die()

    def _die(self) -> None:
        self.world.stats[f"worker died {self.doom}"] += 1
        self.vanish()


def spoil(rows: list[HeldRow], random: Random) -> list[HeldRow]:
    """Return rows one of which is not as the worker had it, which the scheduler can see."""
    at = random.randrange(len(rows))
    row = rows[at]
    others = [each for each in range(len(rows)) if rows[each].request != row.request]
    table = unpack_ints(row.block_table)
    if others and random.random() < 0.5:  # two rows under each other's names
        other = random.choice(others)
        spoiled = list(rows)
        spoiled[at] = replace(rows[other], request=row.request, choice=row.choice)
        spoiled[other] = replace(row, request=rows[other].request, choice=rows[other].choice)
        return spoiled
    lies: list[dict[str, Any]] = [
        {"block_table": pack_ints([*table[:-1], NULL_BLOCK])},
        {"block_table": pack_ints([*table, table[0]])},
        {"prompt_digest": bytes(32)},
        {"output_ids": pack_ints([VOCAB_SIZE]) + row.output_ids},
    ]
    return [*rows[:at], replace(row, **random.choice(lies)), *rows[at + 1 :]]

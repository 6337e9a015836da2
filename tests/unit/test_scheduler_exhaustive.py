"""Every interleaving of a small world: two requests, one worker, four blocks of two tokens.

States are explored breadth first and told apart by all that the future depends on. Each one passes `core.check()`, and
each one ends with solo outputs and everything free. Deeper than the tests go, to the last reachable state if it must be:
`python -m tests.unit.test_scheduler_exhaustive 100`.
"""

import sys
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

import pytest

from octavo.scheduler.pipeline import PlanRecord
from octavo.scheduler.roster import Worker
from octavo.scheduler.sequence import Request, Status
from octavo.scheduler.sequence import Sequence as Choice
from octavo.scheduler.simulate.model import FaultRule, make_facts
from octavo.wire.columns import unpack_ints
from octavo.wire.plan import StepPlan
from tests.support.core_driver import FRONTEND, Client, CoreDriver, make_config

Path = tuple[str, ...]


@dataclass(frozen=True)
class World:
    """Two requests, by name."""

    prompts: dict[str, list[int]]
    num_choices: dict[str, int]
    max_tokens: int
    fault_rule: FaultRule | None = None


def is_sick(ids: Sequence[int], seed: int, choice: int) -> bool:
    return seed == 0 and len(ids) >= 3


WORLDS = {
    "two choices": World({"A": [1, 2, 3], "B": [1, 2, 9]}, {"A": 2, "B": 1}, 3),
    "one prompt": World({"A": [1, 2, 3, 4, 5], "B": [1, 2, 3, 4, 5]}, {"A": 1, "B": 1}, 3),
    "a sick row": World({"A": [1, 2, 3, 4, 5], "B": [1, 2, 3, 4, 5]}, {"A": 1, "B": 1}, 3, is_sick),
}


class Play:
    """One run of a world, action by action."""

    def __init__(self, world: World) -> None:
        self.world = world
        facts = make_facts(
            num_blocks=5, block_size=2, vocab_size=50, max_model_len=8, max_num_seqs=3, max_num_batched_tokens=4
        )
        self.driver = CoreDriver(facts, make_config(max_preemptions=1), fault_rule=world.fault_rule)
        self.driver.worker_ready()
        self.clients: dict[str, Client] = {}
        self._name_of_number: dict[int, tuple[str, int]] = {}

    def actions(self) -> dict[str, Callable[[], object]]:
        """Return what can happen now."""
        driver = self.driver
        found: dict[str, Callable[[], object]] = {}
        for name in self.world.prompts:
            client = self.clients.get(name)
            if client is None:
                found[name] = lambda name=name: self._submit(name)  # type: ignore[misc]
            elif client.is_live:
                found[f"cancel {name}"] = lambda client=client: driver.cancel(client)  # type: ignore[misc]
                for choice in client.choices_left:
                    found[f"stop {name}/{choice}"] = lambda client=client, choice=choice: driver.stop_choice(  # type: ignore[misc]
                        client, choice
                    )
        if driver.sent:
            found["execute"] = driver.execute
        if driver.results:
            found["deliver"] = driver.deliver
        if driver.model is not None:
            found["die"] = driver.lose_worker
        else:
            found["back"] = driver.worker_ready
        return found

    def follow(self, path: Path) -> "Play":
        """Repeat what was checked before."""
        self.driver.checks = False
        for action in path:
            self.actions()[action]()
        self.driver.checks = True
        return self

    def _submit(self, name: str) -> None:
        world = self.world
        for choice in range(world.num_choices[name]):
            self._name_of_number[len(self._name_of_number) + 1] = (name, choice)
        self.clients[name] = self.driver.submit(
            world.prompts[name],
            world.max_tokens,
            num_choices=world.num_choices[name],
            seed="AB".index(name),
            is_faulty=world.fault_rule is not None and name == "A",
        )

    # What the future depends on

    def state(self) -> Hashable:
        """Return all of it, but for the names of blocks and the numbers of plans."""
        driver, worker = self.driver, self.driver.core._worker
        blocks = _Names()
        clients = tuple(self._client_state(name, worker, blocks) for name in self.world.prompts)
        order = tuple(self.clients)  # of arrival
        if worker is None:
            return (order, clients)
        planner = worker.planner
        done = worker.pipeline.num_completed
        free = blocks(planner.pool.free_blocks())
        index = planner.cache._index
        published = tuple(sorted((blocks.one(e.block), key) for key, e in index._entries.items()))
        stays = [(s, s.residency) for s in planner.batch]
        stays += [pair for r in worker.pipeline._records for pair in zip(r.sequences, r.residencies, strict=True)]
        names = {stay: (self._name_of_number[s.number], stay == s.residency) for s, stay in stays}
        publishers = tuple(sorted((blocks.one(b), names.get(n, ("", False))) for b, n in index._publishers.items()))
        rows = (
            tuple(self._name_of_number[s.number] for s in planner.batch),
            tuple(planner.batch._free),
            tuple(planner.batch._to_free),
        )
        records = tuple(self._record_state(record, done) for record in worker.pipeline._records)
        sent = tuple(_plan_state(plan, blocks) for plan in driver.sent)
        results = tuple((r.row, r.token, r.fault_row) for r in driver.results)
        return (
            order,
            clients,
            free,
            published,
            publishers,
            rows,
            records,
            sent,
            results,
            self._model_state(worker, blocks),
        )

    def _client_state(self, name: str, worker: Worker | None, blocks: "_Names") -> Hashable:
        client = self.clients.get(name)
        if client is None:
            return None
        received = tuple(len(self.driver.tokens(client, n)) for n in range(len(client.expected)))
        request = self.driver.core._requests.find(FRONTEND, client.handle)
        return (
            client.is_gone,
            tuple(client.choices_left),
            received,
            request and self._request_state(request, worker, blocks),
        )

    def _request_state(self, request: Request, worker: Worker | None, blocks: "_Names") -> Hashable:
        return (request.is_started, tuple(_sequence_state(s, worker, blocks) for s in request.sequences))

    def _record_state(self, record: PlanRecord, done: int) -> Hashable:
        drawn = list(zip(record.sequences, record.residencies, record.num_tokens, strict=True))
        entries = [*drawn, *record.chunks]
        return (record.step - done, len(drawn)), tuple(
            (self._name_of_number[s.number], s.status is not Status.FINISHED and residency == s.residency, num)
            for s, residency, num in entries
        )

    def _model_state(self, worker: Worker, blocks: "_Names") -> Hashable:
        model = self.driver.model
        assert model is not None
        rows = tuple(
            (row, m.request, m.choice, tuple(m.ids), m.num_computed, blocks(m.table)) for row, m in model.rows.items()
        )
        # What is in other blocks is gone when they are given out.
        read: set[int] = set(worker.planner.cache._index._keys)
        read.update(block for table in worker.planner.tables._tables.values() for block in table)
        read.update(block for m in model.rows.values() for block in m.table)
        read.update(block for plan in self.driver.sent for block in unpack_ints(plan.copy_src))
        contents = sorted((blocks.one(block), tuple(model._blocks[block])) for block in read)
        return (tuple(sorted(rows)), tuple(contents))


class _Names:
    """Blocks by the order in which they are met: which one it is makes no difference."""

    def __init__(self) -> None:
        self._names: dict[int, int] = {}

    def one(self, block: int) -> int:
        return self._names.setdefault(block, len(self._names))

    def __call__(self, blocks: Iterable[int]) -> tuple[int, ...]:
        return tuple(map(self.one, blocks))


def _sequence_state(s: Choice, worker: Worker | None, blocks: _Names) -> Hashable:
    if s.status is Status.FINISHED:
        return None
    counts = (s.num_known, s.num_expected, s.num_planned, s.num_confirmed, s.num_fast, s.num_blocks_sent, s.num_cached)
    flags = (s.status, s.row, s.num_preemptions, s.num_published, s.uses_cache, s.publishes, len(s.keys))
    if worker is None:
        return counts, flags
    done, tables = worker.pipeline.num_completed, worker.planner.tables
    pending = (max(0, s.newest_step - done), max(0, s.void_through - done))
    return counts, flags, pending, blocks(tables.table(s.number)), tables._reserved.get(s.number)


def _plan_state(plan: StepPlan, blocks: _Names) -> Hashable:
    return (
        (plan.row, plan.num_tokens, plan.flags, plan.new_rows, plan.copy_row, plan.append_row),
        (plan.fork_src, plan.fork_dst, plan.fork_choice, plan.freed_rows),
        tuple(blocks(unpack_ints(column)) for column in (plan.copy_src, plan.copy_dst, plan.append_block)),
    )


def explore(world: World, depth: int) -> list[int]:
    """Go through all states that so many actions reach; return how many are new at each depth."""
    start = Play(world)
    seen = {start.state()}
    ended: set[Hashable] = set()  # states that are known to come to a good end
    frontier: list[Path] = [()]
    sizes = [1]
    for _ in range(depth):
        reached: list[Path] = []
        for path in frontier:
            for action in Play(world).follow(path).actions():
                play = Play(world).follow(path)
                try:
                    play.actions()[action]()
                    state = play.state()
                    if state in seen:
                        continue
                    seen.add(state)
                    reached.append((*path, action))
                    end_well(play, ended)
                except Exception as error:
                    error.add_note(f"after {', '.join((*path, action))}")
                    raise
        if not reached:
            break
        frontier = reached
        sizes.append(len(frontier))
    return sizes


def end_well(play: Play, ended: set[Hashable]) -> None:
    """Let a state run to its end, or to where another one came along."""
    driver = play.driver
    passed: list[Hashable] = []
    if driver.model is None:
        driver.worker_ready()
    while (state := play.state()) not in ended:
        passed.append(state)
        if not (driver.deliver() or driver.execute()):
            driver.drain()
            break
        assert len(passed) < 100, "it does not end"
    ended.update(passed)


@pytest.mark.parametrize("name", sorted(WORLDS))
def test_every_interleaving_of_a_small_world_ends_well(name: str) -> None:
    sizes = explore(WORLDS[name], 8)
    assert len(sizes) == 9
    assert sizes[-1] > 200, "the world has become trivial"


def main() -> None:
    """Explore all worlds to the depth that is given."""
    depth = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    for name, world in WORLDS.items():
        began = time.monotonic()
        sizes = explore(world, depth)
        seconds = time.monotonic() - began
        sys.stdout.write(f"{name}: {sum(sizes)} states in {seconds:.0f} s, by depth: {sizes}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()

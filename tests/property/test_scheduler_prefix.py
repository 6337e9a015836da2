"""The prefix cache against a model: for each tenant, which run of tokens from position 0 on is in which block."""

from collections.abc import Iterable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from octavo.scheduler.blocks import BlockPool
from octavo.scheduler.cache import PrefixCache
from octavo.scheduler.intake import Intake
from octavo.scheduler.prefix import PrefixIndex
from octavo.scheduler.sequence import Sequence
from octavo.scheduler.tables import BlockTables
from octavo.wire.columns import unpack_ints
from octavo.wire.ids import BlockId, Row, SessionId
from octavo.wire.prefix import root_key
from tests.support.fake_frontend import make_submit

ROOTS = {name: root_key("digest", name) for name in ("a", "b")} | {"": b""}
Prefix = tuple[str, tuple[int, ...]]
"""A tenant and the tokens from position 0 to the end of a block."""


class PrefixMachine(RuleBasedStateMachine):
    """Sequences enter with what they find, compute, decode, leave; blocks are taken anew as the pool runs dry.

    The ids are few, so that prompts have common beginnings by themselves.
    """

    @initialize(num_blocks=st.integers(2, 40), block_size=st.sampled_from([1, 2, 4]))
    def start(self, num_blocks: int, block_size: int) -> None:
        self.size = block_size
        self.pool, self.index = BlockPool(num_blocks), PrefixIndex()
        self.tables = BlockTables(self.pool, self.index, block_size)
        self.cache = PrefixCache(self.index, self.pool, self.tables, block_size)
        self.intake = Intake(True)
        self.running: dict[Sequence, str] = {}  # with its tenant
        self.ended: dict[Sequence, str] = {}
        self.num_done: dict[Sequence, int] = {}  # blocks that have been published, or were there already
        self.content: dict[BlockId, list[int]] = {}
        self.found: dict[Prefix, tuple[BlockId, int]] = {}  # with the number of the publisher
        self.publisher: dict[BlockId, int] = {}  # of what a block holds, found or not

    # The model

    def prefix(self, s: Sequence, index: int) -> Prefix:
        tenant = self.running[s] if s in self.running else self.ended[s]
        return tenant, tuple(unpack_ints(s.token_ids())[: (index + 1) * self.size])

    def expected_hits(self, s: Sequence) -> list[BlockId]:
        hits: list[BlockId] = []
        for index in range((s.num_known - 1) // self.size):
            if self.prefix(s, index) not in self.found:
                break
            hits.append(self.found[self.prefix(s, index)][0])
        return hits

    def forget_blocks(self, blocks: Iterable[BlockId]) -> None:
        gone = set(blocks)
        self.publisher = {block: number for block, number in self.publisher.items() if block not in gone}
        self.found = {prefix: entry for prefix, entry in self.found.items() if entry[0] not in gone}

    def compute(self, s: Sequence, end: int) -> None:
        """Grow a table, write the tokens, publish, as a plan does."""
        begin = s.num_planned
        old = len(self.tables.table(s.number))
        self.tables.grow(s.number, end)
        table = self.tables.table(s.number)
        for block in table[old:]:
            self.content[block] = []
        self.forget_blocks(table[old:])
        ids = unpack_ints(s.token_ids())
        for position in range(begin, end):
            block = table[position // self.size]
            assert self.pool.count(block) == 1
            assert not self.index.has(block)
            self.content[block].append(ids[position])
        s.num_planned = s.num_confirmed = s.num_expected = end
        self.publish(s)

    def publish(self, s: Sequence) -> None:
        self.cache.begin_step()
        self.cache.publish(s, s.num_planned)
        if not s.publishes or not self.running[s]:
            return
        table = self.tables.table(s.number)
        for index in range(self.num_done.get(s, s.num_cached // self.size), s.num_planned // self.size):
            if self.found.setdefault(self.prefix(s, index), (table[index], s.number))[0] == table[index]:
                self.publisher[table[index]] = s.number
            self.num_done[s] = index + 1  # once: what is withdrawn later stays so

    def chained_on(self, prefixes: list[Prefix]) -> set[Prefix]:
        """Return of some prefixes and all that extends one of them, block by block, those that can be found."""
        reached = set(prefixes)
        for prefix in sorted(self.found, key=lambda prefix: len(prefix[1])):
            if (prefix[0], prefix[1][: -self.size]) in reached:
                reached.add(prefix)
        return reached & set(self.found)

    # What happens

    @rule(
        tenant=st.sampled_from(["a", "a", "b", ""]),
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=12),
        data=st.data(),
    )
    def enter(self, tenant: str, prompt: list[int], data: st.DataObject) -> None:
        message = make_submit(1, prompt, 50, prefix_root=ROOTS[tenant], block_size=self.size)
        (s,) = self.intake.make_request(SessionId(1), message, 0.0).sequences
        self.running[s] = tenant
        hits = self.cache.find(s)
        assert hits == self.expected_hits(s)
        for index, block in enumerate(hits):
            assert self.content[block] == prompt[index * self.size : (index + 1) * self.size]
        if self.tables.num_wanted(s.num_known, hits) > self.tables.num_available:
            del self.running[s]
            return
        s.take_row(Row(0), s.number)
        self.tables.begin(s.number, hits)
        s.num_cached = s.num_planned = s.num_confirmed = len(hits) * self.size
        s.num_published = len(hits)
        self.compute(s, data.draw(st.integers(s.num_planned + 1, s.num_known)))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), token=st.integers(0, 1), count=st.integers(1, 5))
    def go_on(self, data: st.DataObject, token: int, count: int) -> None:
        """The rest of a prompt, or generated tokens."""
        s = data.draw(st.sampled_from(list(self.running)))
        for _ in range(count):
            if not self.tables.can_grow(s.number, s.num_planned, s.num_planned + 1):
                return
            if s.num_planned == s.num_known:
                s.output_ids.append(token)
                s.num_known += 1
            self.compute(s, s.num_planned + 1)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        s = data.draw(st.sampled_from(list(self.running)))
        self.tables.release(s.number)
        self.ended[s] = self.running.pop(s)

    @precondition(lambda self: self.running or self.ended)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        """A sequence faults: what it found or computed is found no more; who holds what it computed is suspect."""
        s = data.draw(st.sampled_from([*self.running, *self.ended]))
        s.publishes = False
        prefixes = [self.prefix(s, index) for index in range(len(s.keys))]
        in_use = {block for other in self.running for block in self.tables.table(other.number)}
        computed = {block for block in in_use if self.publisher.get(block) == s.number}
        computed |= set(self.tables.table(s.number)[s.num_cached // self.size :])
        published = [p for p, (block, number) in self.found.items() if number == s.number or block in computed]
        expected = computed | {self.found[p][0] for p in self.chained_on(published)}
        assert self.cache.withdraw([(s, s.number)], [s]) == expected
        for prefix in self.chained_on([*prefixes, *published]):
            del self.found[prefix]

    @rule()
    def clear(self) -> None:
        assert self.cache.clear(self.running) == len(self.found)
        self.found.clear()

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "cache"):
            return
        assert len(self.cache) == len(self.found)
        assert {block for block, _ in self.found.values()} == set(self.index._keys)
        for (_, ids), (block, _) in self.found.items():
            assert tuple(self.content[block]) == ids[-self.size :]
        order = [self.index.has(block) for block in self.pool.free_blocks()]
        assert order == sorted(order), "what cannot be found is taken first"
        self.tables.check({s.number: s.num_planned for s in self.running})
        self.cache.check(self.running)


TestPrefix = PrefixMachine.TestCase
TestPrefix.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)

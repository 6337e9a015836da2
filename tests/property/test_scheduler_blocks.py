"""The block pool and the tables against a model too simple to be wrong: a list of free blocks and a table of counts."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from octavo.scheduler.blocks import BlockPool
from octavo.scheduler.errors import InvariantViolation, OutOfBlocks
from octavo.scheduler.tables import BlockTables
from octavo.wire.ids import NULL_BLOCK, BlockId


class PoolMachine(RuleBasedStateMachine):
    """Take, share and free in any order: the longest free block comes first."""

    @initialize(num_blocks=st.integers(2, 10))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.free = [BlockId(n) for n in range(1, num_blocks)]
        self.counts: Counter[BlockId] = Counter()

    @precondition(lambda self: self.free)
    @rule()
    def take(self) -> None:
        block = self.pool.take()
        assert block == self.free.pop(0)
        self.counts[block] = 1

    @precondition(lambda self: not self.free)
    @rule()
    def take_from_an_empty_pool(self) -> None:
        with pytest.raises(OutOfBlocks):
            self.pool.take()

    @precondition(lambda self: +self.counts)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(+self.counts)))
        self.pool.share(block)
        self.counts[block] += 1

    @precondition(lambda self: +self.counts)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(+self.counts)))
        self.pool.free(block)
        self.counts[block] -= 1
        if self.counts[block] == 0:
            self.free.append(block)

    @rule(data=st.data())
    def misuse(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from([NULL_BLOCK, *self.free]))
        for use in (self.pool.free, self.pool.share):
            with pytest.raises(InvariantViolation):
                use(block)

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "pool"):
            assert self.pool.free_blocks() == self.free
            assert self.pool.num_free == len(self.free)
            assert all(self.pool.count(block) == count for block, count in self.counts.items())
            self.pool.check(+self.counts)


class TablesMachine(RuleBasedStateMachine):
    """Growth, reservation and release: a promise of can_grow is kept, a reservation is nobody else's."""

    @initialize(num_blocks=st.integers(2, 16), block_size=st.sampled_from([1, 2, 4, 16]))
    def start(self, num_blocks: int, block_size: int) -> None:
        self.total, self.size = num_blocks - 1, block_size
        self.tables = BlockTables(BlockPool(num_blocks), block_size)
        self.tokens: dict[int, int] = {}
        self.promised: dict[int, int] = {}  # blocks in all
        self.next = 0

    def blocks(self, number: int) -> int:
        return -(-self.tokens[number] // self.size)

    def available(self) -> int:
        held = sum(max(self.blocks(n), self.promised.get(n, 0)) for n in self.tokens)
        return self.total - held

    @rule()
    def enter(self) -> None:
        self.tokens[self.next] = 0
        self.next += 1

    @rule(wanted=st.integers(0, 8))
    def enter_protected(self, wanted: int) -> None:
        if wanted <= self.available():
            self.tables.reserve(self.next, wanted)
            self.tokens[self.next], self.promised[self.next] = 0, wanted
            self.next += 1

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), more=st.integers(1, 40))
    def grow(self, data: st.DataObject, more: int) -> None:
        number = data.draw(st.sampled_from(sorted(self.tokens)))
        end = self.tokens[number] + more
        if number in self.promised:
            end = min(end, self.promised[number] * self.size)
        missing = -(-end // self.size) - self.blocks(number)
        can = number in self.promised or missing <= self.available()
        assert self.tables.can_grow(number, end) == can
        if can:
            self.tables.grow(number, end)
            self.tokens[number] = end

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.tokens)))
        self.tables.release(number)
        del self.tokens[number]
        self.promised.pop(number, None)

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "tables"):
            assert self.tables.num_available == self.available()
            assert all(self.tables.is_protected(n) == (n in self.promised) for n in self.tokens)
            self.tables.check(self.tokens)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestTables = TablesMachine.TestCase
TestTables.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_blocks_of_a_table_are_taken_again_last_first() -> None:
    pool = BlockPool(5)
    tables = BlockTables(pool, 1)
    tables.grow(1, 3)
    assert list(tables.table(1)) == [1, 2, 3]
    tables.release(1)
    assert pool.free_blocks() == [4, 3, 2, 1]


@pytest.mark.parametrize(
    ("references", "message"),
    [
        ({BlockId(2): 1}, "block 1 has count 1, 0 references"),
        ({BlockId(1): 2}, "block 1 has count 1, 2 references"),
        ({BlockId(1): 1, NULL_BLOCK: 1}, "block 0 has count 0, 1 references"),
    ],
)
def test_the_check_of_the_pool_can_fail(references: dict[BlockId, int], message: str) -> None:
    pool = BlockPool(3)
    pool.take()
    pool.check({BlockId(1): 1})
    with pytest.raises(InvariantViolation, match=message):
        pool.check(references)


def test_the_check_of_the_tables_can_fail() -> None:
    tables = BlockTables(BlockPool(5), 2)
    tables.grow(1, 3)
    tables.check({1: 3})
    with pytest.raises(InvariantViolation, match="2 blocks for 5 tokens"):
        tables.check({1: 5})
    with pytest.raises(InvariantViolation, match="hold blocks without a row"):
        tables.check({})

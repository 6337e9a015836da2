"""The block pool and the tables against models too simple to be wrong: a list of free blocks, and what each block holds."""

from collections import Counter
from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from octavo.scheduler.blocks import BlockPool
from octavo.scheduler.errors import InvariantViolation, OutOfBlocks
from octavo.scheduler.prefix import PrefixIndex
from octavo.scheduler.tables import BlockTables
from octavo.wire.ids import NULL_BLOCK, BlockId

ROOT = b"root"


def make_tables(num_blocks: int, block_size: int) -> tuple[BlockTables, BlockPool, PrefixIndex]:
    pool, index = BlockPool(num_blocks), PrefixIndex()
    return BlockTables(pool, index, block_size), pool, index


class PoolMachine(RuleBasedStateMachine):
    """Take, share, free and forget in any order. `free` is the order in which blocks must come."""

    @initialize(num_blocks=st.integers(2, 40))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.free = [BlockId(n) for n in range(1, num_blocks)]
        self.counts: Counter[BlockId] = Counter()
        self.findable: set[BlockId] = set()

    @precondition(lambda self: self.free)
    @rule()
    def take(self) -> None:
        block = self.pool.take()
        assert block == self.free.pop(0)
        self.findable.discard(block)
        self.counts[block] = 1

    @precondition(lambda self: not self.free)
    @rule()
    def take_from_an_empty_pool(self) -> None:
        with pytest.raises(OutOfBlocks):
            self.pool.take()

    @precondition(lambda self: +self.counts)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        self.findable.add(data.draw(st.sampled_from(sorted(+self.counts))))

    @precondition(lambda self: +self.counts or self.findable)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.findable | set(+self.counts))))
        self.pool.share(block)
        self.counts[block] += 1
        if block in self.free:
            self.free.remove(block)

    @precondition(lambda self: +self.counts)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(+self.counts)))
        self.pool.free(block, can_be_found=block in self.findable)
        self.counts[block] -= 1
        if self.counts[block] == 0:
            self.free.insert(len(self.free) if block in self.findable else 0, block)

    @precondition(lambda self: self.findable)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.findable)))
        self.findable.remove(block)
        self.pool.forget(block)
        if block in self.free:
            self.free.remove(block)
            self.free.insert(0, block)

    @rule(data=st.data())
    def misuse(self, data: st.DataObject) -> None:
        with pytest.raises(InvariantViolation):
            self.pool.free(data.draw(st.sampled_from([NULL_BLOCK, *self.free])))
        with pytest.raises(InvariantViolation):
            self.pool.share(NULL_BLOCK)
        self.pool.forget(NULL_BLOCK)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "pool"):
            return
        order = self.pool.free_blocks()
        assert order == self.free
        assert [block in self.findable for block in order] == sorted(block in self.findable for block in order)
        assert self.pool.num_free == len(self.free)
        assert all(self.pool.count(block) == held for block, held in self.counts.items())
        self.pool.check(+self.counts)


class TablesMachine(RuleBasedStateMachine):
    """Growth, forks, copies, hits, reservations and beams as a planner makes them, and what the blocks hold by then.

    Every token ever written is another number, so a table that names a wrong block reads something else.
    """

    @initialize(num_blocks=st.integers(2, 40), block_size=st.sampled_from([1, 2, 4, 16]))
    def start(self, num_blocks: int, block_size: int) -> None:
        self.total, self.size = num_blocks - 1, block_size
        self.tables, self.pool, self.index = make_tables(num_blocks, block_size)
        self.free = self.pool.free_blocks()
        self.tokens: dict[int, list[int]] = {}
        self.reserved: dict[int, int] = {}  # by number, of a group by that of its first beam
        self.groups: dict[int, set[int]] = {}  # beams that have tables, by the first beam's number
        self.content: dict[BlockId, list[int]] = {}
        self.published: set[BlockId] = set()
        self.pinned: list[BlockId] = []
        self.numbers, self.ids = count(), count()

    # The model

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.size)

    def available(self) -> int:
        return len(self.free) - sum(self.reserved.values())

    def holders(self, block: BlockId) -> list[int]:
        return [n for n in self.tokens if block in self.tables.table(n)]

    def account(self, number: int) -> int:
        """Return by whose number blocks are reserved for a sequence."""
        return next((first for first, beams in self.groups.items() if number in beams), number)

    def is_alone(self, number: int) -> bool:
        return self.account(number) not in self.groups

    def alone(self) -> list[int]:
        return [number for number in sorted(self.tokens) if self.is_alone(number)]

    def taken(self, block: BlockId) -> None:
        assert block == self.free.pop(0)
        self.published.discard(block)
        self.content[block] = []

    def given_back(self, block: BlockId) -> None:
        self.free.insert(len(self.free) if block in self.published else 0, block)

    # What happens

    @rule(num_tokens=st.integers(0, 40))
    def enter(self, num_tokens: int) -> None:
        number = next(self.numbers)
        self.tables.begin(number, [])
        self.tokens[number] = []
        if num_tokens:
            self.grow(number, num_tokens)

    @rule(wanted=st.integers(0, 8))
    def enter_protected(self, wanted: int) -> None:
        if wanted <= self.available():
            number = next(self.numbers)
            self.tables.begin(number, [], wanted)
            self.tokens[number], self.reserved[number] = [], wanted

    @precondition(lambda self: self.published)
    @rule(data=st.data(), more=st.integers(0, 3), is_protected=st.booleans())
    def enter_with_hits(self, data: st.DataObject, more: int, is_protected: bool) -> None:
        hits = data.draw(st.lists(st.sampled_from(sorted(self.published)), unique=True, min_size=1, max_size=5))
        wanted = self.tables.num_wanted(len(hits) + more, hits)
        assert wanted == more + sum(block in self.free for block in hits)
        if wanted > self.available():
            return
        number = next(self.numbers)
        self.tables.begin(number, hits, more if is_protected else None)
        self.tokens[number] = [token for block in hits for token in self.content[block]]
        self.free = [block for block in self.free if block not in hits]
        if is_protected:
            self.reserved[number] = more

    @precondition(lambda self: bool(set(self.alone()) - set(self.reserved)))
    @rule(data=st.data(), num_targets=st.integers(1, 3))
    def fork(self, data: st.DataObject, num_targets: int) -> None:
        source = data.draw(st.sampled_from(sorted(set(self.alone()) - set(self.reserved))))
        for target in [next(self.numbers) for _ in range(num_targets)]:
            self.tables.fork(source, target)
            self.tokens[target] = list(self.tokens[source])

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), most=st.sampled_from([1, 2, 40]))
    def plan(self, data: st.DataObject, most: int) -> None:
        """Some sequences grow in one plan: copies are read from when the plan is complete, so their sources stay."""
        numbers = st.permutations(sorted(self.tokens))
        for number in data.draw(numbers)[: data.draw(st.sampled_from([1, 3, 99]))]:
            self.grow(number, data.draw(st.integers(1, most)))
        self.unpin()

    def unpin(self) -> None:
        for block in self.pinned:
            if not self.holders(block) and block not in self.free:
                self.given_back(block)
        self.pinned.clear()
        self.tables.unpin()

    def grow(self, number: int, more: int) -> None:
        begin, account = len(self.tokens[number]), self.account(number)
        if account in self.reserved and self.is_alone(number):
            more = min(more, (self.blocks_for(begin) + self.reserved[number]) * self.size - begin)
        end = begin + more
        copies = begin % self.size > 0 and len(self.holders(self.tables.table(number)[-1])) > 1
        assert self.tables.must_copy(number, begin) == copies
        missing = self.blocks_for(end) - self.blocks_for(begin) + copies
        if account in self.reserved and missing > self.reserved[account]:
            return  # whatever a protected group can ever need is reserved for it
        assert self.tables.can_have(number, missing) == (
            missing <= max(self.reserved.get(account, 0), self.available())
        )
        can = missing <= 0 or missing <= max(self.reserved.get(account, 0), self.available())
        assert self.tables.can_grow(number, begin, end) == can
        if not can:
            return
        if copies:
            source, target = self.tables.copy_last(number)
            self.taken(target)
            self.content[target] = list(self.content[source])
            self.pinned.append(source)
        self.tables.grow(number, end)
        table = self.tables.table(number)
        assert len(table) == self.blocks_for(end)
        for block in table[self.blocks_for(begin) :]:
            self.taken(block)
        for position in range(begin, end):
            block, token = table[position // self.size], next(self.ids)
            assert self.holders(block) == [number]
            assert block not in self.published
            assert len(self.content[block]) == position % self.size
            self.content[block].append(token)
            self.tokens[number].append(token)
        if account in self.reserved:
            self.reserved[account] -= missing

    @precondition(lambda self: any(len(ids) >= self.size for ids in self.tokens.values()))
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        full = {b for n, ids in self.tokens.items() for b in self.tables.table(n)[: len(ids) // self.size]}
        block = data.draw(st.sampled_from(sorted(full)))
        if block not in self.published:
            self.index.publish(block, str(self.content[block]).encode(), ROOT, 1)
            self.published.add(block)

    @precondition(lambda self: self.published)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.published)))
        self.index.drop(block)
        self.pool.forget(block)
        self.published.remove(block)
        if block in self.free:
            self.free.remove(block)
            self.free.insert(0, block)

    @precondition(lambda self: self.alone())
    @rule(data=st.data())
    def begin_group(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(self.alone()))
        self.tables.begin_group(number)
        self.groups[number] = {number}

    @precondition(lambda self: self.groups)
    @rule(data=st.data(), most=st.integers(1, 5))
    def reseat(self, data: st.DataObject, most: int) -> None:
        """Some beams of a group leave, the others go on, and new ones begin from them, as far as there are blocks."""
        first = data.draw(st.sampled_from(sorted(self.groups)))
        beams = self.groups[first]
        stay = data.draw(st.lists(st.sampled_from(sorted(beams)), unique=True, min_size=1))
        for number in sorted(beams - set(stay)):
            self.leave(number)
        parents = data.draw(st.lists(st.sampled_from(stay), max_size=most))
        for parent, beam in zip(parents, self.numbers, strict=False):
            self.tables.fork(parent, beam)
            self.tokens[beam] = list(self.tokens[parent])
            beams.add(beam)
        for number in sorted(beams):
            self.grow(number, 1)
        self.unpin()

    @precondition(lambda self: self.groups)
    @rule(data=st.data())
    def end_group(self, data: st.DataObject) -> None:
        first = data.draw(st.sampled_from(sorted(self.groups)))
        for number in data.draw(st.permutations(sorted(self.groups[first]))):
            self.leave(number)
        self.tables.end_group(first)
        del self.groups[first]
        self.reserved.pop(first, None)

    @precondition(lambda self: self.alone())
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(self.alone()))
        self.leave(number)
        self.reserved.pop(number, None)

    def leave(self, number: int) -> None:
        freed = [b for b in reversed(self.tables.table(number)) if self.holders(b) == [number]]
        assert next(self.tables.gains([number], ())) == len(freed)
        self.tables.release(number)
        del self.tokens[number]
        if not self.is_alone(number):
            first = self.account(number)
            self.groups[first].remove(number)
            if first in self.reserved:
                self.reserved[first] += len(freed)
        for block in freed:
            self.given_back(block)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "tables"):
            return
        for number, ids in self.tokens.items():
            read = [token for block in self.tables.table(number) for token in self.content[block]]
            assert read == ids
            assert self.tables.is_protected(number) == (self.account(number) in self.reserved)
        assert self.pool.free_blocks() == self.free, "what can be found is taken last, least recently used first"
        assert self.tables.num_available == self.available()
        assert len(self.index) == len(self.published)
        self.tables.check({number: len(ids) for number, ids in self.tokens.items()})


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestTables = TablesMachine.TestCase
TestTables.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_blocks_of_a_table_are_taken_again_first_first_unless_they_can_be_found() -> None:
    tables, pool, index = make_tables(6, 1)
    tables.begin(1, [])
    tables.grow(1, 3)
    assert list(tables.table(1)) == [1, 2, 3]
    tables.release(1)
    assert pool.free_blocks() == [1, 2, 3, 4, 5]
    tables.begin(2, [])
    tables.grow(2, 3)
    for block in tables.table(2):
        index.publish(block, bytes([block]), ROOT, 2)
    tables.release(2)
    assert pool.free_blocks() == [4, 5, 3, 2, 1], "leaves before parents"


def test_four_sharers_of_a_block_make_three_copies_in_one_plan() -> None:
    tables, pool, _ = make_tables(10, 4)
    tables.begin(0, [])
    tables.grow(0, 6)
    for sharer in (1, 2, 3):
        tables.fork(0, sharer)
    copies = [tables.copy_last(n) for n in range(4) if tables.must_copy(n, 6)]
    assert copies == [(2, 3), (2, 4), (2, 5)], "the last one that names it writes where it is"
    assert pool.count(BlockId(2)) == 4, "nobody can take it for a target within this plan"
    tables.unpin()
    assert pool.count(BlockId(2)) == 1
    tables.check(dict.fromkeys(range(4), 6))


def test_a_source_that_nobody_names_any_more_is_free_after_the_plan() -> None:
    tables, pool, _ = make_tables(4, 4)
    tables.begin(0, [])
    tables.grow(0, 2)
    tables.fork(0, 1)
    assert tables.copy_last(0) == (1, 2)
    tables.release(1)
    assert pool.free_blocks() == [3]
    tables.unpin()
    assert pool.free_blocks() == [1, 3]


def test_a_partial_block_that_can_be_found_is_copied_too() -> None:
    tables, _, index = make_tables(4, 4)
    tables.begin(0, [])
    tables.grow(0, 2)
    assert not tables.must_copy(0, 2)
    index.publish(BlockId(1), b"key", ROOT, 0)
    assert tables.must_copy(0, 2)
    assert not tables.must_copy(0, 4), "the next block is a new one"


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
    tables, _, _ = make_tables(5, 2)
    tables.begin(1, [])
    tables.grow(1, 3)
    tables.check({1: 3})
    with pytest.raises(InvariantViolation, match="2 blocks for 5 tokens"):
        tables.check({1: 5})
    with pytest.raises(InvariantViolation, match="hold blocks or run, but not both"):
        tables.check({})
    tables.fork(1, 2)
    tables.copy_last(2)
    with pytest.raises(InvariantViolation, match=r"has count 2, 1 references"):
        tables.check({1: 3, 2: 3})

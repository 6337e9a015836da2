"""What a worker's rows leave behind at the end of a session, and how the next one may go on from it."""

import pytest
import torch

from octavo.wire.columns import pack_ints, unpack_ints
from octavo.wire.held_rows import HeldRow, prompt_digest
from octavo.wire.plan import FLAG_SAMPLE, NewRow, RowSampling
from octavo.worker import held
from octavo.worker.errors import PlanError
from octavo.worker.rows import Rows
from tests.unit.test_worker_sharing import LIMITS, plan

SAMPLING = RowSampling(seed=1)
IDS = [1, 2, 3, 4, 5, 6]


def new_row(row: int, ids: list[int], num_computed: int = 0, num_prompt: int = 6) -> NewRow:
    return NewRow(row, "f-1", 0, num_prompt, num_computed, pack_ints(ids), SAMPLING)


@pytest.fixture
def rows() -> Rows:
    """Rows one of which has drawn: six tokens of a prompt in blocks 7 and 3, and one more id."""
    rows = Rows(LIMITS, torch.device("cpu"))
    rows.apply(plan(new=(new_row(2, IDS),), append=[(2, 7), (2, 3)]))
    rows.batch(plan({2: (6, FLAG_SAMPLE)}))
    rows.store(2, 40)
    return rows


def test_a_row_is_told_with_what_it_has_drawn(rows: Rows) -> None:
    expected = HeldRow("f-1", 0, 6, prompt_digest(pack_ints(IDS)), pack_ints([40]), 6, pack_ints([7, 3]))
    assert rows.hold() == [expected]
    assert len(rows) == 0


@pytest.mark.parametrize("num_computed", [6, 5, 4, 3])
def test_a_row_goes_on_where_it_was_or_before(rows: Rows, num_computed: int) -> None:
    rows.hold()
    table = [7, 3] if num_computed > 4 else [7]
    fresh = [9] if num_computed <= 4 else []
    rows.apply(plan(new=(new_row(0, [*IDS, 40], num_computed),), append=[(0, block) for block in table + fresh]))
    planned = rows.batch(plan({0: (7 - num_computed, FLAG_SAMPLE)}))
    assert planned.batch.seq_lens.tolist() == [7]
    assert planned.batch.input_ids.tolist() == [*IDS, 40][num_computed:]


@pytest.mark.parametrize(
    ("new", "append", "message"),
    [
        (new_row(0, [1, 2, 3, 4, 9, 6, 40], 6), [7, 3], "begins with 6 computed tokens that are not those of f-1"),
        (new_row(0, [1, 9, 3, 4, 5, 6, 40], 4), [7, 9], "begins with 4 computed tokens that are not those of f-1"),
        (new_row(0, [*IDS, 40, 41], 7), [7, 3], "begins with 3 tokens of block 3, which has 2"),
        (new_row(0, [*IDS, 40], 6), [7, 9], "begins within block 9, which nobody has left"),
        (new_row(0, [*IDS, 40], 6), [3, 7], "has block 3 at place 0 of its table, where f-1 had another"),
        (new_row(0, [*IDS, 40], 6), [7], "begins with 6 computed tokens and 1 blocks of 4"),
    ],
)
def test_what_is_not_there_is_refused(rows: Rows, new: NewRow, append: list[int], message: str) -> None:
    rows.hold()
    with pytest.raises(PlanError, match=message):
        rows.apply(plan(new=(new,), append=[(0, block) for block in append]))


def test_a_block_that_was_given_out_is_nobodys_any_more(rows: Rows) -> None:
    rows.hold()
    rows.apply(plan(new=(new_row(1, [8, 8], num_prompt=2),), append=[(1, 3)]))
    rows.batch(plan({1: (2, FLAG_SAMPLE)}))
    rows.apply(plan(freed=[1]))
    with pytest.raises(PlanError, match="begins within block 3, which nobody has left"):
        rows.apply(plan(new=(new_row(0, [*IDS, 40], 6),), append=[(0, 7), (0, 3)]))


def test_a_block_within_which_a_row_goes_on_is_its_own(rows: Rows) -> None:
    rows.hold()
    adopting = (new_row(0, [*IDS, 40], 6), new_row(1, [*IDS, 40], 6))
    with pytest.raises(PlanError, match="block 3 is given to row 1, but 1 tables name it"):
        rows.apply(plan(new=adopting, append=[(0, 7), (0, 3), (1, 7), (1, 3)]))


def test_what_is_broken_or_unfinished_is_not_told(rows: Rows) -> None:
    telling = NewRow(1, "f-2", 0, 6, 0, pack_ints(IDS), RowSampling(seed=1, prompt_logprobs=0), first_prompt_logprob=1)
    beam = NewRow(3, "f-3", 0, 2, 0, pack_ints([5, 6]), SAMPLING)
    rows.apply(plan(new=(telling, beam), append=[(1, 10), (3, 11)]))
    rows.batch(plan({1: (4, 0), 3: (2, FLAG_SAMPLE)}))
    rows.store(3, 7)
    rows.apply(plan(beam=[(3, 3, 9)]))
    rows.lose(2)
    assert rows.hold() == []


def test_forked_rows_share_blocks_and_differ_in_output(rows: Rows) -> None:
    rows.apply(plan(append=[]))
    rows.batch(plan({2: (1, FLAG_SAMPLE)}, fork=[(2, 0, 1)]))
    rows.store(2, 41)
    rows.store(0, 42)
    told = rows.hold()
    assert [(row.choice, list(unpack_ints(row.output_ids)), row.num_computed_tokens) for row in told] == [
        (0, [40, 41], 7),
        (1, [40, 42], 7),
    ]
    assert told[0].block_table == told[1].block_table


def test_a_report_is_bounded(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    rows.apply(plan(new=(NewRow(0, "f-2", 0, 2, 0, pack_ints([5, 6]), SAMPLING),), append=[(0, 11)]))
    rows.batch(plan({0: (2, FLAG_SAMPLE)}))
    rows.store(0, 7)
    monkeypatch.setattr(held, "MAX_REPORT_BYTES", 600)
    assert [row.request for row in rows.hold()] == ["f-1"]
    with pytest.raises(PlanError, match="nobody has left"):
        rows.apply(plan(new=(NewRow(0, "f-2", 0, 2, 2, pack_ints([5, 6, 7]), SAMPLING),), append=[(0, 11)]))

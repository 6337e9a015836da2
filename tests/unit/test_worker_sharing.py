"""Rows that share blocks: cache hits, copies and forks in the tables, and a PlanError for every way to do it wrong."""

from typing import Any

import msgspec
import pytest
import torch

from octavo.wire.columns import pack_ints
from octavo.wire.plan import FLAG_SAMPLE, NewRow, RowSampling, StepPlan
from octavo.worker.errors import PlanError
from octavo.worker.mirror import RowLimits
from octavo.worker.rows import PlannedBatch, Rows

LIMITS = RowLimits(
    max_num_seqs=4, max_model_len=24, max_num_batched_tokens=32, block_size=4, num_blocks=20, vocab_size=50
)


def new_row(row: int, num_ids: int, num_computed: int = 0) -> NewRow:
    return NewRow(row, "r", row, num_ids, num_computed, pack_ints(range(num_ids)), RowSampling(seed=1))


def plan(
    counts: dict[int, tuple[int, int]] | None = None,
    new: tuple[NewRow, ...] = (),
    append: list[tuple[int, int]] | None = None,
    copy: list[tuple[int, int, int]] | None = None,
    fork: list[tuple[int, int, int]] | None = None,
    freed: list[int] | None = None,
    beam: list[tuple[int, int, int]] | None = None,
) -> StepPlan:
    """Take columns as tuples; `counts`: row -> tokens, flags."""

    def column(rows: list[Any] | None, place: int) -> bytes:
        return pack_ints(row[place] for row in rows or [])

    items = list((counts or {}).items())
    return StepPlan(
        epoch=1,
        step=1,
        row=pack_ints(row for row, _ in items),
        num_tokens=pack_ints(count for _, (count, _) in items),
        flags=pack_ints(flags for _, (_, flags) in items),
        new_rows=new,
        copy_row=column(copy, 0),
        copy_src=column(copy, 1),
        copy_dst=column(copy, 2),
        append_row=column(append, 0),
        append_block=column(append, 1),
        fork_src=column(fork, 0),
        fork_dst=column(fork, 1),
        fork_choice=column(fork, 2),
        freed_rows=pack_ints(freed or []),
        beam_row=column(beam, 0),
        beam_src=column(beam, 1),
        beam_token=column(beam, 2),
    )


def run(rows: Rows, step: StepPlan) -> PlannedBatch:
    """Apply a plan; every row that samples draws 40 and its own number."""
    rows.apply(step)
    planned = rows.batch(step)
    for row in planned.sampling_rows:
        rows.store(row, 40 + row)
    return planned


@pytest.fixture
def rows() -> Rows:
    """Row 0: 9 ids and the blocks 7, 3 and 5, all computed, and a sampled id."""
    rows = Rows(LIMITS, torch.device("cpu"))
    run(rows, plan({0: (9, FLAG_SAMPLE)}, (new_row(0, 9),), [(0, 7), (0, 3), (0, 5)]))
    return rows


FORKED = plan({0: (1, FLAG_SAMPLE)}, fork=[(0, 1, 5), (0, 3, 6)])
"""Rows 1 and 3 from row 0, with 10 tokens computed and 11 known, within block 5."""


def test_a_row_begins_behind_its_cached_blocks(rows: Rows) -> None:
    planned = run(rows, plan({1: (3, FLAG_SAMPLE)}, (new_row(1, 11, 8),), [(1, 7), (1, 3), (1, 9)]))
    batch = planned.batch
    assert batch.positions.tolist() == [8, 9, 10]
    assert batch.slot_mapping.tolist() == [36, 37, 38]
    assert batch.block_tables.tolist() == [[7, 3, 9]]
    assert batch.seq_lens.tolist() == [11]
    assert rows.state(0).table == [7, 3, 5]


def test_cached_blocks_outlive_their_row(rows: Rows) -> None:
    planned = run(rows, plan({1: (1, FLAG_SAMPLE)}, (new_row(1, 9, 8),), [(1, 7), (1, 3), (1, 5)], freed=[0]))
    assert planned.batch.slot_mapping.tolist() == [20]


def test_a_cached_block_may_be_filled_by_the_plan_that_hits_it(rows: Rows) -> None:
    appended = [(1, 9), (1, 10), (2, 9), (2, 10), (2, 11)]
    planned = run(rows, plan({1: (8, FLAG_SAMPLE), 2: (1, FLAG_SAMPLE)}, (new_row(1, 8), new_row(2, 9, 8)), appended))
    assert planned.batch.slot_mapping.tolist() == [*range(36, 44), 44]


def test_a_block_begun_earlier_may_be_filled_and_hit(rows: Rows) -> None:
    run(rows, plan({1: (6, 0)}, (new_row(1, 9),), [(1, 9), (1, 10)]))
    appended = [(1, 12), (2, 9), (2, 10), (2, 11)]
    run(rows, plan({1: (3, FLAG_SAMPLE), 2: (1, FLAG_SAMPLE)}, (new_row(2, 9, 8),), appended))
    # Both go on behind what they share.
    run(rows, plan({1: (1, FLAG_SAMPLE), 2: (1, FLAG_SAMPLE)}))


def test_forks_take_ids_table_and_counts_from_before_the_new_id(rows: Rows) -> None:
    planned = run(rows, FORKED)
    assert planned.sampling_rows == [0, 1, 3]
    assert planned.logits_of is not None
    assert planned.logits_of.tolist() == [0, 0, 0]
    for row, choice in ((0, 0), (1, 5), (3, 6)):
        state = rows.state(row)
        assert rows.known_ids(row).tolist() == [*range(9), 40, 40 + row]
        assert (state.request, state.num_prompt, state.num_known, state.num_computed) == ("r", 9, 11, 10)
        assert (state.table, state.choice) == ([7, 3, 5], choice)


def test_beams_go_on_with_chosen_ids_from_what_was_there_before_the_plan(rows: Rows) -> None:
    counts = dict.fromkeys((0, 1, 3), (1, FLAG_SAMPLE))
    copies = [(1, 5, 9), (3, 5, 10)]
    planned = run(rows, plan(counts, copy=copies, beam=[(1, 0, 20), (0, 0, 21), (3, 0, 22)]))
    assert planned.batch.input_ids.tolist() == [21, 20, 22]
    assert planned.batch.slot_mapping.tolist() == [5 * 4 + 1, 9 * 4 + 1, 10 * 4 + 1]
    assert planned.logits_of is None
    for row, token, last in ((0, 21, 5), (1, 20, 9), (3, 22, 10)):
        state = rows.state(row)
        assert rows.known_ids(row).tolist() == [*range(9), token, 40 + row]
        assert (state.num_prompt, state.num_known, state.num_computed) == (9, 11, 10)
        assert state.table == [7, 3, last]


def test_a_row_freed_by_the_plan_can_be_a_beam(rows: Rows) -> None:
    run(rows, plan({1: (2, FLAG_SAMPLE)}, (new_row(1, 2),), [(1, 9)]))
    run(rows, plan({0: (1, FLAG_SAMPLE)}, copy=[(0, 5, 9)], freed=[1], beam=[(0, 0, 8), (1, 0, 7)]))
    assert rows.known_ids(1).tolist() == [*range(9), 7]
    assert rows.state(1).table == [7, 3, 5]


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (plan(beam=[(1, 2, 7)]), "row 2 is not live"),
        (plan(beam=[(4, 0, 7)]), "row 4, limit 4"),
        (plan(beam=[(0, 0, 50)]), r"row 0 goes on with id 50, outside of \[0, 50\)"),
        (plan(beam=[(0, 0, -1)]), r"row 0 goes on with id -1, outside of \[0, 50\)"),
        (plan(new=(new_row(1, 3),), beam=[(2, 1, 7)]), "row 1 is not live"),
        (plan(new=(new_row(1, 3),), beam=[(0, 0, 7), (1, 0, 7)]), "row 1 is live and cannot begin anew"),
    ],
)
def test_beams_that_are_refused(rows: Rows, step: StepPlan, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        rows.apply(step)


def test_a_beam_goes_on_from_an_id_that_was_drawn(rows: Rows) -> None:
    run(rows, plan({1: (2, 0)}, (new_row(1, 3),), [(1, 9)]))
    with pytest.raises(
        PlanError, match="row 2 goes on from row 1, whose newest of 3 ids was not drawn, or is computed"
    ):
        rows.apply(plan(beam=[(2, 1, 7)]))


def test_a_live_row_is_no_beam_of_another_one(rows: Rows) -> None:
    run(rows, plan({1: (3, FLAG_SAMPLE)}, (new_row(1, 3),), [(1, 9)]))
    with pytest.raises(PlanError, match="row 1 is live and cannot begin anew"):
        rows.apply(plan(beam=[(1, 0, 7)]))


def test_a_beam_that_does_not_copy_what_it_shares_is_refused(rows: Rows) -> None:
    step = plan({0: (1, FLAG_SAMPLE), 1: (1, FLAG_SAMPLE)}, copy=[], beam=[(0, 0, 8), (1, 0, 7)])
    rows.apply(step)
    with pytest.raises(PlanError, match="row 0 writes to block 5, which 1 other rows read"):
        rows.batch(step)


def test_each_fork_takes_the_logits_of_its_source(rows: Rows) -> None:
    counts = {1: (2, FLAG_SAMPLE), 0: (1, FLAG_SAMPLE)}
    planned = run(rows, plan(counts, (new_row(1, 2),), [(1, 9)], fork=[(0, 2, 1), (1, 3, 1)]))
    assert planned.sampling_rows == [1, 0, 2, 3]
    assert planned.logits_of is not None
    assert planned.logits_of.tolist() == [0, 1, 1, 0]
    assert planned.batch.logits_index is not None
    assert planned.batch.logits_index.tolist() == [1, 2]


def test_without_forks_logits_stay_where_they_are(rows: Rows) -> None:
    assert run(rows, plan({0: (1, FLAG_SAMPLE)})).logits_of is None


def test_a_row_freed_by_the_plan_can_be_forked_into(rows: Rows) -> None:
    run(rows, plan({1: (2, FLAG_SAMPLE)}, (new_row(1, 2),), [(1, 9)]))
    run(rows, plan({0: (1, FLAG_SAMPLE)}, fork=[(0, 1, 1)], freed=[1]))
    assert rows.state(1).table == [7, 3, 5]


def test_forked_tables_grow_apart(rows: Rows) -> None:
    run(rows, FORKED)
    step = plan(dict.fromkeys((0, 1, 3), (1, FLAG_SAMPLE)), copy=[(0, 5, 10), (3, 5, 11)])
    assert rows.apply(step) == [(5, 10), (5, 11)]
    batch = rows.batch(step).batch
    assert batch.block_tables.tolist() == [[7, 3, 10], [7, 3, 5], [7, 3, 11]]
    assert batch.slot_mapping.tolist() == [42, 22, 46]
    assert batch.input_ids.tolist() == [40, 41, 43]


def test_a_copied_block_can_be_taken_by_the_plan_that_copies_it(rows: Rows) -> None:
    step = plan({0: (1, FLAG_SAMPLE), 1: (2, FLAG_SAMPLE)}, (new_row(1, 2),), [(1, 5)], copy=[(0, 5, 10)])
    assert rows.apply(step) == [(5, 10)]
    assert rows.batch(step).batch.slot_mapping.tolist() == [41, 20, 21]


def test_a_copy_holds_as_much_as_the_original(rows: Rows) -> None:
    run(rows, plan({1: (12, 0)}, (new_row(1, 13),), [(1, 9), (1, 10), (1, 11)]))
    step = plan({2: (1, FLAG_SAMPLE)}, (new_row(2, 13, 12),), [(2, 9), (2, 10), (2, 12), (2, 13)], copy=[(1, 11, 12)])
    assert run(rows, step).batch.block_tables.tolist() == [[9, 10, 12, 13]]


def test_blocks_of_forks_are_free_when_all_have_ended(rows: Rows) -> None:
    run(rows, FORKED)
    run(rows, plan(freed=[0, 3]))
    with pytest.raises(PlanError, match="block 7 is given to row 2, but 1 tables name it"):
        rows.apply(plan(new=(new_row(2, 4),), append=[(2, 7)]))
    run(rows, plan({2: (4, FLAG_SAMPLE)}, (new_row(2, 4),), [(2, 7)], freed=[1, 2]))


def test_a_new_session_knows_nothing_of_the_blocks(rows: Rows) -> None:
    rows.clear()
    with pytest.raises(PlanError, match="row 1 begins with block 7, which has 0 of 4 tokens"):
        run(rows, plan({1: (1, FLAG_SAMPLE)}, (new_row(1, 9, 8),), [(1, 7), (1, 3), (1, 5)]))
    rows.clear()
    run(rows, plan({0: (9, FLAG_SAMPLE)}, (new_row(0, 9),), [(0, 7), (0, 3), (0, 5)]))


@pytest.mark.parametrize(
    ("new", "append", "message"),
    [
        (new_row(1, 9, 7), [(1, 7), (1, 3)], "row 1 begins within block 3, which nobody has left"),
        (new_row(1, 8, 8), [(1, 7), (1, 3)], "row 1: 8 tokens, 8 of the prompt, 8 computed"),
        (new_row(1, 9, 12), [(1, 7), (1, 3), (1, 5)], "row 1: 9 tokens, 9 of the prompt, 12 computed"),
        (new_row(1, 9, 8), [(1, 7)], "row 1 begins with 8 computed tokens and 1 blocks of 4"),
        (new_row(1, 9, 8), [], "row 1 begins with 8 computed tokens and 0 blocks of 4"),
        (new_row(1, 9, 8), [(1, 7), (1, 7)], r"row 1 begins with a block twice: \[7, 7\]"),
        (new_row(1, 9, 8), [(1, 7), (1, 0)], r"block 0 for row 1 is outside of \[1, 20\)"),
        (new_row(1, 9, 8), [(1, 7), (1, 20)], r"block 20 for row 1 is outside of \[1, 20\)"),
        (new_row(1, 9, 8), [(1, 7), (1, 3), (1, 5)], "block 5 is given to row 1, but 1 tables name it"),
    ],
)
def test_hits_that_are_refused(rows: Rows, new: NewRow, append: list[tuple[int, int]], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        rows.apply(plan(new=(new,), append=append))


@pytest.mark.parametrize(("block", "num_written"), [(5, 1), (9, 0)], ids=["filled in part", "never written"])
def test_a_hit_must_be_written_in_full(rows: Rows, block: int, num_written: int) -> None:
    step = plan({1: (1, FLAG_SAMPLE)}, (new_row(1, 9, 8),), [(1, 7), (1, block), (1, 10)])
    with pytest.raises(PlanError, match=f"row 1 begins with block {block}, which has {num_written} of 4 tokens"):
        run(rows, step)


def test_a_hit_on_a_block_that_was_given_away_is_refused(rows: Rows) -> None:
    run(rows, plan({2: (2, FLAG_SAMPLE)}, (new_row(2, 2),), [(2, 7)], freed=[0]))
    with pytest.raises(PlanError, match="row 1 begins with block 7, which has 2 of 4 tokens"):
        run(rows, plan({1: (1, FLAG_SAMPLE)}, (new_row(1, 9, 8),), [(1, 7), (1, 3), (1, 10)]))


@pytest.mark.parametrize(
    ("copies", "message"),
    [
        ([(2, 5, 9)], "row 2 is not live"),
        ([(-1, 5, 9)], "row -1 is not live"),
        ([(0, 3, 9)], r"block 3 of row 0 is copied, but its last of 3 is \[5\]"),
        ([(0, 20, 9)], r"block 20 of row 0 is copied, but its last of 3 is \[5\]"),
        ([(1, 5, 9)], r"block 5 of row 1 is copied, but its last of 0 is \[\]"),
        ([(0, 5, 0)], r"block 0 for row 0 is outside of \[1, 20\)"),
        ([(0, 5, 20)], r"block 20 for row 0 is outside of \[1, 20\)"),
        ([(0, 5, -1)], r"block -1 for row 0 is outside of \[1, 20\)"),
        ([(0, 5, 7)], "block 7 is given to row 0, but 1 tables name it"),
        ([(0, 5, 9), (0, 5, 10)], r"block 5 of row 0 is copied, but its last of 3 is \[9\]"),
    ],
)
def test_copies_that_are_refused(rows: Rows, copies: list[tuple[int, int, int]], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        rows.apply(plan(new=(new_row(1, 4),), copy=copies))


@pytest.mark.parametrize(
    ("forks", "message"),
    [
        ([(2, 3, 1)], "row 2 is forked into row 3 and does not sample"),
        ([(1, 3, 1)], "row 1 is forked into row 3 and does not sample"),
        ([(-1, 3, 1)], "row -1 is forked into row 3 and does not sample"),
        ([(0, 0, 1)], "row 0 is live and cannot begin anew"),
        ([(0, 1, 1)], "row 1 is live and cannot begin anew"),
        ([(0, 2, 1), (0, 2, 2)], "row 2 is live and cannot begin anew"),
        ([(0, 4, 1)], "row 4, limit 4"),
        ([(0, -1, 1)], "row -1, limit 4"),
        ([(0, 2, -1)], "row 0 is forked into row 2 as choice -1"),
    ],
)
def test_forks_that_are_refused(rows: Rows, forks: list[tuple[int, int, int]], message: str) -> None:
    counts = {0: (1, FLAG_SAMPLE), 1: (2, 0)}
    with pytest.raises(PlanError, match=message):
        run(rows, plan(counts, (new_row(1, 4),), [(1, 9)], fork=forks))


def test_a_shared_block_is_not_written(rows: Rows) -> None:
    run(rows, FORKED)
    step = plan({0: (1, FLAG_SAMPLE), 1: (1, FLAG_SAMPLE)}, copy=[(0, 5, 9)])
    with pytest.raises(PlanError, match="row 1 writes to block 5, which 1 other rows read"):
        run(rows, step)


def test_a_hit_of_an_earlier_plan_is_not_written(rows: Rows) -> None:
    """Only a worker whose counts were damaged could be told so; the check does not depend on how it came about."""
    run(rows, plan({1: (1, FLAG_SAMPLE)}, (new_row(1, 9, 8),), [(1, 7), (1, 3), (1, 9)]))
    rows.state(0).num_computed = 7
    rows.state(0).num_known = 8
    with pytest.raises(PlanError, match="row 0 writes to block 3, which 1 other rows read"):
        run(rows, plan({0: (1, FLAG_SAMPLE)}))


def test_a_plan_that_samples_nothing_cannot_fork(rows: Rows) -> None:
    with pytest.raises(PlanError, match="row 0 is forked into row 1 and does not sample"):
        run(rows, msgspec.structs.replace(FORKED, row=b"", num_tokens=b"", flags=b""))

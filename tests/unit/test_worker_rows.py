"""The rows: deltas in their order, and a PlanError that names the value for every contradiction."""

from typing import Any

import msgspec
import pytest
import torch

from octavo.wire.columns import pack_floats, pack_ints
from octavo.wire.plan import FLAG_SAMPLE, NewRow, RowSampling, StepPlan
from octavo.worker.errors import PlanError
from octavo.worker.mirror import RowLimits
from octavo.worker.models.interface import Batch
from octavo.worker.rows import Rows

LIMITS = RowLimits(
    max_num_seqs=3, max_model_len=10, max_num_batched_tokens=12, block_size=4, num_blocks=20, vocab_size=50
)
SAMPLING = RowSampling(seed=1)


def new_row(row: int = 0, ids: object = (1, 2, 3, 4, 5), **changes: Any) -> NewRow:
    values: list[int] = list(ids)  # type: ignore[call-overload]
    fields: dict[str, Any] = {
        "row": row,
        "request": "r",
        "choice": 0,
        "num_prompt_tokens": len(values),
        "num_computed_tokens": 0,
        "token_ids": pack_ints(values),
        "sampling": SAMPLING,
    }
    return NewRow(**(fields | changes))


def plan(counts: dict[int, tuple[int, int]] | None = None, **columns: Any) -> StepPlan:
    """`counts`: row -> tokens, flags."""
    counts = counts or {}
    packed: dict[str, Any] = {
        name: pack_ints(value) if name != "new_rows" else value for name, value in columns.items()
    }
    return StepPlan(
        epoch=1,
        step=1,
        row=pack_ints(counts),
        num_tokens=pack_ints(n for n, _ in counts.values()),
        flags=pack_ints(flags for _, flags in counts.values()),
        **packed,
    )


def run(rows: Rows, step: StepPlan) -> Batch:
    rows.apply(step)
    return rows.batch(step).batch


@pytest.fixture
def rows() -> Rows:
    """Row 0 with 5 known ids and blocks 7 and 3, of which nothing is computed."""
    rows = Rows(LIMITS, torch.device("cpu"))
    rows.apply(plan(new_rows=(new_row(),), append_row=[0, 0], append_block=[7, 3]))
    return rows


def test_a_mixed_batch_is_laid_out_row_by_row(rows: Rows) -> None:
    run(rows, plan({0: (5, FLAG_SAMPLE)}))
    rows.store(0, 40)
    step = plan(
        {2: (3, 0), 0: (1, FLAG_SAMPLE)},
        new_rows=(new_row(2, [10, 11, 12, 13]),),
        append_row=[2],
        append_block=[5],
    )
    rows.apply(step)
    planned = rows.batch(step)
    batch = planned.batch
    assert planned.sampling_rows == [0]
    assert batch.input_ids.tolist() == [10, 11, 12, 40]
    assert batch.positions.tolist() == [0, 1, 2, 5]
    assert batch.slot_mapping.tolist() == [20, 21, 22, 3 * 4 + 1]
    assert batch.query_start.tolist() == [0, 3, 4]
    assert batch.seq_lens.tolist() == [3, 6]
    assert batch.block_tables[1].tolist() == [7, 3]
    assert batch.block_tables[0, 0].item() == 5
    assert batch.logits_index is not None
    assert batch.logits_index.tolist() == [3]


def test_a_plan_may_only_free_rows(rows: Rows) -> None:
    assert run(rows, plan(freed_rows=[0])).input_ids.tolist() == []
    assert len(rows) == 0


def test_a_freed_row_can_begin_anew_in_the_same_plan(rows: Rows) -> None:
    batch = run(
        rows,
        plan({0: (2, FLAG_SAMPLE)}, freed_rows=[0], new_rows=(new_row(0, [8, 9]),), append_row=[0], append_block=[7]),
    )
    assert batch.input_ids.tolist() == [8, 9]
    assert batch.slot_mapping.tolist() == [28, 29]
    assert rows.known_ids(0).tolist() == [8, 9]


def test_a_row_that_was_recomputed_keeps_its_split(rows: Rows) -> None:
    rows.apply(plan(new_rows=(new_row(1, [1, 2, 3, 4], num_prompt_tokens=2),)))
    state = rows.state(1)
    assert (state.num_prompt, state.num_known, state.num_computed) == (2, 4, 0)


def test_ids_of_an_earlier_row_are_not_seen_by_the_next(rows: Rows) -> None:
    rows.apply(plan(freed_rows=[0], new_rows=(new_row(0, [9]),)))
    assert rows.known_ids(0).tolist() == [9]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"row": 3}, "row 3, limit 3"),
        ({"row": 0}, "row 0 is live and cannot begin anew"),
        ({"token_ids": b""}, "row 1 begins with 0 tokens, limit 10"),
        ({"token_ids": pack_ints(range(11))}, "row 1 begins with 11 tokens, limit 10"),
        ({"token_ids": b"123"}, r"row 1 \(r\): column of 3 bytes"),
        ({"token_ids": pack_ints([1, 50, 2, 3, 4])}, r"row 1 holds an id outside of \[0, 50\)"),
        ({"token_ids": pack_ints([1, -1, 2, 3, 4])}, r"row 1 holds an id outside of \[0, 50\)"),
        ({"num_prompt_tokens": 0}, "row 1: 5 tokens, 0 of the prompt, 0 computed"),
        ({"num_prompt_tokens": 6}, "row 1: 5 tokens, 6 of the prompt, 0 computed"),
        ({"num_computed_tokens": 5}, "row 1: 5 tokens, 5 of the prompt, 5 computed"),
    ],
)
def test_new_rows_that_are_refused(rows: Rows, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        rows.apply(plan(new_rows=(msgspec.structs.replace(new_row(1), **changes),)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stop_token_ids": pack_ints([50])}, r"stop_token_ids holds an id outside of \[0, 50\)"),
        ({"allowed_token_ids": pack_ints([-1])}, "allowed_token_ids holds an id outside"),
        ({"logit_bias_ids": pack_ints([55]), "logit_bias_values": pack_floats([1])}, "logit_bias holds an id outside"),
    ],
)
def test_sampling_parameters_that_are_refused(rows: Rows, changes: dict[str, Any], message: str) -> None:
    sampling = msgspec.structs.replace(SAMPLING, **changes)
    with pytest.raises(PlanError, match=r"row 1 \(r\): .*" + message):
        rows.apply(plan(new_rows=(new_row(1, sampling=sampling),)))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"freed_rows": [1]}, "row 1 is not live"),
        ({"freed_rows": [0, 0]}, "row 0 is not live"),
        ({"freed_rows": [-1]}, "row -1 is not live"),
        ({"append_row": [2], "append_block": [1]}, "row 2 is not live"),
        ({"append_row": [0], "append_block": [0]}, r"block 0 for row 0 is outside of \[1, 20\)"),
        ({"append_row": [0], "append_block": [20]}, r"block 20 for row 0 is outside of \[1, 20\)"),
        ({"append_row": [0], "append_block": [-5]}, r"block -5 for row 0 is outside of \[1, 20\)"),
        ({"append_row": [0], "append_block": [7]}, "block 7 is given to row 0, but 1 tables name it"),
        ({"append_row": [0, 0], "append_block": [1, 2]}, r"the table of row 0 is full \(3 blocks\)"),
    ],
)
def test_deltas_that_are_refused(rows: Rows, columns: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        rows.apply(plan(**columns))


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ({1: (1, 0)}, "row 1 is not live"),
        ({-1: (1, 0)}, "row -1 is not live"),
        ({0: (6, FLAG_SAMPLE)}, "row 0 knows 5 tokens, the plan computes 0 to 6 and samples"),
        ({0: (4, FLAG_SAMPLE)}, "row 0 knows 5 tokens, the plan computes 0 to 4 and samples"),
        ({0: (5, 0)}, "row 0 knows 5 tokens, the plan computes 0 to 5 and does not sample"),
        ({0: (4, 2)}, "row 0 has flags 2, known are 0 and 1"),
        ({0: (5, 3)}, "row 0 has flags 3, known are 0 and 1"),
        ({0: (13, 0)}, "plan of 13 tokens, limit 12"),
    ],
)
def test_steps_that_are_refused(rows: Rows, counts: dict[int, tuple[int, int]], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        run(rows, plan(counts))


def test_a_table_must_cover_what_is_computed(rows: Rows) -> None:
    rows.apply(plan(new_rows=(new_row(1),), append_row=[1], append_block=[1]))
    assert run(rows, plan({1: (4, 0)})).slot_mapping.tolist() == [4, 5, 6, 7]
    with pytest.raises(PlanError, match="row 1 has 1 blocks, too few for 5 tokens"):
        run(rows, plan({1: (1, FLAG_SAMPLE)}))


def test_a_full_row_cannot_sample(rows: Rows) -> None:
    rows.apply(plan(new_rows=(new_row(1, range(9)),), append_row=[1, 1, 1], append_block=[1, 2, 4]))
    run(rows, plan({1: (9, FLAG_SAMPLE)}))
    rows.store(1, 9)
    with pytest.raises(PlanError, match="row 1 has 10 tokens, the limit, and cannot take another"):
        run(rows, plan({1: (1, FLAG_SAMPLE)}))

"""Captured shapes and their columns: every step fits its shape, and padding names nobody."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.worker.gpu.layout import Layout, lay_out
from octavo.worker.gpu.shapes import Shape, decode_shapes, fill, mixed_shapes, parts_of
from octavo.worker.mirror import RowLimits, Step


def limits(max_num_seqs: int, max_num_batched_tokens: int) -> RowLimits:
    return RowLimits(max_num_seqs, 4096, max_num_batched_tokens, 16, 1000, 100)


@pytest.mark.parametrize("most", [1, 3, 8, 64, 250, 256, 257, 300, 1024])
def test_decode_shapes_hold_every_batch_with_little_padding(most: int) -> None:
    shapes = decode_shapes(limits(most, 8192))
    sizes = [shape.num_rows for shape in shapes]
    assert sizes == sorted(set(sizes))
    assert (sizes[0], sizes[-1]) == (1, most)
    assert max(next(s for s in sizes if s >= n) - n for n in range(1, most + 1)) < 32
    assert all(shape.is_decode and shape.num_tokens == shape.num_lines == shape.num_rows for shape in shapes)


@pytest.mark.parametrize("tokens", [1, 7, 16, 17, 512, 8192])
@pytest.mark.parametrize("most", [1, 3, 16, 256, 1024])
def test_mixed_shapes_are_sound(most: int, tokens: int) -> None:
    shapes = mixed_shapes(limits(most, tokens))
    assert shapes == sorted(set(shapes))
    assert shapes[-1].num_tokens == min(tokens, 1024)
    for shape in shapes:
        assert shape.num_decodes <= min(most, shape.num_tokens)  # a padding row's token must exist
        assert 1 <= shape.num_prompts <= most
        assert shape.num_lines <= min(most, shape.num_rows)


@st.composite
def steps(draw: st.DrawFn) -> Step:
    counts = draw(st.lists(st.one_of(st.just(1), st.integers(1, 40)), min_size=1, max_size=12))
    rows = draw(st.permutations(range(16)))[: len(counts)]
    starts = draw(st.lists(st.integers(0, 500), min_size=len(counts), max_size=len(counts)))
    sampling = draw(st.lists(st.sampled_from(range(len(counts))), unique=True))
    return Step(list(rows), counts, starts, sorted(sampling), [])


def smallest(shapes: list[Shape], layout: Layout) -> Shape | None:
    needs = (layout.num_tokens, layout.num_decodes, layout.rows.size - layout.num_decodes, layout.logits_index.size)
    for shape in shapes:
        has = (shape.num_tokens, shape.num_decodes, shape.num_prompts, shape.num_lines)
        if all(need <= limit for need, limit in zip(needs, has, strict=True)):
            return shape
    return None


@settings(deadline=None)
@given(steps())
def test_a_layout_puts_decodes_first_and_keeps_every_row(step: Step) -> None:
    layout = lay_out(step)
    counts = np.diff(layout.query_start)
    assert (counts[: layout.num_decodes] == 1).all()
    assert (counts[layout.num_decodes :] > 1).all()
    found = {row: (start, n) for row, start, n in zip(layout.rows, layout.starts, counts, strict=True)}
    assert found == {row: (start, n) for row, start, n in zip(step.rows, step.starts, step.counts, strict=True)}
    ends = {int(row): int(end) for row, end in zip(layout.rows, layout.query_start[1:], strict=True)}
    assert layout.logits_index.tolist() == [ends[step.rows[place]] - 1 for place in step.sampling]
    assert layout.longest == max(s + n for s, n in zip(step.starts, step.counts, strict=True))


@settings(deadline=None)
@given(steps(), st.lists(st.tuples(*[st.integers(0, 15)] * 3), max_size=8))
def test_a_column_holds_the_step_and_padding_that_does_nothing(step: Step, cells: list[tuple[int, int, int]]) -> None:
    layout = lay_out(step)
    shape = smallest(mixed_shapes(limits(16, 512)), layout)
    assert shape is not None
    sampling_rows = step.sampling_rows
    column = fill(shape, layout, sampling_rows, list(range(len(sampling_rows))), cells, 16, pinned=False)
    assert column.numel() == sum(shape.sizes)
    parts = parts_of(column, shape)
    tokens = parts.query_start.diff()
    rows, starts = parts.rows.tolist(), parts.starts.tolist()
    assert int(parts.query_start[0]) == 0
    assert int(parts.query_start[-1]) == layout.num_tokens
    seen = {}
    for place, (row, start, count) in enumerate(zip(rows, starts, tokens.tolist(), strict=True)):
        if place < shape.num_decodes:
            assert count <= 1
            assert count == 0 or int(parts.query_start[place]) == place  # a decode row's token has its number
        if row == 16:
            assert (start, count) == (-1, 0)
        else:
            seen[row] = (start, count)
    assert seen == {row: (start, n) for row, start, n in zip(step.rows, step.starts, step.counts, strict=True)}
    lines = len(sampling_rows)
    assert parts.logits_index[:lines].tolist() == layout.logits_index.tolist()
    assert parts.sampling_rows.tolist() == sampling_rows + [16] * (shape.num_lines - lines)
    assert parts.places.tolist() == [*range(lines), *[-1] * (shape.num_lines - lines)]
    assert parts.cells[: len(cells)].tolist() == [list(cell) for cell in cells]
    assert (parts.cells[len(cells) :] == -1).all()


def test_a_padding_row_of_a_pure_decode_step_has_a_token_that_goes_nowhere() -> None:
    layout = lay_out(Step([5, 3, 9], [1, 1, 1], [7, 8, 9], [0, 1, 2], []))
    shape = decode_shapes(limits(64, 512))[2]
    assert shape.num_rows == 4
    parts = parts_of(fill(shape, layout, [5, 3, 9], [8, 9, 10], [], 64, pinned=False), shape)
    assert parts.query_start.tolist() == [0, 1, 2, 3, 4]
    assert parts.rows.tolist() == [5, 3, 9, 64]
    assert parts.starts.tolist() == [7, 8, 9, -1]
    assert parts.places.tolist() == [8, 9, 10, -1]

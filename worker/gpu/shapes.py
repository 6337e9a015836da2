"""Shapes of the steps that are captured, and how a step's column is filled for each.

A captured step is padded: decode rows up to a number of them, rows with several tokens up to another, tokens up to a
third. Padding rows name the scratch row, begin at -1 and have no tokens, except that each padding row of a pure decode step
has one, whose keys go nowhere. Tokens behind the last row belong to nobody.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from octavo.worker.gpu.layout import Ints, Layout
from octavo.worker.mirror import RowLimits

MOST_PROMPTS = 32
"""Rows with several tokens that a captured step holds."""
MOST_TOKENS = 1024
"""Of a captured step with prompts: larger ones take the GPU longer than the host takes to launch them."""
_FEW_ROWS = 16
"""Decode rows of the captured steps for a service that is not busy."""
_SMALL_TOKENS = (16, 32, 64, 96, 128)
_TOKEN_STEP = 64


@dataclass(frozen=True, order=True)
class Shape:
    """What a captured step holds; a pure decode step has as many tokens as rows and no prompts."""

    num_tokens: int
    num_decodes: int
    num_prompts: int
    num_lines: int  # of the logits

    @property
    def num_rows(self) -> int:
        """Rows of both kinds."""
        return self.num_decodes + self.num_prompts

    @property
    def is_decode(self) -> bool:
        """Whether every row has one token and samples."""
        return self.num_prompts == 0

    def holds(self, other: "Shape") -> bool:
        """Say whether every step that the other shape of this kind holds fits this one."""
        return (
            self.num_tokens >= other.num_tokens
            and self.num_decodes >= other.num_decodes
            and self.num_prompts >= other.num_prompts
            and self.num_lines >= other.num_lines
        )

    @property
    def num_cells(self) -> int:
        """Cells of the block tables that a step may bring: one for each row, and what prompts of new blocks take."""
        return self.num_rows + self.num_tokens // 8

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Lengths of the parts of the column, in its order; see `Parts`."""
        lines = self.num_lines
        return (self.num_rows, self.num_rows, self.num_rows + 1, lines, lines, lines, 3 * self.num_cells)


@dataclass(frozen=True)
class Parts:
    """The parts of a column on the device, int32: R rows, S lines of the logits, C cells."""

    rows: Tensor  # [R]
    starts: Tensor  # [R]
    query_start: Tensor  # [R + 1]
    logits_index: Tensor  # [S]
    sampling_rows: Tensor  # [S]
    places: Tensor  # [S] where in its row the id of each line goes
    cells: Tensor  # [C, 3]


def parts_of(column: Tensor, shape: Shape) -> Parts:
    """Return views of the parts of a column."""
    rows, starts, query_start, index, sampling, places, cells = column[: sum(shape.sizes)].split(shape.sizes)
    return Parts(rows, starts, query_start, index, sampling, places, cells.view(-1, 3))


def decode_shapes(limits: RowLimits) -> list[Shape]:
    """Return pure decode steps: of 1, 2, 4 rows, in steps of 8 up to 256, of 32 above, and of all rows."""
    most = min(limits.max_num_seqs, limits.max_num_batched_tokens)
    sizes = {size for size in {1, 2, 4, *range(8, 257, 8), *range(288, most, 32)} if size < most} | {most}
    return [Shape(size, size, 0, size) for size in sorted(sizes)]


def mixed_shapes(limits: RowLimits) -> list[Shape]:
    """Return steps with prompts, for up to MOST_TOKENS tokens."""
    most = min(MOST_TOKENS, limits.max_num_batched_tokens)
    sizes = {size for size in (*_SMALL_TOKENS, *range(192, most, _TOKEN_STEP)) if size < most} | {most}
    shapes = []
    for size in sorted(sizes):
        # Few rows, then as many as there can be: padding rows cost the attention and the output head something.
        for rows in sorted({min(few, limits.max_num_seqs, size) for few in (_FEW_ROWS, size)}):
            prompts = min(rows, MOST_PROMPTS, max(1, size // 2))
            shapes.append(Shape(size, rows, prompts, min(limits.max_num_seqs, rows + prompts)))
    return shapes


def fill(
    shape: Shape,
    layout: Layout,
    sampling_rows: list[int],
    places: list[int],
    cells: list[tuple[int, int, int]],
    scratch: int,
    pinned: bool,
) -> Tensor:
    """Return the column of a step in host memory: int32.

    Args:
        shape: it must hold the step.
        layout: the step.
        sampling_rows: rows of the lines of the logits.
        places: where the id of each goes.
        cells: of the block tables, (row, place, block).
        scratch: row that padding names.
        pinned: whether the memory is meant for a copy to a GPU.
    """
    column = torch.empty(sum(shape.sizes), dtype=torch.int32, pin_memory=pinned)
    ends = np.cumsum(shape.sizes)[:-1]
    rows, starts, query_start, index, sampled, at, flat = np.split(column.numpy(), ends)
    decodes, prompts = layout.num_decodes, layout.rows.size - layout.num_decodes
    rows[:], starts[:] = scratch, -1
    for part, source in ((rows, layout.rows), (starts, layout.starts)):
        part[:decodes] = source[:decodes]
        part[shape.num_decodes : shape.num_decodes + prompts] = source[decodes:]
    _fill_query_start(query_start, shape, layout)
    index[:] = 0
    index[: layout.logits_index.size] = layout.logits_index
    sampled[:], at[:] = scratch, -1
    sampled[: len(sampling_rows)], at[: len(places)] = sampling_rows, places
    flat[:] = -1
    if cells:
        flat[: 3 * len(cells)] = np.array(cells, np.int32).reshape(-1)
    return column


def _fill_query_start(query_start: Ints, shape: Shape, layout: Layout) -> None:
    if shape.is_decode:
        query_start[:] = np.arange(shape.num_rows + 1)
        return
    decodes, source = layout.num_decodes, layout.query_start
    query_start[: decodes + 1] = source[: decodes + 1]
    query_start[decodes + 1 : shape.num_decodes + 1] = decodes
    behind = shape.num_decodes + source.size - decodes
    query_start[shape.num_decodes : behind] = source[decodes:]
    query_start[behind:] = source[-1]

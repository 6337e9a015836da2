"""What a process counts, and where: every number has its cell in one row of float64, known before the first one.

So the size is fixed, an update is one addition, rows travel as bytes, and those of several processes are added cell by
cell.
"""

import hashlib
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Protocol, TypeVar

CELL_BYTES = 8

MAX_ROW_BYTES = 64 * 1024
"""Of a row that travels."""


class Cells(Protocol):
    """A row: an array or a memoryview of float64."""

    def __getitem__(self, index: int, /) -> float: ...

    def __setitem__(self, index: int, value: float, /) -> None: ...


@dataclass(frozen=True)
class Table:
    """A number for each combination of its labels' values.

    Attributes:
        name: without `octavo_` and `_total`.
        words: what it says.
        labels: their names.
        values: one tuple a cell, from `first` on.
        first: its first cell.
        always: how many cells are told even while they are 0: the first ones.
    """

    name: str
    words: str
    labels: tuple[str, ...]
    values: tuple[tuple[str, ...], ...]
    first: int
    always: int

    @property
    def num_cells(self) -> int:
        """Cells from `first` on."""
        return len(self.values)

    def cell(self, *values: str) -> int:
        """Return the cell of these values of its labels; for those who look once.

        Raises:
            ValueError: there is none.
        """
        return self.first + self.values.index(values)


class Counter(Table):
    """Only grows."""


class Gauge(Table):
    """Goes up and down."""


@dataclass(frozen=True)
class Histogram:
    """How often a number lay between bounds: a cell a bucket, the last one beyond all bounds, then their sum."""

    name: str
    words: str
    bounds: tuple[float, ...]
    first: int

    @property
    def num_cells(self) -> int:
        """Cells from `first` on."""
        return len(self.bounds) + 2

    def observe(self, cells: Cells, value: float) -> None:
        """Count a value."""
        cells[self.first + bisect_left(self.bounds, value)] += 1.0
        cells[self.first + len(self.bounds) + 1] += value


M = TypeVar("M", Counter, Gauge, Histogram)


class Layout:
    """Gives each metric its cells, in the order in which they are asked for.

    Args:
        num_reserved: cells at the beginning that are no metrics.
    """

    def __init__(self, num_reserved: int = 0) -> None:
        self.metrics: list[Counter | Gauge | Histogram] = []
        self.num_cells = num_reserved

    @property
    def num_bytes(self) -> int:
        """Of a row."""
        return CELL_BYTES * self.num_cells

    @cached_property
    def digest(self) -> str:
        """Tells rows of this layout, which is complete, from those of another one."""
        return hashlib.sha256(repr((self.num_cells, self.metrics)).encode()).hexdigest()[:16]

    def counter(self, name: str, words: str, **labels: Sequence[str]) -> Counter:
        """Return a counter for every combination of labels."""
        values = tuple(product(*labels.values()))
        return self._add(Counter(name, words, tuple(labels), values, self.num_cells, len(values)))

    def gauge(self, name: str, words: str, **labels: Sequence[str]) -> Gauge:
        """Return a gauge for every combination of labels."""
        values = tuple(product(*labels.values()))
        return self._add(Gauge(name, words, tuple(labels), values, self.num_cells, len(values)))

    def table(self, name: str, words: str, labels: tuple[str, ...], values: tuple[tuple[str, ...], ...]) -> Counter:
        """Return a counter for these combinations of labels, each told once it is above 0."""
        return self._add(Counter(name, words, labels, values, self.num_cells, 0))

    def histogram(self, name: str, words: str, bounds: tuple[float, ...]) -> Histogram:
        """Return a histogram."""
        return self._add(Histogram(name, words, bounds, self.num_cells))

    def _add(self, metric: M) -> M:
        self.metrics.append(metric)
        self.num_cells += metric.num_cells
        return metric

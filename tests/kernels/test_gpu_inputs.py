"""Input preparation: the reference against plain lists, the Triton kernels against the reference."""

import pytest
import torch
from torch import Tensor

from octavo.kernels import inputs_reference

pytest.importorskip("triton")
from octavo.kernels.gpu import inputs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SLOTS, MAX_LEN, BLOCK_SIZE = 7, 2300, 16
CANARY = -77


def persistent_rows() -> tuple[Tensor, Tensor]:
    """Return random ids and tables; both are views with gaps, as rows in a wider allocation would be."""
    ids = torch.randint(0, 150_000, (SLOTS, MAX_LEN + 5), dtype=torch.int32)[:, :MAX_LEN]
    cells = -(-MAX_LEN // BLOCK_SIZE)
    tables = torch.randint(1, 2**31 - 1, (SLOTS, cells + 3), dtype=torch.int32)[:, :cells]
    return ids.to(DEVICE), tables.to(DEVICE)


Outputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def outputs(num_tokens: int, num_rows: int, cells: int) -> Outputs:
    shapes = [(num_tokens,), (num_tokens,), (num_tokens,), (num_rows,), (num_rows, cells)]
    out = [torch.full(shape, CANARY, dtype=torch.int32, device=DEVICE) for shape in shapes]
    out[2] = out[2].long()
    return out[0], out[1], out[2], out[3], out[4]


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


STEPS = {
    "decode": ([3, 0, 6], [17, 0, 2299], [1, 1, 1], 0),
    "decode with padding rows": ([5, 0, 0], [31, -1, -1], [1, 1, 1], 0),
    "mixed, tokens behind": ([1, 2, 0], [0, 100, 15], [2300, 33, 1], 1100),
    "only padding": ([0, 0], [-1, -1], [1, 1], 3),
    "no rows": ([], [], [], 5),
    "rows without tokens": ([2, 4], [16, 0], [0, 0], 0),
}


@pytest.mark.parametrize("step", STEPS)
def test_inputs_are_prepared_as_the_reference_does(step: str) -> None:
    torch.manual_seed(0)
    rows, starts, counts, behind = STEPS[step]
    ids, tables = persistent_rows()
    query_start = ints(0, *counts).cumsum(0).int()
    sizes = sum(counts) + behind, len(rows), tables.shape[1] + 2
    got, expected = outputs(*sizes), outputs(*sizes)
    args = ids, tables, ints(*rows), ints(*starts), query_start, BLOCK_SIZE
    before = ids.clone(), tables.clone()
    inputs.prepare_inputs(*args, *got)
    inputs_reference.prepare_inputs(*args, *expected)
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(ids, before[0])
    assert torch.equal(tables, before[1])


def test_the_reference_prepares_what_its_formulas_say() -> None:
    ids = torch.arange(40, dtype=torch.int32).view(2, 20)
    tables = ints(7, 3, 9, 5, 8, 2).view(2, 3)
    ids, tables = ids.to(DEVICE), tables.to(DEVICE)
    out = outputs(7, 3, 3)
    inputs_reference.prepare_inputs(ids, tables, ints(1, 0, 0), ints(3, 9, -1), ints(0, 3, 4, 5), 4, *out)
    assert out[0].tolist() == [23, 24, 25, 9, 0, 0, 0]
    assert out[1].tolist() == [3, 4, 5, 9, 0, 0, 0]
    assert out[2].tolist() == [23, 32, 33, 37, -1, -1, -1]
    assert out[3].tolist() == [6, 10, 0]
    assert out[4].tolist() == [[5, 8, CANARY], [7, 3, 9], [CANARY] * 3]


@pytest.mark.parametrize("count", [0, 1, 300])
def test_cells_are_scattered(count: int) -> None:
    torch.manual_seed(1)
    _, tables = persistent_rows()
    places = torch.randperm(tables.numel())[:count]
    width = tables.shape[1]
    cells = torch.stack((places // width, places % width, torch.arange(count)), 1).int()
    cells[::3, 0] = -1
    got, expected = tables.clone(), tables.clone()
    inputs.write_cells(got, cells.to(DEVICE))
    inputs_reference.write_cells(expected, cells)
    assert torch.equal(got, expected)
    assert torch.equal(got, tables) == (count < 2)  # the first cell is padding


def test_runs_of_ids_are_written_in_place() -> None:
    torch.manual_seed(2)
    ids, _ = persistent_rows()
    slots, starts = ints(4, -1, 0, 2), ints(0, 3, 2299, 11)
    bounds = ints(0, 2300, 2305, 2306, 2306)
    flat = torch.randint(0, 99, (2306,), dtype=torch.int32, device=DEVICE)
    got, expected = ids.clone(), ids.clone()
    inputs.write_ids(got, slots, starts, bounds, flat)
    inputs_reference.write_ids(expected, slots, starts, bounds, flat)
    assert torch.equal(got, expected)
    assert torch.equal(got[4], flat[:2300])
    inputs.write_ids(got, slots[:0], starts[:0], bounds[:1], flat[:0])
    assert torch.equal(got, expected)


def test_tokens_are_stored_and_none_below_zero() -> None:
    torch.manual_seed(3)
    ids, _ = persistent_rows()
    rows, places = ints(*range(SLOTS)).repeat(40), torch.arange(280, dtype=torch.int32, device=DEVICE)
    places[5::7] = -1
    tokens = torch.randint(0, 150_000, (280,), device=DEVICE)
    tokens[::9] = -1
    got, expected = ids.clone(), ids.clone()
    inputs.store_tokens(got, rows, places, tokens)
    inputs_reference.store_tokens(expected, rows, places, tokens)
    assert torch.equal(got, expected)
    assert got[0, 0] == 0


def test_whole_rows_are_copied() -> None:
    torch.manual_seed(4)
    ids, tables = persistent_rows()
    src, dst = ints(0, -1, 0, 6), ints(1, 3, 5, 2)
    got, expected = (ids.clone(), tables.clone()), (ids.clone(), tables.clone())
    inputs.copy_rows(*got, src, dst)
    inputs_reference.copy_rows(*expected, src, dst)
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(got[0][5], ids[0])

"""Bits of the reference backend: nothing about the rest of a step may change one token's result."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from octavo.kernels import reference

DEMO_LINEARS = [(576, 576), (192, 576), (1536, 576), (576, 1536), (49152, 576), (33, 40)]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True, params=[1, 2], ids=["one thread", "two threads"])
def threads(request: pytest.FixtureRequest) -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def same_bits(left: Tensor, right: Tensor) -> bool:
    kind = torch.int32 if left.dtype == torch.float32 else torch.int16
    return torch.equal(left.contiguous().view(kind), right.contiguous().view(kind))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", DEMO_LINEARS, ids=str)
def test_linear_row_is_the_same_at_every_place_and_beside_every_neighbour(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(shape, generator=generator).to(dtype)
    row = torch.randn(shape[1], generator=generator).to(dtype)
    expected = reference.linear(row[None], weight)[0]
    for place in range(reference.LINEAR_TILE_ROWS):
        x = torch.randn(reference.LINEAR_TILE_ROWS, shape[1], generator=generator).to(dtype)
        x[place] = row
        assert same_bits(reference.linear(x, weight)[place], expected)

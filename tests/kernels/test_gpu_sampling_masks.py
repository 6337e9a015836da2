"""Masks, biases, penalties and log-probabilities on the GPU against the reference."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from octavo.kernels import sampling as reference

pytest.importorskip("triton")
from octavo.kernels.gpu.logprobs import logprobs
from octavo.kernels.gpu.penalties import apply_penalties
from octavo.kernels.gpu.sampling_masks import apply_allowed, apply_logit_bias, apply_token_mask

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ON_GPU = DEVICE == "cuda"
INF = math.inf
VOCABULARIES = [1, 5, 97, 4097] + ([128256] if ON_GPU else [])

# The interpreter computes with numpy, which warns where floating point overflows or meets infinities.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def compare(
    logits: Tensor, ours: Callable[..., None], theirs: Callable[..., None], *arguments: Tensor, bound: float = 0.0
) -> None:
    """Apply both in place, ours to a column slice of a wider matrix whose other columns must stay."""
    rows, vocabulary = logits.shape
    wide = torch.full((rows, vocabulary + 3), 7.0)
    wide[:, :vocabulary] = logits
    wide = wide.to(DEVICE)
    ours(wide[:, :vocabulary], *(x.to(DEVICE) for x in arguments))
    theirs(logits, *arguments)
    assert bool((wide[:, vocabulary:] == 7.0).all())
    torch.testing.assert_close(wide[:, :vocabulary].cpu(), logits, rtol=bound, atol=bound, equal_nan=True)


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("pairs", [0, 1, 7, 300])
def test_only_allowed_ids_are_left(pairs: int, vocabulary: int) -> None:
    rows, ids = torch.tensor([0, 3, 4])[torch.randint(0, 3, (pairs,))], torch.randint(0, vocabulary, (pairs,))
    compare(torch.randn(6, vocabulary), apply_allowed, reference.apply_allowed, rows, ids)


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("lines", [0, 1, 4])
def test_ids_without_a_bit_are_forbidden(lines: int, vocabulary: int) -> None:
    # Words that cover fewer ids than there are, as many, or more: what has no bit is forbidden.
    for num_words in {max(1, vocabulary // 32), -(-vocabulary // 32), vocabulary // 32 + 3}:
        rows = torch.randperm(6)[:lines]
        words = torch.randint(-(2**31), 2**31, (lines, num_words), dtype=torch.int32)
        compare(torch.randn(6, vocabulary), apply_token_mask, reference.apply_token_mask, rows, words)


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("pairs", [0, 1, 7, 300])
def test_biases_are_added_at_their_places(pairs: int, vocabulary: int) -> None:
    places = torch.randperm(6 * vocabulary)[:pairs]
    values = torch.randn(places.numel())
    values[::5] = -INF
    arguments = places // vocabulary, places % vocabulary, values
    compare(torch.randn(6, vocabulary), apply_logit_bias, reference.apply_logit_bias, *arguments)


def test_biases_of_one_place_add_up() -> None:
    rows, ids, values = torch.randint(0, 3, (400,)), torch.randint(0, 9, (400,)), torch.randn(400)
    values[7] = -INF
    compare(torch.randn(3, 9), apply_logit_bias, reference.apply_logit_bias, rows, ids, values, bound=1e-5)


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_penalties_are_those_of_the_reference_bit_for_bit(vocabulary: int) -> None:
    logits = torch.randn(5, vocabulary) * 3
    logits[1, : vocabulary // 3] = -INF
    logits[3, vocabulary // 2] = math.nan
    rows = torch.tensor([3, 1, 0])
    wide = torch.rand(3, vocabulary + 2) < 0.3
    counts = torch.randint(0, 4, (3, vocabulary + 1), dtype=torch.int32) * (torch.rand(3, vocabulary + 1) < 0.2)
    factors = torch.randn(3), torch.randn(3), torch.rand(3) + 0.5
    compare(
        logits,
        apply_penalties,
        reference.apply_penalties,
        rows,
        wide[:, :vocabulary],
        counts.int()[:, :vocabulary],
        *factors,
    )


def test_no_rows_with_penalties() -> None:
    none = torch.empty(0, 9)
    arguments = none[:, 0].long(), none.bool(), none.int(), none[:, 0], none[:, 0], none[:, 0]
    compare(torch.randn(2, 9), apply_penalties, reference.apply_penalties, *arguments)


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("top", [0, 1, 20])
def test_logprobs_are_those_of_the_reference(top: int, dtype: torch.dtype, vocabulary: int) -> None:
    logits = (torch.randn(4, vocabulary + 3) * 4).to(dtype)[:, :vocabulary]  # bfloat16 has many equal ones
    logits[3, : vocabulary // 2] = -INF
    ids = torch.randint(0, vocabulary, (4,))
    ids[0] = logits[0].argmax()
    got = logprobs(logits.to(DEVICE), ids.to(DEVICE), top)
    expected = reference.logprobs(logits, ids, top)
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-5, atol=2e-5)


def test_equal_logits_share_a_rank_and_come_by_id() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0, 2.0, 2.0, -0.0]]).repeat(6, 1)
    _, rank, top_ids, _ = logprobs(logits.to(DEVICE), torch.tensor([1, 3, 4, 5, 2, 6]).to(DEVICE), 100)
    assert rank.tolist() == [1, 1, 3, 3, 5, 6]
    assert top_ids.tolist() == [[1, 3, 4, 5, 2, 0, 6]] * 6
    flat = torch.zeros(1, 3000, device=DEVICE)
    assert logprobs(flat, torch.tensor([5], device=DEVICE), 20)[2].tolist() == [list(range(20))]


def test_a_faulty_row_disturbs_no_neighbour() -> None:
    logits, ids = torch.randn(5, 1000), torch.tensor([1, 2, 3, -1, 5])
    expected = logprobs(logits.to(DEVICE), ids.to(DEVICE), 4)
    logits[1, 17], logits[2, 3], logits[3] = math.nan, INF, -INF
    got = logprobs(logits.to(DEVICE), ids.to(DEVICE), 4)
    for ours, theirs in zip(got, expected, strict=True):
        assert torch.equal(ours[[0, 4]], theirs[[0, 4]])
    assert bool(((got[2] >= 0) & (got[2] < 1000)).all())


def test_no_rows() -> None:
    got = logprobs(torch.empty(0, 9, device=DEVICE), torch.empty(0, dtype=torch.int64, device=DEVICE), 4)
    assert [part.shape for part in got] == [(0,), (0,), (0, 4), (0, 4)]

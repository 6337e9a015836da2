"""Min-p, top-k and top-p on the GPU: the sets of the reference, ties, neighbours and what stays untouched."""

import math

import pytest
import torch
from torch import Tensor

from octavo.kernels import sampling as reference

pytest.importorskip("triton")
from octavo.kernels.gpu.filters import filter_logits

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ON_GPU = DEVICE == "cuda"
INF = math.inf
VOCABULARIES = [1, 5, 97, 4097] + ([128256] if ON_GPU else [])

# temperature, min_p, top_k, top_p
SETTINGS = [
    (1.0, 0.0, 50, 0.9),
    (1.0, 0.0, 0, 0.9),
    (0.7, 0.05, 0, 1.0),
    (1.0, 0.001, 0, 0.8),
    (1.5, 0.001, 20, 0.95),
    (1.0, 0.0, 3000, 1.0),
    (2.0, 0.0, 3000, 0.7),
    (1.0, 0.0, 0, 1e-9),
    (1.0, 0.0, 1, 0.5),
    (5.0, 0.0, 0, 0.99),
    (0.0, 0.3, 5, 0.5),
    (1.0, 0.0, 0, 1.0),
    (1e-4, 0.0, 0, 0.5),
]

# The interpreter computes with numpy, which warns where floating point overflows or meets infinities.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def columns(settings: list[tuple[float, float, int, float]]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    temperature, min_p, top_k, top_p = zip(*settings, strict=True)
    return torch.tensor(temperature), torch.tensor(min_p), torch.tensor(top_k), torch.tensor(top_p)


def filtered(logits: Tensor, settings: list[tuple[float, float, int, float]]) -> Tensor:
    """Filter a column slice of a wider matrix, and see that the rest of it stays."""
    rows, vocabulary = logits.shape
    wide = torch.full((rows + 2, vocabulary + 5), 7.0)
    wide[1:-1, :vocabulary] = logits
    wide = wide.to(DEVICE)
    filter_logits(wide[1:-1, :vocabulary], *(x.to(DEVICE) for x in columns(settings)))
    wide = wide.cpu()
    assert bool((wide[[0, -1]] == 7.0).all())
    assert bool((wide[:, vocabulary:] == 7.0).all())
    return wide[1:-1, :vocabulary]


def check(logits: Tensor, settings: list[tuple[float, float, int, float]]) -> None:
    expected = logits.clone()
    reference.filter_logits(expected, *columns(settings))
    got = filtered(logits, settings)
    for row, setting in enumerate(settings):
        if not torch.equal(got[row].nan_to_num(nan=5.0), expected[row].nan_to_num(nan=5.0)):
            check_rounding(logits[row], got[row], expected[row], setting)


def check_rounding(logits: Tensor, got: Tensor, expected: Tensor, setting: tuple[float, float, int, float]) -> None:
    """Sets that differ are beginnings of one order, and what lies between them has next to no mass."""
    assert setting[3] < 1.0, setting
    kept, other = got > -INF, expected > -INF
    assert torch.equal(got[kept], logits[kept])
    probabilities = (logits.double() / setting[0]).softmax(-1)
    assert float(probabilities[kept ^ other].sum()) < 2e-6 + 2 * float(probabilities[kept ^ other].max())
    assert bool((kept & other == kept).all()) or bool((kept & other == other).all()), setting
    assert int((kept ^ other).sum()) <= 3, setting


@pytest.mark.parametrize("width", [0.5, 3.0])
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_sets_are_those_of_the_reference(vocabulary: int, width: float) -> None:
    check(torch.randn(len(SETTINGS), vocabulary) * width, SETTINGS)


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_sets_of_coarse_logits_are_those_of_the_reference(vocabulary: int) -> None:
    """Logits of which many are equal: both zeros too, and values that bfloat16 holds."""
    check((torch.randn(len(SETTINGS), vocabulary) * 3).round(), SETTINGS)
    check((torch.randn(len(SETTINGS), vocabulary) * 3).bfloat16().float(), SETTINGS)


def test_logits_in_order_and_in_blocks() -> None:
    """The most likely ids side by side: no group of ids is like another."""
    falling = torch.linspace(12, -12, 9000 if ON_GPU else 3500).repeat(len(SETTINGS), 1)
    check(falling, SETTINGS)
    check(falling.flip(-1).contiguous(), SETTINGS)
    check(falling * 1e-3 + 100, SETTINGS)


def test_masked_logits_stay_out() -> None:
    logits = torch.randn(len(SETTINGS), 6000) * 2
    logits[:, torch.randperm(6000)[:5500]] = -INF
    check(logits, SETTINGS)
    one = torch.full((len(SETTINGS), 3000), -INF)
    one[:, 2999] = -4.0
    check(one, SETTINGS)


@pytest.mark.parametrize("count", [1, 256, 257, 1024, 1025, 4999])
def test_among_equals_the_lowest_ids_stay(count: int) -> None:
    logits = torch.zeros(3, 5000)
    logits[2, ::2] = -0.0
    kept = filtered(logits, [(1.0, 0.0, 0, (count - 0.5) / 5000), (1.0, 0.0, count, 1.0), (1.0, 0.0, count, 0.9999999)])
    for row in kept[:2]:
        assert (row > -INF).nonzero().flatten().tolist() == list(range(count))
    assert (kept[2] > -INF).nonzero().flatten().tolist() == list(range(count))


def test_rows_at_fault_stay_as_they_are_and_disturb_no_neighbour() -> None:
    logits = torch.randn(6, 3000)
    settings = [(1.0, 0.01, 40, 0.9), (1.0, 0.0, 0, 0.9)] * 3
    expected = filtered(logits, settings)
    logits[1, 2999], logits[2, 5], logits[3] = math.nan, INF, -INF
    got = filtered(logits, settings)
    assert torch.equal(got[[0, 4, 5]], expected[[0, 4, 5]])
    assert torch.equal(got[1:4].nan_to_num(nan=5.0), logits[1:4].nan_to_num(nan=5.0))


def test_extreme_logits_end() -> None:
    logits = torch.randn(4, 3000)
    logits[0, :3] = torch.tensor([3e38, -3e38, 2.9e38])
    logits[1] *= 1e-39
    logits[2] = torch.linspace(-3e38, 3e38, 3000)
    settings = [(1.0, 0.0, 0, 0.9), (1.0, 0.0, 2500, 0.9), (1e-3, 0.0, 2500, 1.0), (100.0, 0.9, 0, 0.9)]
    check(logits, settings)


def test_wrong_logits_are_refused() -> None:
    off = [x.to(DEVICE) for x in columns([(1.0, 0.0, 0, 1.0)])]
    for logits in (torch.randn(1, 8, device=DEVICE).bfloat16(), torch.randn(1, 16, device=DEVICE)[:, ::2]):
        with pytest.raises(ValueError, match="fp32"):
            filter_logits(logits, *off)

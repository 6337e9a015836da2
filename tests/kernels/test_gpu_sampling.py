"""Drawing on the GPU: the ids of the reference, faulty rows, and nothing written beside the rows."""

import math

import pytest
import torch
from torch import Tensor

from octavo.kernels import sampling as reference
from octavo.kernels.philox import noise_words, words_to_noise

pytest.importorskip("triton")
import triton
import triton.language as tl

from octavo.kernels.gpu.filters import filter_logits
from octavo.kernels.gpu.logprobs import logprobs
from octavo.kernels.gpu.penalties import apply_penalties
from octavo.kernels.gpu.philox import NEAR_NOISE_ERROR, gumbel, near_gumbel_bits, words_of_ids
from octavo.kernels.gpu.sampling import first_nonfinite, sample
from octavo.kernels.gpu.sampling_masks import apply_allowed, apply_logit_bias

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ON_GPU = DEVICE == "cuda"
INF = math.inf
VOCABULARIES = [1, 5, 97, 4097] + ([128256] if ON_GPU else [])
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

# The interpreter computes with numpy, which warns where floating point overflows or meets infinities.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def padded(logits: Tensor) -> Tensor:
    """Return the logits as a column slice of a wider matrix with other numbers beside them."""
    wide = torch.full((logits.shape[0], logits.shape[1] + 5), 1e4, dtype=logits.dtype)
    wide[:, : logits.shape[1]] = logits
    return wide.to(DEVICE)[:, : logits.shape[1]]


def parameters(rows: int, temperature: list[float]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    times = -(-rows // len(temperature))
    return (
        torch.tensor(temperature).repeat(times)[:rows],
        torch.randint(-(2**63), 2**63 - 1, (rows,)),
        torch.randint(0, 5, (rows,), dtype=torch.int32),
        torch.randint(0, 2**31 - 1, (rows,)),
    )


def draw(logits: Tensor, settings: tuple[Tensor, ...]) -> list[int]:
    ids = sample(logits, *(x.to(DEVICE) for x in settings))
    assert ids.dtype == torch.int64
    assert ids.shape == logits.shape[:1]
    return [int(i) for i in ids.tolist()]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [0.0, 3.0, 100.0])
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_ids_are_those_of_the_reference(vocabulary: int, width: float, dtype: torch.dtype) -> None:
    rows = 40 if ON_GPU else 6
    logits = (torch.randn(rows, vocabulary) * width).to(dtype)
    settings = parameters(rows, [0.0, 1.0, 0.3, 2.0, 1e-4, 1e-5])
    assert draw(padded(logits), settings) == reference.sample(logits.float(), *settings).tolist()


@pytest.mark.parametrize("temperature", [0.0, 0.01, 1.0, 50.0])
def test_what_masks_leave_is_drawn_as_by_the_reference(temperature: float) -> None:
    vocabulary = VOCABULARIES[-1]
    logits = torch.randn(8, vocabulary) * 3
    for row, left in enumerate([1, 1, 2, 3, 50, vocabulary // 8, vocabulary // 2, vocabulary - 1]):
        logits[row, torch.randperm(vocabulary)[left:]] = -INF
    settings = parameters(8, [temperature])
    got = draw(padded(logits), settings)
    assert got == reference.sample(logits, *settings).tolist()
    assert all(logits[row, i] > -INF for row, i in enumerate(got))


def test_of_equal_logits_greedy_takes_the_lowest_id() -> None:
    logits = torch.zeros(5, 1500)
    logits[1, [1400, 700]] = 1.0
    logits[2, :600] = -INF
    logits[3] = -0.0
    logits[3, 4] = 0.0
    settings = parameters(5, [0.0, 9e-6, 1e-5, 0.0, math.nan])
    assert draw(padded(logits), settings) == [0, 700, 600, 0, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("place", [0, 255, 256, 1999])
@pytest.mark.parametrize("bad", [math.nan, INF], ids=["nan", "inf"])
def test_a_faulty_row_gives_no_id_and_leaves_its_neighbours_alone(bad: float, place: int, temperature: float) -> None:
    logits = torch.randn(4, 2000)
    settings = parameters(4, [temperature])
    expected = draw(padded(logits), settings)
    logits[1, place], logits[2] = bad, -INF
    assert draw(padded(logits), settings) == [expected[0], -1, -1, expected[3]]
    assert first_nonfinite(padded(logits)).tolist() == [False, True, True, False]


def test_scores_beyond_float32_are_compared_exactly() -> None:
    logits = torch.full((4, 600), -3e38)
    logits[0, 500], logits[0, 20] = 2e38, 1e38
    logits[1, 300] = -2.5e38
    logits[2] = -INF
    logits[2, 599] = -1e38
    logits[3] = 3e38
    settings = (torch.full((4,), 1e-4), *parameters(4, [0.0])[1:])
    assert draw(padded(logits), settings)[:3] == [500, 300, 599]
    assert draw(padded(logits), settings)[3] == 0  # noise vanishes beside 3e42: all are equal


def test_drawing_follows_the_distribution() -> None:
    probabilities = torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03])
    count = 20_000 if ON_GPU else 60
    logits = (probabilities.log() * 0.5).repeat(count, 1)
    zeros = torch.zeros(count, dtype=torch.int64)
    drawn = torch.tensor(draw(padded(logits), (torch.full((count,), 0.5), torch.arange(count), zeros, zeros)))
    expected = probabilities * count
    chi_square = float(((drawn.bincount(minlength=5) - expected) ** 2 / expected).sum())
    assert chi_square < 18.5  # 99.9 % quantile of 4 degrees of freedom


@triton.jit  # type: ignore[untyped-decorator]
def noise_kernel(words, exact, near, drawn, position, choice, seed, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(words + place).to(tl.uint32)
    tl.store(exact + place, gumbel(word))
    tl.store(near + place, near_gumbel_bits(word))
    ids = words_of_ids(place, tl.load(position), tl.load(choice), tl.load(seed))
    tl.store(drawn + place, ids.to(tl.int64))


def test_noise_is_that_of_the_reference_and_near_noise_within_its_bound() -> None:
    ends = torch.arange(1024)
    words = torch.cat((ends, 2**32 - 1 - ends, 429496730 - 512 + ends, torch.randint(0, 2**32, (5120,)))).to(DEVICE)
    exact, near = words.double(), words.float()
    drawn = torch.zeros_like(words)
    settings = [torch.tensor([x], device=DEVICE) for x in (2**31 - 1, 3, -(2**62) + 12345)]
    noise_kernel[(8,)](words, exact, near, drawn, *settings, BLOCK=1024)
    expected = -words_to_noise(words.cpu()).log()
    torch.testing.assert_close(exact.cpu(), expected, rtol=1e-13, atol=1e-15)
    assert float((near.cpu().double() - expected / math.log(2)).abs().max()) < NEAR_NOISE_ERROR
    assert torch.equal(drawn.cpu(), noise_words(-(2**62) + 12345, 3, 2**31 - 1, torch.arange(2048)).flatten())


def test_no_rows_and_columns_apart() -> None:
    none = torch.empty(0, dtype=torch.int64, device=DEVICE)
    assert sample(torch.empty(0, 7, device=DEVICE), none.float(), none, none, none).shape == (0,)
    with pytest.raises(ValueError, match="contiguous"):
        sample(torch.randn(2, 8, device=DEVICE)[:, ::2], *(x.to(DEVICE) for x in parameters(2, [1.0])))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.skipif(not ON_GPU, reason="a graph is captured on a CUDA device")
def test_everything_is_captured_in_a_graph_and_nothing_synchronises() -> None:
    rows, vocabulary = 5, 50_000
    logits = torch.randn(rows, vocabulary) * 3
    temperature, seeds, choices, positions = parameters(rows, [1.0, 0.0, 0.7])
    filters = (torch.tensor([0.0, 0, 0.01, 0, 0]), torch.tensor([50, 3, 0, 0, 0]), torch.tensor([0.9, 0.5, 1, 0.8, 1]))
    pairs = (torch.tensor([4, 4, 4]), torch.tensor([7, 9, 30_000]))
    biases = (torch.tensor([0, 1, 3]), torch.tensor([5, 6, 7]), torch.tensor([2.0, -INF, 0.5]))
    penalties = (torch.tensor([0, 2]), torch.rand(2, vocabulary) < 0.1, torch.randint(0, 3, (2, vocabulary)).int())
    factors = (torch.tensor([0.5, 0.0]), torch.tensor([0.1, 0.2]), torch.tensor([1.1, 1.0]))

    def step(ops: object, to: str) -> tuple[Tensor, ...]:
        place = logits.to(to, copy=True)
        arguments = [
            [x.to(to) for x in part] for part in (pairs, biases, (*penalties, *factors), (temperature, *filters))
        ]
        draws = [x.to(to) for x in (temperature, seeds, choices, positions)]

        def run() -> tuple[Tensor, ...]:
            work = place.clone()
            names = ("apply_allowed", "apply_logit_bias", "apply_penalties", "filter_logits")
            for name, part in zip(names, arguments, strict=True):
                getattr(ops, name)(work, *part)
            ids = getattr(ops, "sample")(work, *draws)  # noqa: B009
            return ids, getattr(ops, "first_nonfinite")(place), *getattr(ops, "logprobs")(place, ids, 5)  # noqa: B009

        if to == "cpu":
            return run()
        run()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run()
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        return out

    class Ours:
        pass

    for function in (
        apply_allowed,
        apply_logit_bias,
        apply_penalties,
        filter_logits,
        sample,
        first_nonfinite,
        logprobs,
    ):
        setattr(Ours, function.__name__, staticmethod(function))
    for got, expected in zip(step(Ours, "cuda"), step(reference, "cpu"), strict=True):
        torch.testing.assert_close(got.cpu(), expected, rtol=1e-5, atol=1e-5)

"""The compiled kernels of the CPU: weights of all kinds, fused operations, exponentials, threads."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from octavo.kernels import cpu, reference
from octavo.kernels.cpu import attention, jit, pointwise, product
from octavo.kernels.weights import GroupedWeight, dequantized, pack_codes

ROWS = (1, 2, 5, 12, 13, 40)


def grouped(
    shape: tuple[int, int], bits: int, group_size: int, *, has_zeros: bool = True, has_perm: bool = False
) -> GroupedWeight:
    torch.manual_seed(0)
    outputs, inputs = shape
    groups = -(-inputs // group_size)
    codes = torch.randint(0, 2**bits, shape, dtype=torch.uint8)
    zeros = torch.randint(0, 2**bits, (groups, outputs), dtype=torch.uint8)
    perm = torch.randperm(inputs).int() if has_perm else None
    scales = torch.rand(groups, outputs).to(torch.float16)
    return GroupedWeight(pack_codes(codes, bits), bits, scales, zeros if has_zeros else None, group_size, perm)


@pytest.mark.parametrize(
    "weight",
    [
        grouped((40, 64), 8, 64, has_zeros=False),
        grouped((70, 96), 8, 32, has_perm=True),
        grouped((33, 96), 4, 40),
        grouped((64, 128), 4, 128, has_zeros=False),
        grouped((9, 64), 2, 16, has_perm=True),
    ],
    ids=lambda weight: f"{weight.bits}-bits-in-{weight.group_size}",
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_product_with_codes_is_that_with_the_numbers_they_stand_for(weight: GroupedWeight, dtype: torch.dtype) -> None:
    numbers, prepared = dequantized(weight, torch.float32), cpu.prepare_weight(weight, dtype)
    bias = torch.randn(numbers.shape[0]).to(dtype)
    bound = 1e-5 if dtype is torch.float32 else 1e-2
    for rows in ROWS:
        x = torch.randn(rows, numbers.shape[1]).to(dtype)
        expected = x.double() @ numbers.double().T + bias.double()
        got = cpu.linear(x, prepared, bias)
        assert got.dtype is dtype
        torch.testing.assert_close(got.double(), expected, rtol=bound, atol=bound * float(expected.abs().max()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_weights_keep_their_bits(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = torch.randn(50, 30).to(dtype)
    prepared = cpu.prepare_weight(weight, dtype)
    for rows in ROWS:
        # Products with ones and zeros are exact, so the weight itself comes out.
        picked = cpu.linear(torch.eye(30).to(dtype)[:rows], prepared)
        assert torch.equal(picked, weight.T[:rows])


def test_gate_is_right_at_the_ends_of_the_exponential() -> None:
    values = torch.tensor([0.0, -0.0, 1e-30, -86.0, -88.5, -104.0, -1e4, 87.0, 89.0, 1e30, float("nan")])
    ends = torch.cat((values, torch.linspace(-95, 95, 4001)))
    got = cpu.act_and_mul(torch.cat((ends, torch.ones_like(ends)))[None])[0].double()
    expected = ends.double() * ends.double().sigmoid()
    # Below -87 the result is less than 1e-35: nothing but its size matters.
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-35, equal_nan=True)


@pytest.mark.parametrize("unit_offset", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_are_normalised_rotated_and_stored_as_the_reference_does(dtype: torch.dtype, unit_offset: bool) -> None:
    torch.manual_seed(0)
    mixed = torch.randn(11, 8, 40).to(dtype)
    q, k, v = mixed.split([4, 2, 2], dim=1)
    table = reference.rotary_cos_sin(torch.rand(12), 64)  # 24 of 40 dimensions
    positions, slots = torch.arange(11).int() * 5, torch.tensor([0, 3, -1, 17, 9, 31, 30, 29, 28, 1, 2])
    norms = torch.rand(2, 40).to(dtype)
    caches: list[list[Tensor]] = []
    rotated: list[Tensor] = []
    for backend in (cpu, reference):
        keys, values = torch.zeros(2, 4, 2, 8, 40).to(dtype).transpose(2, 3)  # head by head
        arguments = (q, k, v, positions, table, keys, values, slots, norms[0], norms[1], 1e-4)
        rotated.append(backend.rotary_and_write_kv(*arguments, unit_offset=unit_offset))
        caches.append([keys, values])
    bound = 1e-5 if dtype is torch.float32 else 3e-2
    torch.testing.assert_close(rotated[0], rotated[1], rtol=bound, atol=bound)
    for got, expected in zip(*caches, strict=True):
        torch.testing.assert_close(got, expected, rtol=bound, atol=bound)


def test_norm_takes_views_with_gaps() -> None:
    torch.manual_seed(0)
    x, residual, weight = torch.randn(6, 50)[:, 3:43], torch.randn(6, 80)[:, ::2], torch.randn(40)
    for got, expected in zip(cpu.rms_norm(x, weight, 1e-5, residual), reference.rms_norm(x, weight, 1e-5, residual)):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("team", ["torch", "python", "alone"])
def test_every_kind_of_threads_does_all_the_work(team: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1 if team == "alone" else 3)
    if team == "python":
        monkeypatch.setattr(jit, "_openmp", lambda: None)
        monkeypatch.setattr(jit, "_team", jit._team.__wrapped__)
    torch.manual_seed(0)
    weight, x = torch.randn(3000, 70), torch.randn(30, 70)
    prepared = cpu.prepare_weight(weight, torch.float32)
    for _ in range(20):
        torch.testing.assert_close(cpu.linear(x, prepared), x @ weight.T, rtol=1e-4, atol=1e-4)


@pytest.fixture(params=[4, 8])
def narrow(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Kernels with vectors of another width than this processor's."""
    cached = (product._product, product._arrange, attention._attention, pointwise._kernel)
    machine = jit._Machine()
    machine.width = request.param
    for kernel in cached:
        kernel.cache_clear()
    monkeypatch.setattr(jit, "_machine", lambda: machine)
    yield machine.width
    for kernel in cached:
        kernel.cache_clear()


def test_vectors_of_every_width_give_the_same(narrow: int) -> None:
    torch.manual_seed(0)
    plain = torch.randn(75, 50)
    for weight in (plain, grouped((33, 96), 4, 40), grouped((40, 64), 8, 64, has_zeros=False)):
        numbers, prepared = dequantized(weight, torch.float32), cpu.prepare_weight(weight, torch.float32)
        for rows in ROWS:
            x = torch.randn(rows, numbers.shape[1])
            torch.testing.assert_close(cpu.linear(x, prepared), x @ numbers.T, rtol=1e-4, atol=1e-4)
    caches = torch.randn(2, 30, 16, 2, 40)
    tables = torch.randperm(29)[:20].view(2, 10).int()
    q, starts, lengths = torch.randn(71, 6, 40), torch.tensor([0, 1, 71]).int(), torch.tensor([150, 97]).int()
    arguments = (q, caches[0], caches[1], tables, starts, lengths, 0.2)
    for window in (0, 20):
        expected = reference.paged_attention(*arguments, window=window)
        torch.testing.assert_close(cpu.paged_attention(*arguments, window=window), expected, rtol=1e-4, atol=1e-5)
    x, weights = torch.randn(5, 90), torch.randn(90)
    torch.testing.assert_close(cpu.rms_norm(x, weights, 1e-5)[0], reference.rms_norm(x, weights, 1e-5)[0])
    torch.testing.assert_close(cpu.act_and_mul(x), reference.act_and_mul(x))

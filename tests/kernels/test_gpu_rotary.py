"""Rotation, head norms and the KV write in Triton, against the formula in float64 and the reference."""

import pytest
import torch
from torch import Tensor

from octavo.kernels import reference

pytest.importorskip("triton")
from octavo.kernels.gpu.rotary import rotary_and_write_kv

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FLOAT8 = torch.float8_e4m3fn
BLOCKS, BLOCK_SIZE, EPS = 5, 16, 1e-3
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}

# query heads, key heads, head size, rotated dimensions
SHAPES = [(9, 3, 64, 64), (32, 8, 128, 128), (5, 5, 80, 80), (3, 1, 96, 96), (4, 2, 40, 24), (2, 1, 256, 128)]


def fused_inputs(tokens: int, shape: tuple[int, int, int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k, v as views of one projection's output that has more columns yet."""
    heads, kv_heads, size, _ = shape
    fused = torch.randn(tokens, (heads + 2 * kv_heads) * size + 16).to(DEVICE, dtype)[:, :-16]
    q, k, v = fused.split([heads * size, kv_heads * size, kv_heads * size], dim=-1)
    return q.unflatten(1, (heads, size)), k.unflatten(1, (kv_heads, size)), v.unflatten(1, (kv_heads, size))


def empty_caches(kv_heads: int, size: int, dtype: torch.dtype, by_head: bool) -> Tensor:
    """Return both caches [2, num_blocks, B, nkv, d] full of a canary, in memory by head or by slot."""
    shape = (2, BLOCKS, kv_heads, BLOCK_SIZE, size) if by_head else (2, BLOCKS, BLOCK_SIZE, kv_heads, size)
    caches = torch.full(shape, 9.0).to(DEVICE, dtype)
    return caches.transpose(2, 3) if by_head else caches


def exact(x: Tensor, norm: Tensor | None, positions: Tensor, cos_sin: Tensor, *, unit_offset: bool = False) -> Tensor:
    """Return the formula in float64."""
    wide = x.double()
    if norm is not None:
        wide = wide / (wide.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * (norm.double() + unit_offset)
    half = cos_sin.shape[-1] // 2
    rows = cos_sin[positions.long()].double()[:, None]
    cos, sin = rows[..., :half], rows[..., half:]
    first, second = wide[..., :half], wide[..., half : 2 * half]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, wide[..., 2 * half :]), -1)


def rotary_table(rotated: int, count: int = 100) -> Tensor:
    inv_freq = 1000.0 ** -(torch.arange(0, rotated, 2) / rotated)
    return reference.rotary_cos_sin(inv_freq, count).to(DEVICE)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_heads_are_turned_and_stored(shape: tuple[int, int, int, int], dtype: torch.dtype, normed: bool) -> None:
    torch.manual_seed(0)
    _, kv_heads, size, rotated = shape
    q, k, v = fused_inputs(7, shape, dtype)
    norms = torch.randn(2, size).to(DEVICE, dtype)
    q_norm, k_norm = (norms[0], norms[1]) if normed else (None, None)
    positions = torch.randint(0, 100, (7,), device=DEVICE, dtype=torch.int32)
    slots = torch.tensor([3, 79, -1, 16, 0, -1, 33], device=DEVICE)
    caches = empty_caches(kv_heads, size, dtype, by_head=size != 64)
    table = rotary_table(rotated)
    out = rotary_and_write_kv(q, k, v, positions, table, caches[0], caches[1], slots, q_norm, k_norm, EPS)
    assert out.is_contiguous()
    bound = BOUNDS[dtype]
    torch.testing.assert_close(out.double(), exact(q, q_norm, positions, table), rtol=bound, atol=2 * bound)
    keys = exact(k, k_norm, positions, table)
    untouched = torch.ones(BLOCKS * BLOCK_SIZE, dtype=torch.bool)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            place = divmod(slot, BLOCK_SIZE)
            untouched[slot] = False
            torch.testing.assert_close(caches[0][place].double(), keys[token], rtol=bound, atol=2 * bound)
            assert torch.equal(caches[1][place], v[token])
    assert (caches.flatten(1, 2)[:, untouched.to(DEVICE)] == 9).all()


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("shape", [(4, 1, 256, 256), (5, 5, 80, 80), (4, 2, 40, 24)])
def test_heads_are_normed_by_one_plus_weight(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    _, kv_heads, size, rotated = shape
    q, k, v = fused_inputs(3, shape, dtype)
    norms = torch.randn(2, size).to(DEVICE, dtype)
    positions, slots = torch.tensor([0, 99, 5], device=DEVICE), torch.tensor([1, 2, 40], device=DEVICE)
    caches = empty_caches(kv_heads, size, dtype, by_head=True)
    table = rotary_table(rotated)
    args = q, k, v, positions, table, caches[0], caches[1], slots, norms[0], norms[1], EPS
    out = rotary_and_write_kv(*args, unit_offset=True)
    bound = BOUNDS[dtype]
    wanted = exact(q, norms[0], positions, table, unit_offset=True)
    torch.testing.assert_close(out.double(), wanted, rtol=bound, atol=2 * bound)
    keys = exact(k, norms[1], positions, table, unit_offset=True)
    for token, slot in enumerate(slots.tolist()):
        stored = caches[0][divmod(slot, BLOCK_SIZE)].double()
        torch.testing.assert_close(stored, keys[token], rtol=bound, atol=2 * bound)


@pytest.mark.parametrize("dtype", BOUNDS)
def test_it_agrees_with_the_reference(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    shape = (16, 8, 128, 128)
    q, k, v = fused_inputs(3, shape, dtype)
    norms = torch.randn(2, 128).to(DEVICE, dtype)
    positions, slots = torch.tensor([0, 99, 5], device=DEVICE), torch.tensor([1, 2, 40], device=DEVICE)
    got, expected = (empty_caches(8, 128, dtype, by_head=True) for _ in range(2))
    args = q, k, v, positions, rotary_table(128)
    out = rotary_and_write_kv(*args, got[0], got[1], slots, norms[0], norms[1], EPS)
    wanted = reference.rotary_and_write_kv(*args, expected[0], expected[1], slots, norms[0], norms[1], EPS)
    bound = BOUNDS[dtype]
    torch.testing.assert_close(out, wanted, rtol=bound, atol=2 * bound)
    torch.testing.assert_close(got, expected, rtol=bound, atol=2 * bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_float8_caches_hold_the_nearest_finite_value(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    shape = (4, 2, 64, 64)
    q, k, v = fused_inputs(4, shape, dtype)
    if DEVICE == "cpu":  # the interpreter's own rounding to float8 is wrong: it gets values that need none
        q, k, v = (x.to(FLOAT8).to(dtype) for x in (q, k, v))
    v[0, 0, :4] = torch.tensor([500.0, -1e6, 448.0, 0.0], dtype=dtype)
    slots, positions = torch.arange(4, device=DEVICE), torch.zeros(4, dtype=torch.int64, device=DEVICE)
    table = rotary_table(64)
    got, expected = (empty_caches(2, 64, FLOAT8, by_head=True) for _ in range(2))
    rotary_and_write_kv(q, k, v, positions, table, got[0], got[1], slots)
    reference.rotary_and_write_kv(q, k, v, positions, table, expected[0], expected[1], slots)
    assert torch.equal(got.float(), expected.float())  # position 0 rotates by nothing: no rounding differs
    assert got[1][0, 0, 0, :3].float().tolist() == [448, -448, 448]


def test_no_tokens_and_unlike_caches() -> None:
    q, k, v = fused_inputs(0, (4, 2, 64, 64), torch.float32)
    caches = empty_caches(2, 64, torch.float32, by_head=True)
    none = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    assert rotary_and_write_kv(q, k, v, none, rotary_table(64), caches[0], caches[1], none).shape == (0, 4, 64)
    with pytest.raises(ValueError, match="expected equal ones"):
        rotary_and_write_kv(q, k, v, none, rotary_table(64), caches[0], caches[1].contiguous(), none)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs 9 GB of GPU memory")
def test_slots_behind_2_to_the_31_elements() -> None:
    blocks = 2**31 // (BLOCK_SIZE * 8 * 128) + 2
    caches = torch.zeros(2, blocks, 8, BLOCK_SIZE, 128, dtype=torch.bfloat16, device=DEVICE).transpose(2, 3)
    q, k, v = fused_inputs(2, (32, 8, 128, 128), torch.bfloat16)
    slots = torch.tensor([blocks * BLOCK_SIZE - 1, 5], device=DEVICE)
    positions = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    rotary_and_write_kv(q, k, v, positions, rotary_table(128), caches[0], caches[1], slots)
    assert torch.equal(caches[0][-1, -1], k[0])
    assert torch.equal(caches[1][-1, -1], v[0])
    assert torch.equal(caches[1][0, 5], v[1])

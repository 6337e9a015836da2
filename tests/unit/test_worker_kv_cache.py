"""Blocks of the KV cache: as many as a share of the device leaves, where they are asked for, and how they lie in memory."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from octavo.worker import kv_cache, memory
from octavo.worker.config import WorkerConfig
from octavo.worker.errors import MemoryShortage
from octavo.worker.kv_cache import CacheSpec, allocate, blocks_that_fit, choose_num_blocks
from octavo.worker.memory import DeviceMemory
from octavo.worker.models.config import parse_model_config
from octavo.worker.models.targets import ShardSpec
from tests.support.tiny_models import TINY_LLAMA

GIB = 2**30
CPU = torch.device("cpu")
H200 = DeviceMemory(
    total=int(139.8 * GIB), free=124 * GIB, weights=15 * GIB, peak=16 * GIB + GIB // 5, held=15 * GIB, graphs=GIB
)
SPEC = CacheSpec(num_layers=32, num_kv_heads=8, block_size=16, head_size=128, dtype=torch.bfloat16, device=CPU)


def config(**settings: Any) -> WorkerConfig:
    return WorkerConfig(model_path=Path(), address="ipc:///nowhere", **settings)


def test_the_bytes_of_a_block() -> None:
    assert SPEC.block_bytes == 2 * 32 * 8 * 16 * 128 * 2
    assert replace(SPEC, dtype=torch.float8_e4m3fn).block_bytes == SPEC.block_bytes // 2
    of_a_rank = kv_cache.spec_of(parse_model_config(TINY_LLAMA).cached, ShardSpec(0, 2), 4, torch.float32, CPU, False)
    assert (of_a_rank.num_kv_heads, of_a_rank.block_bytes) == (1, 2 * 2 * 1 * 4 * 8 * 4)


def test_a_share_is_filled() -> None:
    num_blocks = blocks_that_fit(H200, 0.9, SPEC.block_bytes)
    taken = H200.context + H200.peak + H200.graphs + num_blocks * SPEC.block_bytes
    assert 0 <= int(0.9 * H200.total) - taken < SPEC.block_bytes
    assert num_blocks == 55101  # (125.82 - 1 - 16.2 - 1) GiB of 2 MiB


def test_what_others_have_on_the_device_does_not_change_a_share() -> None:
    alone = blocks_that_fit(H200, 0.45, SPEC.block_bytes)
    beside_another = replace(H200, free=H200.free - int(0.45 * H200.total))
    assert blocks_that_fit(beside_another, 0.45, SPEC.block_bytes) == alone
    assert choose_num_blocks(config(gpu_memory_utilization=0.45), SPEC, beside_another) == alone


@given(
    total=st.integers(1, 2**40),
    peak=st.integers(0, 2**40),
    graphs=st.integers(0, 2**30),
    utilization=st.floats(0, 1, exclude_min=True),
    each=st.integers(1, 2**24),
)
def test_a_share_is_never_exceeded(total: int, peak: int, graphs: int, utilization: float, each: int) -> None:
    of_device = DeviceMemory(total, free=total, weights=0, peak=peak, held=0, graphs=graphs)
    try:
        num_blocks = blocks_that_fit(of_device, utilization, each)
    except MemoryShortage:
        assert of_device.context + peak + graphs + 2 * each > int(total * utilization)
        return
    assert num_blocks >= 2
    assert of_device.context + peak + graphs + num_blocks * each <= total * utilization


def test_a_share_that_leaves_nothing_says_what_takes_it() -> None:
    with pytest.raises(MemoryShortage) as caught:
        blocks_that_fit(H200, 0.1, SPEC.block_bytes)
    said = str(caught.value)
    assert "utilisation 0.1 of 139.8 GiB is 14.0 GiB, which leaves nothing for the KV cache" in said
    assert "weights 15.0 GiB, activations 1.2 GiB, CUDA context 1.0 GiB, graphs 1.0 GiB, 2 blocks 4.0 MiB" in said
    assert said.endswith("raise --gpu-memory-utilization, or lower --max-num-batched-tokens or --max-num-seqs")


def test_a_share_that_others_have_taken_names_need_and_free() -> None:
    with pytest.raises(MemoryShortage) as caught:
        choose_num_blocks(config(), SPEC, replace(H200, free=50 * GIB))
    assert "needs 107.6 GiB for 55101 blocks, and steps 2.2 GiB more; 50.0 GiB of 139.8 GiB are free" in str(
        caught.value
    )
    assert "lower --gpu-memory-utilization, or end other processes" in str(caught.value)


@pytest.mark.parametrize("measured", [None, H200])
def test_what_is_asked_for_wins(measured: DeviceMemory | None) -> None:
    asked = 10 * SPEC.block_bytes + 1
    assert choose_num_blocks(config(kv_cache_memory_bytes=asked), SPEC, measured) == 10
    assert choose_num_blocks(config(kv_cache_memory_bytes=asked, num_gpu_blocks_override=7), SPEC, measured) == 7


def test_on_the_cpu_a_gibibyte_is_the_default() -> None:
    assert choose_num_blocks(config(), SPEC, None) == GIB // SPEC.block_bytes


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"num_gpu_blocks_override": 10**6}, "--num-gpu-blocks-override"),
        ({"kv_cache_memory_bytes": 10**13}, "--kv-cache-memory-bytes"),
    ],
)
@pytest.mark.parametrize("measured", [None, H200])
def test_what_is_asked_for_must_fit(settings: dict[str, int], flag: str, measured: DeviceMemory | None) -> None:
    with pytest.raises(
        MemoryShortage, match=rf"the KV cache needs .* GiB for \d+ blocks.* are free on cpu; lower {flag}"
    ):
        choose_num_blocks(config(**settings), SPEC, measured)


def test_less_than_two_blocks() -> None:
    with pytest.raises(MemoryShortage, match="at least 2 blocks of 2097152 bytes, kv_cache_memory_bytes = 4194303"):
        choose_num_blocks(config(kv_cache_memory_bytes=2 * SPEC.block_bytes - 1), SPEC, H200)


@pytest.mark.parametrize("head_major", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_the_layout(head_major: bool, dtype: torch.dtype) -> None:
    spec = CacheSpec(3, num_kv_heads=2, block_size=4, head_size=8, dtype=dtype, device=CPU, head_major=head_major)
    caches = allocate(spec, 5)
    assert len(caches) == 3
    for cache in caches:
        for tensor in (cache.keys, cache.values):
            assert tensor.shape == (5, 4, 2, 8)
            assert tensor.dtype is dtype
            assert tensor.stride() == ((64, 8, 32, 1) if head_major else (64, 16, 8, 1))
            assert not tensor.float().any()
    tensors = [tensor for cache in caches for tensor in (cache.keys, cache.values)]
    assert len({tensor.data_ptr() for tensor in tensors}) == 6
    assert sum(tensor.nbytes for tensor in tensors) == 5 * spec.block_bytes


def test_the_cache_is_not_resident_before_it_is_written() -> None:
    spec = replace(SPEC, num_layers=2, dtype=torch.float32)
    before = psutil.Process().memory_info().rss
    caches = allocate(spec, 2**28 // spec.block_bytes)
    assert psutil.Process().memory_info().rss - before < 2**26
    assert sum(cache.keys.nbytes + cache.values.nbytes for cache in caches) == 2**28
    assert not caches[-1].values[-1].any()


def test_what_is_measured_is_what_this_process_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of torch's allocator, with a step that takes 3 GiB beside 15 GiB of weights, of which 1 GiB stays."""
    held = {"now": 16 * GIB, "peak": 99 * GIB}
    steps: list[str] = []

    def empty_cache() -> None:
        held["now"] = 15 * GIB if not steps else 16 * GIB

    def largest_step() -> None:
        steps.append("run")
        held["peak"] = max(held["peak"], 18 * GIB)
        held["now"] = 17 * GIB

    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: held.update(peak=held["now"]))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: steps.append("wait"))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 15 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: held["now"])
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: held["peak"])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 * GIB, 140 * GIB))
    measured = memory.measure(torch.device("cuda"), largest_step, graphs=GIB)
    assert steps == ["run", "wait"]
    assert measured == DeviceMemory(140 * GIB, 60 * GIB, 15 * GIB, 18 * GIB, 16 * GIB, GIB)
    assert (measured.activations, measured.owed) == (3 * GIB, 3 * GIB)


def test_running_out_of_memory_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (GIB // 2, 140 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 15 * GIB)
    with (
        pytest.raises(
            MemoryShortage, match=r"the step ran out of memory: 512\.0 MiB of 140\.0 GiB are free on cuda"
        ) as caught,
        memory.named_shortage(torch.device("cuda"), "the step", "lower --max-num-seqs"),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory")
    assert "this process holds 15.0 GiB; lower --max-num-seqs" in str(caught.value)


@pytest.mark.parametrize(
    ("num_bytes", "words"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1024, "1.0 KiB"), (3 * 2**20, "3.0 MiB"), (int(139.8 * GIB), "139.8 GiB")],
)
def test_sizes_in_words(num_bytes: int, words: str) -> None:
    assert memory.in_words(num_bytes) == words

"""From settings to a ready worker: facts, limits, and refusals that name value and limit."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.worker import kv_cache, loading, memory
from octavo.worker.errors import MemoryShortage, StartError
from octavo.worker.memory import DeviceMemory
from octavo.worker.runner import EagerRunner
from tests.support.tiny_models import TINY_LLAMA, load_worker, worker_config, write_model

BLOCK_BYTES = 2 * 2 * 2 * 8 * 4 * 4
"""Of TINY_LLAMA in float32: keys and values, 2 layers, 2 KV heads of 8, 4 bytes, 4 tokens."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def test_the_facts(folder: Path) -> None:
    facts = load_worker(folder, max_model_len=100).facts
    assert (facts.num_blocks, facts.block_size, facts.vocab_size) == (129, 4, 97)
    assert (facts.max_model_len, facts.max_num_seqs, facts.max_num_batched_tokens) == (100, 8, 64)
    assert (facts.backend, facts.device, facts.dtype) == ("reference", "cpu", "float32")


def test_the_models_length_is_the_default(folder: Path) -> None:
    assert load_worker(folder).facts.max_model_len == 256


def test_nothing_is_left_of_the_warm_up(folder: Path) -> None:
    assert len(load_worker(folder).runner.rows) == 0


@pytest.mark.parametrize("block_size", [1, 2, 5, 16])
@pytest.mark.parametrize("budget", [1, 2, 64])
@pytest.mark.parametrize("length", [2, 3, 256])
@pytest.mark.parametrize(("rows", "blocks"), [(1, 2), (2, 2), (2, 3)])
def test_the_smallest_settings_work(
    folder: Path, block_size: int, budget: int, length: int, rows: int, blocks: int
) -> None:
    settings = {"block_size": block_size, "max_num_batched_tokens": budget, "max_model_len": length}
    facts = load_worker(
        folder, **settings, max_num_seqs=rows, num_gpu_blocks_override=blocks, load_format="dummy"
    ).facts
    assert (facts.block_size, facts.num_blocks, facts.max_model_len) == (block_size, blocks, length)


def test_limits_and_cache_follow_the_device_where_nothing_is_said(folder: Path) -> None:
    unsaid: dict[str, Any] = dict.fromkeys(
        ("max_num_seqs", "max_num_batched_tokens", "num_gpu_blocks_override", "kv_cache_memory_bytes")
    )
    facts = load_worker(folder, **unsaid, load_format="dummy").facts
    assert (facts.max_num_seqs, facts.max_num_batched_tokens) == (64, 512)
    assert facts.num_blocks == 2**30 // BLOCK_BYTES


def test_blocks_follow_from_the_memory(folder: Path) -> None:
    worker = load_worker(folder, num_gpu_blocks_override=None, kv_cache_memory_bytes=10 * BLOCK_BYTES + 1)
    assert worker.facts.num_blocks == 10


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_dtype_is_the_one_asked_for(folder: Path, dtype: str) -> None:
    assert load_worker(folder, dtype=dtype).facts.dtype == dtype


def test_auto_on_the_cpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    facts = load_worker(folder, device="auto", backend="auto").facts
    assert (facts.device, facts.backend) == ("cpu", "cpu")


def test_dummy_weights_need_nothing_but_a_config(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    assert load_worker(tmp_path, load_format="dummy").facts.vocab_size == 97


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "tpu"}, "device 'tpu'"),
        ({"device": "meta"}, "device 'meta' is not supported; supported are cpu and cuda"),
        ({"backend": "fast"}, "unknown kernel backend 'fast'; known: cpu, reference"),
        ({"dtype": "int8"}, "dtype 'int8' is unknown; there are auto, float32"),
        ({"load_format": "gguf"}, "load_format 'gguf', but the weights of .* are safetensors"),
        ({"load_format": "pt"}, "load_format 'pt' is unknown; there are auto, safetensors, gguf, dummy"),
        ({"block_size": 0}, "block_size = 0: expected 1 to"),
        ({"max_num_seqs": 0}, "max_num_seqs = 0: expected 1 to"),
        ({"max_num_batched_tokens": -1}, "max_num_batched_tokens = -1: expected 1 to"),
        ({"num_threads": 0}, "num_threads = 0: expected 1 to"),
        ({"seed": -1}, "seed = -1: expected 0 to"),
        ({"max_model_len": 1}, "max_model_len = 1: expected 2"),
        ({"max_model_len": 257}, "max_model_len = 257: expected 2 to 256, the model's positions"),
        ({"num_gpu_blocks_override": 0}, "num_gpu_blocks_override = 0: expected 2 to"),
        ({"num_gpu_blocks_override": 1}, "num_gpu_blocks_override = 1: expected 2 to"),
        ({"gpu_memory_utilization": 0.0}, r"gpu_memory_utilization = 0\.0: expected above 0, at most 1"),
        ({"gpu_memory_utilization": 1.01}, r"gpu_memory_utilization = 1\.01: expected above 0, at most 1"),
        ({"gpu_memory_utilization": float("nan")}, "gpu_memory_utilization = nan: expected above 0, at most 1"),
        ({"kv_cache_dtype": "int4"}, "kv_cache_dtype 'int4' is unknown; there are auto, fp8"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype 'fp8' is not supported by backend 'reference'"),
        ({"backend": "cpu", "batch_invariant": True}, "batch_invariant: the bits of backend 'cpu' depend on the batch"),
    ],
)
def test_settings_that_are_refused(folder: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(StartError, match=message):
        load_worker(folder, **settings)


def test_a_cuda_device_that_is_not_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(StartError, match="device 'cuda' is not there"):
        load_worker(folder, device="cuda")


def test_triton_on_the_cpu_is_refused_without_its_interpreter(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(StartError, match="backend 'triton' does not run on device 'cpu'"):
        load_worker(folder, backend="triton")


def test_a_cache_below_two_blocks(folder: Path) -> None:
    with pytest.raises(MemoryShortage, match=f"at least 2 blocks of {BLOCK_BYTES} bytes, kv_cache_memory_bytes = 1023"):
        load_worker(folder, num_gpu_blocks_override=None, kv_cache_memory_bytes=1023)


def test_a_cache_that_does_not_fit_names_need_and_free(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "free_and_total", lambda device: (2**20, 2**30))
    with pytest.raises(
        MemoryShortage,
        match=r"needs 4\.9 MiB for 5000 blocks; 1\.0 MiB of 1\.0 GiB are free on cpu; lower --num-gpu-blo",
    ):
        load_worker(folder, num_gpu_blocks_override=5000)


def test_weights_that_do_not_fit_are_refused_before_anything_is_allocated(tmp_path: Path) -> None:
    write_model(tmp_path)
    write_model(tmp_path / "huge", TINY_LLAMA | {"hidden_size": 2**31 - 1}, tensors={})
    with pytest.raises(MemoryShortage, match=r"the weights need \d{4,}\.\d GiB on cpu, .* GiB of .* GiB are free"):
        load_worker(tmp_path / "huge", load_format="dummy")


@pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, Triton's kernels are compiled")
@pytest.mark.parametrize(("name", "dtype"), [("auto", torch.float32), ("fp8", torch.float8_e4m3fn)])
def test_the_cache_of_the_gpu_kernels_is_head_major(folder: Path, name: str, dtype: torch.dtype) -> None:
    from octavo.worker.gpu.runner import GpuRunner

    # Nothing is captured, and the step that is tried is a small one: Triton's interpreter takes its time.
    settings = {"enforce_eager": True, "max_num_batched_tokens": 8}
    runner = load_worker(folder, backend="triton", kv_cache_dtype=name, **settings).runner
    assert isinstance(runner, GpuRunner)
    for cache in runner._caches:
        for tensor in (cache.keys, cache.values):
            assert tensor.shape == (129, 4, 2, 8)
            assert tensor.stride() == (64, 8, 32, 1)
            assert tensor.dtype is dtype


def choices(folder: Path, device: str, **settings: Any) -> loading._Choices:
    """Return what is chosen for a worker of the reference backend; on "cuda" as if there were such a device."""
    chosen = loading._choose(worker_config(folder, num_gpu_blocks_override=None, **settings))
    placement = replace(chosen.placement, device=torch.device(device))
    return replace(chosen, placement=placement)


def test_weights_that_others_leave_no_room_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_and_total", lambda device: (2**16, 140 * 2**30))
    with pytest.raises(
        MemoryShortage, match=r"weights need 165\.1 KiB on cuda, 64\.0 KiB of 140\.0 GiB are free; end other processes"
    ):
        loading._check_memory(choices(folder, "cuda"))


def test_weights_that_exceed_the_share(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_and_total", lambda device: (8 * 2**30, 10 * 2**30))
    loading._check_memory(choices(folder, "cuda", gpu_memory_utilization=0.11))
    loading._check_memory(choices(folder, "cuda", gpu_memory_utilization=0.1, kv_cache_memory_bytes=2**20))
    loading._check_memory(choices(folder, "cpu", gpu_memory_utilization=0.1))
    with pytest.raises(
        MemoryShortage,
        match=r"weights need 165\.1 KiB and the CUDA context 1\.0 GiB, utilisation 0\.1 of 10\.0 GiB is 1\.0 GiB; raise",
    ):
        loading._check_memory(choices(folder, "cuda", gpu_memory_utilization=0.1))


@pytest.mark.parametrize(
    ("backend", "eager", "graphs"), [("reference", False, 0), ("triton", True, 0), ("triton", False, 1)]
)
def test_the_largest_step_is_tried_with_the_smallest_cache(
    folder: Path, monkeypatch: pytest.MonkeyPatch, backend: str, eager: bool, graphs: int
) -> None:
    seen: list[tuple[str, int]] = []

    def measure(device: torch.device, largest_step: Callable[[], object], graphs: int) -> DeviceMemory:
        largest_step()
        return DeviceMemory(2**37, 2**37, 0, 0, 0, graphs)

    def make_runner(num_blocks: int) -> EagerRunner:
        runner = EagerRunner.__new__(EagerRunner)
        for part in ("profile", "profile_sampling"):
            monkeypatch.setattr(runner, part, lambda part=part: seen.append((part, num_blocks)))
        return runner

    monkeypatch.setattr(memory, "measure", measure)
    chosen = replace(choices(folder, "cuda", enforce_eager=eager), backend=backend)
    assert loading._profile(chosen, make_runner).graphs == graphs * memory.GRAPH_BYTES
    assert seen == [("profile", kv_cache.MIN_BLOCKS), ("profile_sampling", kv_cache.MIN_BLOCKS)]


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_the_largest_step_runs(folder: Path, backend: str) -> None:
    """On the CPU nothing is measured by it; that it runs with the smallest cache is what can be shown."""
    runner = load_worker(folder, backend=backend, num_gpu_blocks_override=kv_cache.MIN_BLOCKS).runner
    runner.profile()
    runner.profile_sampling()
    assert len(runner.rows) == 0


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_loading_can_be_ended_between_tensors(folder: Path, load_format: str) -> None:
    class Enough(Exception):
        pass

    calls = 0

    def end_at_third_tensor() -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise Enough

    with pytest.raises(Enough):
        loading.load(worker_config(folder, load_format=load_format), end_at_third_tensor)
    assert calls == 3


def write_tokenizer(folder: Path, num_ids: int) -> None:
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({str(i): i for i in range(num_ids)}, unk_token="0")).save(str(folder / "tokenizer.json"))


def test_a_tokenizer_larger_than_the_embedding_is_refused(tmp_path: Path) -> None:
    write_tokenizer(write_model(tmp_path), 98)
    with pytest.raises(StartError, match=r"tokenizer\.json has ids up to 97, but the embedding has only 97 rows"):
        load_worker(tmp_path)


def test_a_damaged_tokenizer_is_named(tmp_path: Path) -> None:
    (write_model(tmp_path) / "tokenizer.json").write_text("{")
    with pytest.raises(StartError, match=r"tokenizer\.json cannot be read"):
        load_worker(tmp_path)

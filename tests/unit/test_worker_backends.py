"""Devices, backends and dtypes: what fits is chosen, what cannot work is refused with the way out."""

from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.worker import backends
from octavo.worker.config import WorkerConfig
from octavo.worker.errors import StartError

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def config(**settings: Any) -> WorkerConfig:
    return WorkerConfig(model_path=Path(), address="ipc:///nowhere", **settings)


@pytest.fixture
def device_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that gives torch a CUDA device of a capability, and lets Triton be there or not."""

    def make(capability: tuple[int, int], triton: bool = True) -> None:
        def ops(name: str) -> object:
            if name == "triton" and not triton:
                raise ImportError("No module named 'triton'")
            return object()

        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
        monkeypatch.setattr(backends, "get_ops", ops)

    return make


def test_cuda_is_the_default_where_it_is(device_of: Any) -> None:
    device_of((9, 0))
    assert backends.choose_device("auto") == CUDA
    assert backends.choose_device("cuda:0") == torch.device("cuda:0")
    with pytest.raises(StartError, match="device 'cuda:1' is not there: torch finds 1 CUDA devices"):
        backends.choose_device("cuda:1")


@pytest.mark.parametrize("name", ["cuda", "cuda:0"])
def test_no_cuda_device(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert backends.choose_device("auto") == CPU
    with pytest.raises(StartError, match=f"device '{name}' is not there: torch finds no CUDA device"):
        backends.choose_device(name)


def test_the_backend_follows_the_device(device_of: Any) -> None:
    device_of((8, 0))
    assert [backends.choose_backend(config(), device) for device in (CPU, CUDA)] == ["cpu", "triton"]
    reference = config(backend="reference")
    assert [backends.choose_backend(reference, device) for device in (CPU, CUDA)] == ["reference", "reference"]
    with pytest.raises(StartError, match="backend 'cpu' does not run on device 'cuda'; backend 'reference' does"):
        backends.choose_backend(config(backend="cpu"), CUDA)


@pytest.mark.parametrize("name", ["auto", "triton"])
def test_an_old_device_is_refused_with_the_way_out(device_of: Any, name: str) -> None:
    device_of((7, 5))
    with pytest.raises(StartError, match=r"'triton' needs .* 8\.0 or higher, Some GPU has 7\.5; --backend reference"):
        backends.choose_backend(config(backend=name), CUDA)
    assert backends.choose_backend(config(backend="reference"), CUDA) == "reference"


@pytest.mark.parametrize("name", ["auto", "triton"])
def test_triton_that_is_absent_is_named(device_of: Any, name: str) -> None:
    device_of((9, 0), triton=False)
    with pytest.raises(StartError, match=r"'triton' cannot be imported: No module.*--backend reference runs"):
        backends.choose_backend(config(backend=name), CUDA)


def test_triton_runs_on_the_cpu_only_through_its_interpreter(device_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    device_of((9, 0))
    with pytest.raises(StartError, match="'triton' does not run on device 'cpu'; backends 'cpu' and 'reference' do"):
        backends.choose_backend(config(backend="triton"), CPU)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert backends.choose_backend(config(backend="triton"), CPU) == "triton"
    assert backends.choose_backend(config(), CPU) == "cpu"


def test_head_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for size in (64, 80, 96, 128, 160, 256):
        backends.check_head_size("triton", size)
    backends.check_head_size("reference", 48)
    with pytest.raises(StartError, match=r"head_dim = 48 .* supported are 64, 80, 96, 128, 160, 256; --backend refer"):
        backends.check_head_size("triton", 48)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    backends.check_head_size("triton", 48)


def test_dtypes() -> None:
    assert backends.choose_dtype("auto", "bfloat16", CPU) is torch.float32
    assert backends.choose_dtype("auto", "bfloat16", CUDA) is torch.bfloat16
    assert backends.choose_dtype("float16", "bfloat16", CUDA) is torch.float16
    with pytest.raises(StartError, match="dtype 'int8' is unknown; there are auto, float32"):
        backends.choose_dtype("int8", "bfloat16", CUDA)


def test_the_dtype_of_the_cache(device_of: Any) -> None:
    device_of((8, 9))
    assert backends.choose_cache_dtype("auto", "cpu", CPU, torch.float16) is torch.float16
    assert backends.choose_cache_dtype("fp8", "triton", CUDA, torch.bfloat16) is torch.float8_e4m3fn
    with pytest.raises(StartError, match="'fp8' is not supported by backend 'reference'; backend 'triton' does it"):
        backends.choose_cache_dtype("fp8", "reference", CUDA, torch.bfloat16)
    with pytest.raises(StartError, match="kv_cache_dtype 'int4' is unknown; there are auto, fp8"):
        backends.choose_cache_dtype("int4", "triton", CUDA, torch.bfloat16)
    device_of((8, 6))
    with pytest.raises(StartError, match=r"'fp8' needs .* 8\.9 or higher, Some GPU has 8\.6; --kv-cache-dtype auto"):
        backends.choose_cache_dtype("fp8", "triton", CUDA, torch.bfloat16)


def test_the_size_of_steps_follows_the_device() -> None:
    assert backends.step_limits(config(), CPU) == (64, 512)
    assert backends.step_limits(config(), CUDA) == (256, 8192)
    assert backends.step_limits(config(max_num_seqs=3), CUDA) == (3, 8192)
    assert backends.step_limits(config(max_num_batched_tokens=7), CPU) == (64, 7)


def test_the_fast_backend_of_the_cpu_cannot_be_batch_invariant(device_of: Any) -> None:
    device_of((9, 0))
    with pytest.raises(StartError, match="bits of backend 'cpu' depend on the batch; --backend reference is for it"):
        backends.choose_backend(config(batch_invariant=True), CPU)
    assert backends.choose_backend(config(batch_invariant=True), CUDA) == "triton"
    assert backends.choose_backend(config(batch_invariant=True, backend="reference"), CPU) == "reference"

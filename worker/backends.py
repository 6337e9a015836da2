"""Which device, kernels and dtypes a worker uses, and how large its steps are where nothing is said about it.

Whatever cannot work is refused by name before a weight is read.
"""

import os

import torch

from octavo.kernels.ops import get_ops
from octavo.worker.config import WorkerConfig
from octavo.worker.errors import StartError

HEAD_SIZES = (64, 80, 96, 128, 160, 256)
"""That the attention of backend triton is made and tested for."""
TRITON_CAPABILITY = (8, 0)
FP8_CAPABILITY = (8, 9)
"""Of a CUDA device that converts float8 in hardware."""

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_CACHE_DTYPES = ("auto", "fp8")
_MAX_NUM_SEQS = {"cpu": 64, "cuda": 256}
_MAX_NUM_BATCHED_TOKENS = {"cpu": 512, "cuda": 8192}
_WAY_OUT = "--backend reference runs without it, slowly"


def choose_device(name: str) -> torch.device:
    """Return the device of that name.

    Raises:
        StartError: there is none.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise StartError(f"device {name!r} is unknown; there are auto, cpu and cuda") from error
    if device.type not in ("cpu", "cuda"):
        raise StartError(f"device {name!r} is not supported; supported are cpu and cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise StartError(f"device {name!r} is not there: torch finds no CUDA device")
    if device.type == "cuda" and device.index is not None and device.index >= torch.cuda.device_count():
        raise StartError(f"device {name!r} is not there: torch finds {torch.cuda.device_count()} CUDA devices")
    return device


def is_interpreted() -> bool:
    """Say whether Triton's kernels run through its interpreter, which takes tensors of the CPU: for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def choose_backend(config: WorkerConfig, device: torch.device) -> str:
    """Return the name of the kernels that are asked for, or that fit the device.

    Raises:
        StartError: there are none of that name, or they do not run on this device or machine.
    """
    name = config.backend
    if name == "auto":
        name = "cpu" if device.type == "cpu" else "triton"
    if name == "triton":
        if device.type == "cpu" and not is_interpreted():
            raise StartError("backend 'triton' does not run on device 'cpu'; backends 'cpu' and 'reference' do")
        if device.type == "cuda":
            _require_capability(device, TRITON_CAPABILITY, "backend 'triton'", _WAY_OUT)
    try:
        get_ops(name)
    except ValueError as error:
        raise StartError(str(error)) from error
    except ImportError as error:
        raise StartError(f"backend {name!r} cannot be imported: {error}; install triton, or {_WAY_OUT}") from error
    if name == "cpu" and device.type != "cpu":
        raise StartError(f"backend {name!r} does not run on device {str(device)!r}; backend 'reference' does")
    if name == "cpu" and config.batch_invariant:
        raise StartError(
            "batch_invariant: the bits of backend 'cpu' depend on the batch; --backend reference is for it"
        )
    return name


def check_head_size(backend: str, head_size: int) -> None:
    """Refuse a model whose heads the kernels are not made for.

    Raises:
        StartError: as described.
    """
    # The interpreter runs tiny models in tests.
    if backend == "triton" and head_size not in HEAD_SIZES and not is_interpreted():
        raise StartError(
            f"head_dim = {head_size} is not supported by backend 'triton'; supported are "
            f"{', '.join(map(str, HEAD_SIZES))}; {_WAY_OUT}"
        )


def choose_dtype(name: str, of_checkpoint: str, device: torch.device) -> torch.dtype:
    """Return the dtype of weights and activations.

    Raises:
        StartError: the name is unknown.
    """
    chosen = ("float32" if device.type == "cpu" else of_checkpoint) if name == "auto" else name
    if chosen not in _DTYPES:
        raise StartError(f"dtype {name!r} is unknown; there are auto, {', '.join(_DTYPES)}")
    return _DTYPES[chosen]


def choose_cache_dtype(name: str, backend: str, device: torch.device, of_model: torch.dtype) -> torch.dtype:
    """Return the dtype of the KV cache.

    Raises:
        StartError: the name is unknown, or the backend or device cannot do it.
    """
    if name not in _CACHE_DTYPES:
        raise StartError(f"kv_cache_dtype {name!r} is unknown; there are {', '.join(_CACHE_DTYPES)}")
    if name == "auto":
        return of_model
    if backend != "triton":
        raise StartError(f"kv_cache_dtype 'fp8' is not supported by backend {backend!r}; backend 'triton' does it")
    if device.type == "cuda":
        _require_capability(device, FP8_CAPABILITY, "kv_cache_dtype 'fp8'", "--kv-cache-dtype auto runs without it")
    return torch.float8_e4m3fn


def step_limits(config: WorkerConfig, device: torch.device) -> tuple[int, int]:
    """Return max_num_seqs and max_num_batched_tokens, those of the device where the config says nothing."""
    seqs, tokens = config.max_num_seqs, config.max_num_batched_tokens
    return (
        _MAX_NUM_SEQS[device.type] if seqs is None else seqs,
        _MAX_NUM_BATCHED_TOKENS[device.type] if tokens is None else tokens,
    )


def _require_capability(device: torch.device, least: tuple[int, int], what: str, way_out: str) -> None:
    found = torch.cuda.get_device_capability(device)
    if found < least:
        raise StartError(
            f"{what} needs CUDA compute capability {least[0]}.{least[1]} or higher, {torch.cuda.get_device_name(device)} "
            f"has {found[0]}.{found[1]}; {way_out}"
        )

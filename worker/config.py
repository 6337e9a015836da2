"""What a worker is told at its start."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class WorkerConfig:
    """Settings of one worker process; names are vLLM's where it has them.

    What is None follows from the device: `octavo.worker.backends` says how.
    """

    model_path: Path
    address: str  # the scheduler's
    curve_keys: Path | None = None  # folder of the CURVE keys that tcp needs
    device: str = "auto"  # auto (cuda where there is one, else cpu), cpu or cuda
    backend: str = "auto"  # auto (triton on CUDA, else cpu), or a name that octavo.kernels.ops.get_ops knows
    dtype: str = "auto"  # auto: float32 on the CPU, the checkpoint's on a GPU
    block_size: int = 16  # tokens
    max_model_len: int | None = None  # None: the model's
    max_num_seqs: int | None = None  # rows; None: 64 on the CPU, 256 on CUDA
    max_num_batched_tokens: int | None = None  # most tokens of a step; None: 512 on the CPU, 8192 on CUDA
    gpu_memory_utilization: float = 0.9  # share of a CUDA device that this process may take, above 0, at most 1
    num_gpu_blocks_override: int | None = None  # blocks of the KV cache, whatever the device
    kv_cache_memory_bytes: int | None = None  # None: by utilisation on CUDA, 1 GiB on the CPU
    kv_cache_dtype: str = "auto"  # auto: that of the model; fp8: float8_e4m3fn
    enforce_eager: bool = False  # no CUDA graphs
    batch_invariant: bool = False  # the bits of a row's result do not depend on the other rows
    quantization: str | None = None  # None: as config.json says; fp8 of a plain checkpoint: quantised on load
    model_impl: str = "auto"  # auto, octavo (the described decoder) or transformers
    gguf: Path | None = None  # file that the weights are in; None: safetensors in model_path
    load_format: str = "auto"  # auto (what is there), safetensors, gguf, or dummy (random)
    num_threads: int | None = None  # None: torch's default
    seed: int = 0  # of dummy weights
    otlp_traces_endpoint: str | None = None  # collector that is told of rows in spans; None: nobody is
    step_timeout_s: float | None = None  # how long the loop may stand still; None: what suits the device
    model_name: str = ""  # what the label model_name of metrics says
    metrics_host: str = "127.0.0.1"
    metrics_port: int | None = None  # where this process alone answers GET /metrics; None: nowhere

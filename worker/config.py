"""What a worker is told at its start."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class WorkerConfig:
    """Settings of one worker process; names are vLLM's where it has them."""

    model_path: Path
    address: str  # the scheduler's
    device: str = "auto"  # auto (cuda where there is one, else cpu), cpu or cuda
    backend: str = "auto"  # auto, or a name that octavo.kernels.ops.get_ops knows
    dtype: str = "auto"  # auto: float32 on the CPU, the checkpoint's on a GPU
    block_size: int = 16  # tokens
    max_model_len: int | None = None  # None: the model's
    max_num_seqs: int = 64  # rows
    max_num_batched_tokens: int = 512  # most tokens of a step
    num_gpu_blocks_override: int | None = None  # blocks of the KV cache, whatever the device
    kv_cache_memory_bytes: int = 2**30
    load_format: str = "auto"  # auto (safetensors), or dummy (random)
    num_threads: int | None = None  # None: torch's default
    seed: int = 0  # of dummy weights

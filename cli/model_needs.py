"""What memory a model takes where nothing is chosen, and whether its files hold what its config asks for."""

import json
import subprocess
import sys
from dataclasses import asdict, dataclass

from octavo.cli.model_store import Model
from octavo.worker.models.description import ModelConfig

_TIMEOUT_S = 300
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
RESERVED_ON_CUDA = 2 * 2**30
"""For the context and for captured graphs, 1 GiB each; the largest step comes on top."""


@dataclass(frozen=True)
class MemoryNeed:
    """Of one kind of device.

    Attributes:
        device: cpu or cuda.
        dtype: of weights and KV cache there, unless another is chosen.
        weight_bytes: of the weights once they are loaded, also of those that become floats there.
        kv_cache_bytes_per_token: of keys and values.
        kv_cache_bytes: of one request of `max_model_len` tokens.
        reserved_bytes: beside them.
    """

    device: str
    dtype: str
    weight_bytes: int
    kv_cache_bytes_per_token: int
    kv_cache_bytes: int
    reserved_bytes: int

    @property
    def total_bytes(self) -> int:
        """For one request of full length."""
        return self.weight_bytes + self.kv_cache_bytes + self.reserved_bytes

    def as_json(self) -> dict[str, object]:
        """Return all figures."""
        return asdict(self) | {"total_bytes": self.total_bytes}


@dataclass(frozen=True)
class Needs:
    """What was found out; `problem` says why a worker would not read the files."""

    num_parameters: int | None
    memory: tuple[MemoryNeed, ...]
    problem: str | None


def find_needs(model: Model, config: ModelConfig, max_model_len: int) -> Needs:
    """Build the model without memory, in a process of its own, and compare it with its files."""
    command = [sys.executable, "-P", "-m", "octavo.worker.inspection", str(model.folder)]
    if model.gguf is not None:
        command.append(str(model.gguf))
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        answer = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return Needs(None, (), f"the model could not be built within {_TIMEOUT_S} s")
    except ValueError:
        last = [line for line in done.stderr.splitlines() if line.strip()][-1:]
        return Needs(None, (), f"the model cannot be built: {' '.join(last) or f'exit code {done.returncode}'}")
    sizes: dict[str, int] = answer["weight_bytes"]
    numbers = 2 * config.num_layers * config.num_kv_heads * config.head_size
    memory = tuple(
        MemoryNeed(
            device=device,
            dtype=dtype,
            weight_bytes=sizes[device],
            kv_cache_bytes_per_token=numbers * ITEM_BYTES[dtype],
            kv_cache_bytes=numbers * ITEM_BYTES[dtype] * max_model_len,
            reserved_bytes=reserved,
        )
        for device, dtype, reserved in (("cpu", "float32", 0), ("cuda", config.dtype, RESERVED_ON_CUDA))
        if device in sizes
    )
    return Needs(answer["num_parameters"], memory, answer["problem"])

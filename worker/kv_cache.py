"""The KV cache: how many blocks there are, and their memory."""

import math
import mmap
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.worker.config import WorkerConfig
from octavo.worker.errors import MemoryShortage
from octavo.worker.memory import DeviceMemory, free_and_total, in_words
from octavo.worker.models.cached import CachedHeads
from octavo.worker.models.interface import KVCache
from octavo.worker.models.targets import ShardSpec

MIN_BLOCKS = 2
"""Of a cache: the null block, and one to write to."""
DEFAULT_CPU_BYTES = 2**30
"""Of a cache on the CPU, where nothing else is asked for."""


@dataclass(frozen=True)
class CacheSpec:
    """What a block of one rank is, over all layers."""

    num_layers: int
    num_kv_heads: int  # of this rank
    block_size: int  # tokens
    head_size: int
    dtype: torch.dtype
    device: torch.device
    head_major: bool = False  # in memory a block's tokens lie together for each head, not its heads for each token

    @property
    def block_bytes(self) -> int:
        """Bytes that one block takes over all layers."""
        per_token: int = 2 * self.num_layers * self.num_kv_heads * self.head_size * self.dtype.itemsize
        return per_token * self.block_size


def spec_of(
    cached: CachedHeads, shard: ShardSpec, block_size: int, dtype: torch.dtype, device: torch.device, head_major: bool
) -> CacheSpec:
    """Return the blocks of a model's share.

    Raises:
        ModelConfigError: its KV heads cannot be split over the ranks.
    """
    kv_heads = shard.part(cached.num_kv_heads, "KV heads")
    num_kv_heads = kv_heads.stop - kv_heads.start
    return CacheSpec(cached.num_layers, num_kv_heads, block_size, cached.head_size, dtype, device, head_major)


def choose_num_blocks(config: WorkerConfig, spec: CacheSpec, memory: DeviceMemory | None) -> int:
    """Return the number of blocks, the null block included.

    The number that is asked for wins over the bytes that are asked for, these over the share of the device.

    Args:
        config: what is asked for.
        spec: the blocks.
        memory: of a CUDA device, as measured; None on the CPU.

    Raises:
        MemoryShortage: the blocks do not fit, or not even two do; the message names need, free and the flags to change.
    """
    each = spec.block_bytes
    if config.num_gpu_blocks_override is not None:
        flag, num_blocks = "--num-gpu-blocks-override", config.num_gpu_blocks_override
    elif config.kv_cache_memory_bytes is None and memory is not None:
        flag, num_blocks = "--gpu-memory-utilization", blocks_that_fit(memory, config.gpu_memory_utilization, each)
    else:
        flag = "--kv-cache-memory-bytes"
        asked = DEFAULT_CPU_BYTES if config.kv_cache_memory_bytes is None else config.kv_cache_memory_bytes
        num_blocks = asked // each
        if num_blocks < MIN_BLOCKS:
            raise MemoryShortage(
                f"the KV cache needs at least {MIN_BLOCKS} blocks of {each} bytes, kv_cache_memory_bytes = {asked}"
            )
    _require_room(num_blocks, spec, memory, flag)
    return num_blocks


def blocks_that_fit(memory: DeviceMemory, utilization: float, block_bytes: int) -> int:
    """Return how many blocks a process may have that takes a share of a device, whatever other processes take of it.

    utilization * total = context + peak (weights and largest step) + graphs + blocks * block_bytes

    Args:
        memory: of the device, as measured.
        utilization: share of `memory.total` that the process may take, above 0, at most 1.
        block_bytes: what one block takes over all layers.

    Raises:
        MemoryShortage: fewer than two blocks are left; the message names what takes the rest.
    """
    budget = int(memory.total * utilization)
    left = budget - memory.context - memory.peak - memory.graphs
    if left < MIN_BLOCKS * block_bytes:
        raise MemoryShortage(
            f"utilisation {utilization:g} of {in_words(memory.total)} is {in_words(budget)}, which leaves "
            f"{in_words(left) if left > 0 else 'nothing'} for the KV cache: weights {in_words(memory.weights)}, "
            f"activations {in_words(memory.activations)}, CUDA context {in_words(memory.context)}, "
            f"graphs {in_words(memory.graphs)}, {MIN_BLOCKS} blocks {in_words(MIN_BLOCKS * block_bytes)}; raise "
            f"--gpu-memory-utilization, or lower --max-num-batched-tokens or --max-num-seqs"
        )
    return left // block_bytes


def _require_room(num_blocks: int, spec: CacheSpec, memory: DeviceMemory | None, flag: str) -> None:
    """Refuse blocks that would not fit beside what else the process is going to take."""
    free, total = free_and_total(spec.device) if memory is None else (memory.free, memory.total)
    needed = num_blocks * spec.block_bytes
    owed = 0 if memory is None else memory.owed
    if needed + owed > free:
        steps = f", and steps {in_words(owed)} more" if owed else ""
        raise MemoryShortage(
            f"the KV cache needs {in_words(needed)} for {num_blocks} blocks{steps}; {in_words(free)} of "
            f"{in_words(total)} are free on {spec.device}; lower {flag}, or end other processes that use the memory"
        )


def allocate(spec: CacheSpec, num_blocks: int) -> list[KVCache]:
    """Allocate keys and values of every layer, zeroed; block 0 of each is the null block.

    Seen as [num_blocks, block_size, num_kv_heads, head_size]; with `spec.head_major` it lies in memory as [num_blocks,
    num_kv_heads, block_size, head_size], so that the tokens that one head reads of a block are contiguous. On the CPU
    the memory is reserved but not touched: it becomes resident as blocks are written.
    """
    return [KVCache(_zeros(spec, num_blocks), _zeros(spec, num_blocks)) for _ in range(spec.num_layers)]


def _zeros(spec: CacheSpec, num_blocks: int) -> Tensor:
    inner = (spec.num_kv_heads, spec.block_size) if spec.head_major else (spec.block_size, spec.num_kv_heads)
    shape = (num_blocks, *inner, spec.head_size)
    # As bytes: not every kernel of torch knows the 8-bit floats.
    num_bytes = math.prod(shape) * spec.dtype.itemsize
    if spec.device.type == "cpu":
        # torch.zeros would write every byte; anonymous memory is zero, and becomes resident only where it is written.
        memory = torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)
    else:
        memory = torch.zeros(num_bytes, dtype=torch.uint8, device=spec.device)
    cache = memory.view(spec.dtype).view(shape)
    return cache.transpose(1, 2) if spec.head_major else cache

"""The KV cache: how many blocks there are, and their memory."""

import math
import mmap

import psutil
import torch
from torch import Tensor

from octavo.worker.config import WorkerConfig
from octavo.worker.errors import MemoryShortage
from octavo.worker.models.config import ModelConfig
from octavo.worker.models.decoder import KVCache
from octavo.worker.models.layers import Placement, ShardSpec

MIN_BLOCKS = 2
"""Of a cache: the null block, and one to write to."""


def block_bytes(model: ModelConfig, shard: ShardSpec, block_size: int, dtype: torch.dtype) -> int:
    """Return the bytes that one block takes over all layers."""
    kv_heads = shard.part(model.num_kv_heads, "KV heads")
    per_token: int = 2 * model.num_layers * (kv_heads.stop - kv_heads.start) * model.head_size * dtype.itemsize
    return per_token * block_size


def allocate(config: WorkerConfig, model: ModelConfig, shard: ShardSpec, placement: Placement) -> list[KVCache]:
    """Allocate keys and values of every layer; block 0 of each is the null block.

    On the CPU the memory is reserved but not touched: it becomes resident as blocks are written.

    Raises:
        MemoryShortage: the blocks asked for do not fit, or not even two do.
    """
    each = block_bytes(model, shard, config.block_size, placement.dtype)
    num_blocks = config.kv_cache_memory_bytes // each
    if config.num_gpu_blocks_override is not None:
        num_blocks = config.num_gpu_blocks_override
    elif num_blocks < MIN_BLOCKS:
        raise MemoryShortage(
            f"the KV cache needs at least {MIN_BLOCKS} blocks of {each} bytes, "
            f"kv_cache_memory_bytes = {config.kv_cache_memory_bytes}"
        )
    needed, free = num_blocks * each, free_bytes(placement.device)
    if needed > free:
        raise MemoryShortage(f"the KV cache needs {needed} bytes for {num_blocks} blocks, {free} are free")
    kv_heads = shard.part(model.num_kv_heads, "KV heads")
    shape = (num_blocks, config.block_size, kv_heads.stop - kv_heads.start, model.head_size)
    return [KVCache(_zeros(shape, placement), _zeros(shape, placement)) for _ in range(model.num_layers)]


def _zeros(shape: tuple[int, ...], placement: Placement) -> Tensor:
    if placement.device.type != "cpu":
        return torch.zeros(shape, dtype=placement.dtype, device=placement.device)
    # torch.zeros would write every byte; anonymous memory is zero, and becomes resident only where it is written.
    memory = mmap.mmap(-1, math.prod(shape) * placement.dtype.itemsize)
    return torch.frombuffer(memory, dtype=placement.dtype).view(shape)


def free_bytes(device: torch.device) -> int:
    """Return the memory of a device that is not in use."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)

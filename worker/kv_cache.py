"""The KV cache: how many blocks there are, and their memory."""

import psutil
import torch

from octavo.worker.config import WorkerConfig
from octavo.worker.errors import MemoryShortage
from octavo.worker.models.config import ModelConfig
from octavo.worker.models.decoder import KVCache
from octavo.worker.models.layers import Placement, ShardSpec


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
    num_blocks = config.num_gpu_blocks_override or config.kv_cache_memory_bytes // each
    if num_blocks < 2:
        raise MemoryShortage(
            f"the KV cache needs at least 2 blocks of {each} bytes, kv_cache_memory_bytes = {config.kv_cache_memory_bytes}"
        )
    needed, free = num_blocks * each, _free_bytes(placement.device)
    if needed > free:
        raise MemoryShortage(f"the KV cache needs {needed} bytes for {num_blocks} blocks, {free} are free")
    kv_heads = shard.part(model.num_kv_heads, "KV heads")
    shape = (num_blocks, config.block_size, kv_heads.stop - kv_heads.start, model.head_size)
    # zeros, not empty: fresh zero pages cost nothing until they are written, and hold no NaN.
    return [
        KVCache(*(torch.zeros(shape, dtype=placement.dtype, device=placement.device) for _ in range(2)))
        for _ in range(model.num_layers)
    ]


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)

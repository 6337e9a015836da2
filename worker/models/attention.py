"""The attention of a layer: projections, rotary embedding, paged keys and values."""

import torch
from torch import Tensor

from octavo.kernels.ops import Ops
from octavo.worker.models.description import LayerConfig, ModelConfig
from octavo.worker.models.interface import Batch, KVCache
from octavo.worker.models.layers import ColumnParallel, Norm, RowParallel
from octavo.worker.models.mlp import stacked
from octavo.worker.models.targets import Placement, ShardSpec
from octavo.worker.quantization.scheme import Projection, Quantization


class Attention:
    """Causal attention of one layer."""

    def __init__(
        self,
        config: ModelConfig,
        layer: LayerConfig,
        placement: Placement,
        shard: ShardSpec,
        prefix: str,
        quantization: Quantization,
    ) -> None:
        names, head = config.names, config.head_size
        heads = shard.part(config.num_heads, "attention heads")
        kv_heads = shard.part(config.num_kv_heads, "KV heads")
        q_part, kv_part = _times(heads, head), _times(kv_heads, head)
        self._head_size = head
        self._scale = head**-0.5 if config.attention_scale is None else config.attention_scale
        self._window, self._softcap = layer.window, config.attention_softcap
        self._sizes = [part.stop - part.start for part in (q_part, kv_part, kv_part)]
        self._qkv = ColumnParallel(
            placement,
            config.hidden_size,
            _qkv_projections(config, prefix, q_part, kv_part, kv_heads, shard),
            config.qkv_bias,
            quantization,
            transposed=config.transposed,
        )
        self._output = RowParallel(
            placement,
            f"{prefix}.{names.output}",
            config.num_heads * head,
            q_part,
            config.hidden_size,
            config.output_bias,
            quantization,
            transposed=config.transposed,
        )
        norm = config.qk_norm
        self._q_norm = Norm(placement, head, norm, f"{prefix}.{names.q_norm}") if norm else None
        self._k_norm = Norm(placement, head, norm, f"{prefix}.{names.k_norm}") if norm else None
        self._norm_eps = norm.eps if norm else 0.0
        self._unit_offset = norm.unit_offset if norm else False
        self.targets = self._qkv.targets | self._output.targets
        for head_norm in (self._q_norm, self._k_norm):
            self.targets |= head_norm.targets if head_norm else {}

    def finish_loading(self, ops: Ops) -> None:
        """Bring the weights into the backend's form; targets are invalid from here on."""
        self._qkv.finish_loading(ops)
        self._output.finish_loading(ops)
        self.targets.clear()

    def __call__(self, ops: Ops, x: Tensor, cos_sin: Tensor, batch: Batch, cache: KVCache) -> Tensor:
        """[T, hidden_size] -> this rank's share of the sum [T, hidden_size]; keys and values go to the cache."""
        num_tokens = x.shape[0]
        q, k, v = torch.split(self._qkv(ops, x), self._sizes, dim=-1)
        q, k, v = (part.view(num_tokens, -1, self._head_size) for part in (q, k, v))
        q = ops.rotary_and_write_kv(
            q,
            k,
            v,
            batch.positions,
            cos_sin,
            cache.keys,
            cache.values,
            batch.slot_mapping,
            self._q_norm.weight if self._q_norm else None,
            self._k_norm.weight if self._k_norm else None,
            self._norm_eps,
            unit_offset=self._unit_offset,
        )
        attended = ops.paged_attention(
            q,
            cache.keys,
            cache.values,
            batch.block_tables,
            batch.query_start,
            batch.seq_lens,
            self._scale,
            num_decodes=batch.num_decodes,
            window=self._window,
            softcap=self._softcap,
        )
        return self._output(ops, attended.view(num_tokens, -1))


def _qkv_projections(
    config: ModelConfig, prefix: str, q_part: slice, kv_part: slice, kv_heads: slice, shard: ShardSpec
) -> tuple[Projection, ...]:
    names, head = config.names.qkv, config.head_size
    q_size, kv_size = config.num_heads * head, config.num_kv_heads * head
    if len(names) > 1:
        sizes, parts = (q_size, kv_size, kv_size), (q_part, kv_part, kv_part)
        orders = (_by_halves(config, q_part), _by_halves(config, kv_part), None)
        return tuple(
            Projection(f"{prefix}.{name}", size, part, order)
            for name, size, part, order in zip(names, sizes, parts, orders, strict=True)
        )
    if not config.qkv_by_group:
        fused = stacked(f"{prefix}.{names[0]}", [q_size, kv_size, kv_size], [q_part, kv_part, kv_part], shard)
        return (fused,)
    total, group = q_size + 2 * kv_size, config.num_heads // config.num_kv_heads
    rows = torch.arange(total).view(config.num_kv_heads, group + 2, head)[kv_heads]
    order = torch.cat([rows[:, :group].flatten(), rows[:, group].flatten(), rows[:, group + 1].flatten()])
    return (Projection(f"{prefix}.{names[0]}", total, slice(0, total), order),)


def _by_halves(config: ModelConfig, part: slice) -> Tensor | None:
    """Return a part's lines such that what the model rotates as neighbours lies in the halves of a head; None: as it is.

    Queries and keys are put into the same order, so their products stay what they are.
    """
    if not config.rotates_neighbours:
        return None
    rotated = config.ropes[0].num_rotated(config.head_size)
    lines = torch.arange(part.start, part.stop).view(-1, config.head_size)
    return torch.cat([lines[:, :rotated:2], lines[:, 1:rotated:2], lines[:, rotated:]], dim=1).flatten()


def _times(part: slice, factor: int) -> slice:
    return slice(part.start * factor, part.stop * factor)

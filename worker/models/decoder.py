"""The decoder: embedding, layers of attention and gated MLP, norm, output head; described by a ModelConfig."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.kernels.ops import Ops
from octavo.worker.models.config import ModelConfig
from octavo.worker.models.layers import ColumnParallel, Placement, RowParallel, ShardSpec, Target, whole
from octavo.worker.models.rope import inverse_frequencies

IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)
"""Tensors that old checkpoints carry and nobody reads: the tables are computed."""


@dataclass(frozen=True)
class Batch:
    """One forward pass over rows of any length; T tokens, R rows, S of which want logits."""

    input_ids: Tensor  # [T] integer
    positions: Tensor  # [T] integer
    slot_mapping: Tensor  # [T] int64: where each token's keys and values go; -1: nowhere
    block_tables: Tensor  # [R, max_blocks] int32
    query_start: Tensor  # [R + 1] int32
    seq_lens: Tensor  # [R] int32
    logits_index: Tensor | None  # [S] integer: tokens whose logits are wanted; None: all
    num_decodes: int = 0  # so many rows come first that have one token each, or none where they are padding


@dataclass(frozen=True)
class KVCache:
    """Keys and values of one layer: [num_blocks, block_size, num_kv_heads, head_size] each."""

    keys: Tensor
    values: Tensor


class Hidden(NamedTuple):
    """What the layers made of T tokens: their last output [T, hidden_size], and the residual that it is added to."""

    x: Tensor
    residual: Tensor | None


class Decoder:
    """A decoder with the parameters of one rank."""

    def __init__(
        self, config: ModelConfig, ops: Ops, placement: Placement, shard: ShardSpec, max_positions: int
    ) -> None:
        self.config = config
        self._ops = ops
        self._embedding = placement.empty(config.vocab_size, config.hidden_size)
        self._layers = [_Layer(config, placement, shard, f"model.layers.{i}") for i in range(config.num_layers)]
        self._norm = placement.empty(config.hidden_size)
        self._head = (
            self._embedding if config.tied_embeddings else placement.empty(config.vocab_size, config.hidden_size)
        )
        self._cos_sin = ops.rotary_cos_sin(inverse_frequencies(config.rope, config.head_size), max_positions).to(
            placement.device
        )

    def targets(self) -> dict[str, Target]:
        """Return where each tensor of a checkpoint goes."""
        targets = {"model.embed_tokens.weight": whole(self._embedding), "model.norm.weight": whole(self._norm)}
        if not self.config.tied_embeddings:
            targets["lm_head.weight"] = whole(self._head)
        for layer in self._layers:
            targets |= layer.targets
        return targets

    def finish_loading(self) -> None:
        """Bring all weights into the backend's form; called once, after the last tensor was loaded."""
        for layer in self._layers:
            layer.finish_loading(self._ops)
        self._head = self._ops.prepare_weight(self._head)

    def empty_logits(self, num_rows: int) -> Tensor:
        """Return memory for logits: [num_rows, vocab_size] in the dtype of `forward`."""
        return self._norm.new_empty(num_rows, self.config.vocab_size)

    def is_ignored(self, name: str) -> bool:
        """Say whether a checkpoint may hold this tensor without anybody reading it."""
        return name.endswith(IGNORED_SUFFIXES) or (self.config.tied_embeddings and name == "lm_head.weight")

    @torch.inference_mode()
    def forward(self, batch: Batch, caches: list[KVCache]) -> Tensor:
        """Compute the batch's tokens, store their keys and values, and return logits.

        Returns:
            [S, vocab_size] in the model's dtype.
        """
        return self.logits(self.hidden(batch, caches), batch.logits_index)

    @torch.inference_mode()
    def hidden(self, batch: Batch, caches: list[KVCache]) -> Hidden:
        """Compute the batch's tokens and store their keys and values; return what logits are made of."""
        x = torch.nn.functional.embedding(batch.input_ids, self._embedding)
        residual: Tensor | None = None
        for layer, cache in zip(self._layers, caches, strict=True):
            x, residual = layer.forward(self._ops, x, residual, self._cos_sin, batch, cache)
        return Hidden(x, residual)

    @torch.inference_mode()
    def logits(self, hidden: Hidden, wanted: Tensor | None) -> Tensor:
        """Return the logits of some tokens of a batch.

        Args:
            hidden: of the batch.
            wanted: [S] integer: which tokens; None: all.

        Returns:
            [S, vocab_size] in the model's dtype.
        """
        x, residual = hidden
        if wanted is not None:
            x, residual = x[wanted], None if residual is None else residual[wanted]
        x, _ = self._ops.rms_norm(x, self._norm, self.config.rms_norm_eps, residual)
        return self._ops.linear(x, self._head)


class _Layer:
    def __init__(self, config: ModelConfig, placement: Placement, shard: ShardSpec, prefix: str) -> None:
        head = config.head_size
        heads = shard.part(config.num_heads, "attention heads (num_attention_heads)")
        kv_heads = shard.part(config.num_kv_heads, "KV heads (num_key_value_heads)")
        inner = shard.part(config.intermediate_size, "features of the MLP (intermediate_size)")
        q_part, kv_part = _times(heads, head), _times(kv_heads, head)
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        self._eps = config.rms_norm_eps
        self._head_size = head
        self._scale = head**-0.5
        self._input_norm = placement.empty(config.hidden_size)
        self._qkv = ColumnParallel(
            placement,
            config.hidden_size,
            {
                f"{attention}.q_proj": (config.num_heads * head, q_part),
                f"{attention}.k_proj": (config.num_kv_heads * head, kv_part),
                f"{attention}.v_proj": (config.num_kv_heads * head, kv_part),
            },
            config.qkv_bias,
        )
        self._output = RowParallel(
            placement,
            f"{attention}.o_proj",
            config.num_heads * head,
            q_part,
            config.hidden_size,
            config.output_bias,
        )
        self._q_norm = placement.empty(head) if config.qk_norm else None
        self._k_norm = placement.empty(head) if config.qk_norm else None
        self._mlp_norm = placement.empty(config.hidden_size)
        self._gate_up = ColumnParallel(
            placement,
            config.hidden_size,
            dict.fromkeys((f"{mlp}.gate_proj", f"{mlp}.up_proj"), (config.intermediate_size, inner)),
            config.mlp_bias,
        )
        self._down = RowParallel(
            placement, f"{mlp}.down_proj", config.intermediate_size, inner, config.hidden_size, config.mlp_bias
        )
        self.targets: dict[str, Target] = {
            f"{prefix}.input_layernorm.weight": whole(self._input_norm),
            f"{prefix}.post_attention_layernorm.weight": whole(self._mlp_norm),
            **self._qkv.targets,
            **self._output.targets,
            **self._gate_up.targets,
            **self._down.targets,
        }
        for name, norm in (("q_norm", self._q_norm), ("k_norm", self._k_norm)):
            if norm is not None:
                self.targets[f"{attention}.{name}.weight"] = whole(norm)

    def finish_loading(self, ops: Ops) -> None:
        for projection in (self._qkv, self._output, self._gate_up, self._down):
            projection.finish_loading(ops)
        self.targets.clear()

    def forward(
        self, ops: Ops, x: Tensor, residual: Tensor | None, cos_sin: Tensor, batch: Batch, cache: KVCache
    ) -> tuple[Tensor, Tensor]:
        num_tokens = x.shape[0]
        x, residual = ops.rms_norm(x, self._input_norm, self._eps, residual)
        q, k, v = torch.split(self._qkv(ops, x), self._qkv.sizes, dim=-1)
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
            self._q_norm,
            self._k_norm,
            self._eps,
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
        )
        x = self._output(ops, attended.view(num_tokens, -1))
        x, residual = ops.rms_norm(x, self._mlp_norm, self._eps, residual)
        return self._down(ops, self._gate_up.gated(ops, x)), residual


def _times(part: slice, factor: int) -> slice:
    return slice(part.start * factor, part.stop * factor)

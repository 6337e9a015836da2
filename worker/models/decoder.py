"""The decoder: embedding, layers of attention and MLP, norm, output head; described by a ModelConfig."""

import torch
from torch import Tensor

from octavo.kernels.ops import Ops, Prepared
from octavo.worker.errors import ModelConfigError
from octavo.worker.models.attention import Attention
from octavo.worker.models.description import ExpertsConfig, LayerConfig, ModelConfig
from octavo.worker.models.interface import Batch, Hidden, KVCache
from octavo.worker.models.layers import Linear, Norm
from octavo.worker.models.mlp import Mlp
from octavo.worker.models.rope import rotary_table
from octavo.worker.models.targets import Placement, ShardSpec, Target, whole
from octavo.worker.quantization.plain import Unquantized
from octavo.worker.quantization.scheme import LinearShape, Projection, Quantization

_UNQUANTIZED = Unquantized()


class Decoder:
    """A decoder with the parameters of one rank."""

    def __init__(
        self,
        config: ModelConfig,
        ops: Ops,
        placement: Placement,
        shard: ShardSpec,
        max_positions: int,
        quantization: Quantization = _UNQUANTIZED,
    ) -> None:
        self.config = config
        self._ops = ops
        names = config.names
        self._embedding = placement.empty(config.vocab_size, config.hidden_size)
        self._positions = placement.empty(config.positions.num_lines, config.hidden_size) if config.positions else None
        self._layers = [
            _Layer(config, layer, placement, shard, names.layer.format(i), quantization)
            for i, layer in enumerate(config.layers)
        ]
        self._norm = Norm(placement, config.hidden_size, config.norm, names.final_norm)
        self._head = None if config.tied_embeddings else _make_head(config, placement, quantization)
        self._tied_head: Prepared = None  # the embedding, prepared for products
        self._cos_sin = [rotary_table(ops, rope, config.head_size, max_positions, placement) for rope in config.ropes]
        self._no_rotation = rotary_table(ops, None, config.head_size, max_positions, placement)

    def targets(self) -> dict[str, Target]:
        """Return where each tensor of a checkpoint goes."""
        names = self.config.names
        targets = {f"{names.embedding}.weight": whole(self._embedding)} | self._norm.targets
        if self._positions is not None:
            targets[f"{names.positions}.weight"] = whole(self._positions)
        if self._head is not None:
            targets |= self._head.targets
        for layer in self._layers:
            targets |= layer.targets
        return targets

    def name_of(self, name: str) -> str:
        """Return what `targets` calls a tensor of the checkpoint: some leave out a prefix, or have another one."""
        return self.config.names.full(name)

    def is_ignored(self, name: str) -> bool:
        """Say whether a checkpoint may hold this tensor without anybody reading it."""
        tied = self.config.tied_embeddings and name == f"{self.config.names.head}.weight"
        return tied or name.endswith(self.config.ignored) or name.startswith(self.config.ignored_parts)

    def finish_loading(self) -> None:
        """Bring all weights into the backend's form; called once, after the last tensor was loaded."""
        for layer in self._layers:
            layer.finish_loading(self._ops)
        if self._head is not None:
            self._head.finish_loading(self._ops)
        else:
            self._tied_head = self._ops.prepare_weight(self._embedding, self._embedding.dtype)

    def empty_logits(self, num_rows: int) -> Tensor:
        """Return memory for logits: [num_rows, vocab_size] in the dtype of `forward`."""
        return self._embedding.new_empty(num_rows, self.config.vocab_size)

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
        if self.config.embedding_scale != 1.0:
            x = x * torch.tensor(self.config.embedding_scale, dtype=x.dtype).item()  # rounded as transformers does
        if self.config.positions is not None and self._positions is not None:
            x = x + torch.nn.functional.embedding(batch.positions + self.config.positions.offset, self._positions)
        residual: Tensor | None = None
        for layer, cache in zip(self._layers, caches, strict=True):
            rope = layer.config.rope
            cos_sin = self._no_rotation if rope is None else self._cos_sin[rope]
            x, residual = layer.forward(self._ops, x, residual, cos_sin, batch, cache)
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
        x, _ = self._norm(self._ops, x, residual)
        logits = self._ops.linear(x, self._tied_head) if self._head is None else self._head(self._ops, x)
        cap = self.config.final_softcap
        return logits if not cap else torch.tanh(logits / cap) * cap


def _make_head(config: ModelConfig, placement: Placement, quantization: Quantization) -> Linear:
    projection = Projection(config.names.head, config.vocab_size, slice(0, config.vocab_size))
    shape = LinearShape((projection,), config.hidden_size, slice(0, config.hidden_size), config.head_bias)
    bias = placement.empty(config.vocab_size) if config.head_bias else None
    return Linear(placement, shape, bias, adds_bias=True, quantization=quantization)


class _Layer:
    """Attention and MLP with the norms before them, and behind them where the model has those."""

    def __init__(
        self,
        config: ModelConfig,
        layer: LayerConfig,
        placement: Placement,
        shard: ShardSpec,
        prefix: str,
        quantization: Quantization,
    ) -> None:
        if isinstance(layer.mlp, ExpertsConfig):
            raise ModelConfigError(f"{prefix}: experts are not supported")
        names = config.names

        def norm(name: str) -> Norm | None:
            return Norm(placement, config.hidden_size, config.norm, f"{prefix}.{name}") if name else None

        self.config = layer
        self._residual = config.residual
        self._input_norm = Norm(placement, config.hidden_size, config.norm, f"{prefix}.{names.input_norm}")
        self._attention = Attention(config, layer, placement, shard, prefix, quantization)
        self._post_attention_norm = norm(names.post_attention_norm)
        self._mlp_norm = norm(names.mlp_norm)
        self._mlp = Mlp(config, layer.mlp, placement, shard, prefix, quantization)
        self._post_mlp_norm = norm(names.post_mlp_norm)
        self.targets: dict[str, Target] = self._attention.targets | self._mlp.targets
        for part in (self._input_norm, self._post_attention_norm, self._mlp_norm, self._post_mlp_norm):
            self.targets |= part.targets if part else {}

    def finish_loading(self, ops: Ops) -> None:
        self._attention.finish_loading(ops)
        self._mlp.finish_loading(ops)
        self.targets.clear()

    def forward(
        self, ops: Ops, x: Tensor, residual: Tensor | None, cos_sin: Tensor, batch: Batch, cache: KVCache
    ) -> tuple[Tensor, Tensor]:
        """Take the last part's output and the sum before it; return the same for the next layer."""
        x, residual = self._input_norm(ops, x, residual)
        attended = self._attention(ops, x, cos_sin, batch, cache)
        if self._residual == "parallel":
            read = x if self._mlp_norm is None else self._mlp_norm(ops, residual)[0]
            return attended + self._mlp(ops, read), residual
        if self._post_attention_norm is not None:
            attended, _ = self._post_attention_norm(ops, attended)
        if self._mlp_norm is not None:
            x, residual = self._mlp_norm(ops, attended, residual)
        x = self._mlp(ops, x)
        if self._post_mlp_norm is not None:
            x, _ = self._post_mlp_norm(ops, x)
        return x, residual

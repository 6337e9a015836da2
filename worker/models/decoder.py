"""The decoder: embedding, layers of attention and MLP, norm, output head; described by a ModelConfig."""

import torch
from torch import Tensor

from octavo.kernels.ops import Ops, Prepared
from octavo.worker.models.attention import Attention
from octavo.worker.models.description import ExpertsConfig, LayerConfig, ModelConfig
from octavo.worker.models.experts import Experts
from octavo.worker.models.interface import Batch, Hidden, KVCache
from octavo.worker.models.layers import Linear, Norm
from octavo.worker.models.mlp import Mlp
from octavo.worker.models.rope import rotary_table
from octavo.worker.models.targets import Placement, ShardSpec, Target, whole
from octavo.worker.quantization.layers import OnLoadScheme
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
        size = config.embedding_size or config.hidden_size
        self._embedding = placement.empty(config.vocab_size, size)
        # Rounded as transformers does.
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=placement.dtype).item()
        self._project_in = _projection(placement, names.project_in, size, config.hidden_size)
        self._project_out = _projection(placement, names.project_out, config.hidden_size, size)
        self._positions = placement.empty(config.positions.num_lines, config.hidden_size) if config.positions else None
        self._layers = [
            _Layer(config, layer, placement, shard, names.layer.format(i), quantization)
            for i, layer in enumerate(config.layers)
        ]
        self._norm = Norm(placement, config.hidden_size, config.norm, names.final_norm) if names.final_norm else None
        self._head = None if config.tied_embeddings else _make_head(config, size, placement, quantization)
        self._tied_head: Prepared = None  # the embedding, prepared for products
        self._head_scheme = quantization.scheme_of(names.head)
        self._cos_sin = [rotary_table(ops, rope, config.head_size, max_positions, placement) for rope in config.ropes]
        self._no_rotation = rotary_table(ops, None, config.head_size, max_positions, placement)

    def targets(self) -> dict[str, Target]:
        """Return where each tensor of a checkpoint goes."""
        names = self.config.names
        targets = {f"{names.embedding}.weight": whole(self._embedding)}
        if self._positions is not None:
            targets[f"{names.positions}.weight"] = whole(self._positions)
        for part in (self._project_in, self._norm, self._project_out, self._head, *self._layers):
            targets |= part.targets if part else {}
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
        for part in (self._project_in, self._project_out, self._head, *self._layers):
            if part is not None:
                part.finish_loading(self._ops)
        if self._head is None:
            scheme, weight = self._head_scheme, self._embedding
            head = scheme.quantize(weight) if isinstance(scheme, OnLoadScheme) else weight
            self._tied_head = self._ops.prepare_weight(head, weight.dtype)

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
            x = x * self._embedding_scale
        if self._project_in is not None:
            x = self._project_in(self._ops, x)
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
        x, _ = _normed_sum(self._ops, self._norm, x, residual)
        if self._project_out is not None:
            x = self._project_out(self._ops, x)
        logits = self._ops.linear(x, self._tied_head) if self._head is None else self._head(self._ops, x)
        if self.config.logit_scale != 1.0:
            logits = logits * self.config.logit_scale
        cap = self.config.final_softcap
        return self._ops.soft_cap(logits, cap) if cap else logits


def _projection(placement: Placement, prefix: str, in_features: int, out_features: int) -> Linear | None:
    """Return a product between embeddings and layers, which formats of layers' weights leave as it is; None: none."""
    if not prefix:
        return None
    projection = Projection(prefix, out_features, slice(0, out_features))
    shape = LinearShape((projection,), in_features, slice(0, in_features))
    return Linear(placement, shape, None, adds_bias=False, quantization=_UNQUANTIZED)


def _make_head(config: ModelConfig, in_features: int, placement: Placement, quantization: Quantization) -> Linear:
    projection = Projection(config.names.head, config.vocab_size, slice(0, config.vocab_size))
    shape = LinearShape((projection,), in_features, slice(0, in_features), config.head_bias)
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
        names = config.names

        def norm(name: str) -> Norm | None:
            return Norm(placement, config.hidden_size, config.norm, f"{prefix}.{name}") if name else None

        self.config = layer
        self._residual = config.residual
        self._input_norm = norm(names.input_norm)
        self._attention = Attention(config, layer, placement, shard, prefix, quantization)
        self._post_attention_norm = norm(names.post_attention_norm)
        self._mlp_norm = norm(names.mlp_norm)
        self._mlp: Mlp | Experts = (
            Experts(config, layer.mlp, placement, shard, prefix, quantization)
            if isinstance(layer.mlp, ExpertsConfig)
            else Mlp(config, layer.mlp, placement, shard, prefix, quantization)
        )
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
    ) -> tuple[Tensor, Tensor | None]:
        """Take the last part's output and the sum before it (None: the output is all); return them for the next layer."""
        if self._residual == "post":
            attended = self._attention(ops, x, cos_sin, batch, cache)
            x, _ = _normed_sum(ops, self._post_attention_norm, attended, x)
            x, _ = _normed_sum(ops, self._post_mlp_norm, self._mlp(ops, x), x)
            return x, None
        x, residual = _normed_sum(ops, self._input_norm, x, residual)
        attended = self._attention(ops, x, cos_sin, batch, cache)
        if self._residual == "parallel":
            read = x if self._mlp_norm is None else self._mlp_norm(ops, residual)[0]
            return attended + self._mlp(ops, read), residual
        if self._post_attention_norm is not None:
            attended, _ = self._post_attention_norm(ops, attended)
        x, residual = _normed_sum(ops, self._mlp_norm, attended, residual)
        x = self._mlp(ops, x)
        if self._post_mlp_norm is not None:
            x, _ = self._post_mlp_norm(ops, x)
        return x, residual


def _normed_sum(ops: Ops, norm: Norm | None, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the norm, if there is one, of the sum of x and the residual, and the sum."""
    if norm is not None:
        return norm(ops, x, residual)
    total = x if residual is None else x + residual
    return total, total

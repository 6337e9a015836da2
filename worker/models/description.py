"""What a decoder is made of: the description that config.json is read into and the decoder is built from."""

from dataclasses import dataclass, field
from typing import Any, Literal

from octavo.kernels.activations import Activation
from octavo.worker.models.cached import CachedHeads
from octavo.worker.models.rope_config import RopeConfig


@dataclass(frozen=True)
class NormConfig:
    """A norm over the hidden size, or over a head.

    rms: ``x * rsqrt(mean(x ** 2) + eps)``, times the weight, or times (1 + weight) where `unit_offset`; layer: mean and
    variance, weight and bias.
    """

    kind: Literal["rms", "layer"]
    eps: float
    unit_offset: bool = False
    has_bias: bool = True  # of a layer norm


@dataclass(frozen=True)
class MlpConfig:
    """``down(act(gate(x)) * up(x))`` where gated, else ``down(act(up(x)))``."""

    size: int
    activation: Activation = "silu"
    is_gated: bool = True
    has_bias: bool = False


@dataclass(frozen=True)
class ExpertsConfig:
    """A gated MLP for each expert; a token goes to the `top_k` that the router gives the most weight.

    A shared expert, where there is one, takes all tokens beside them: ``sigmoid(gate(x)) * mlp(x)`` is added.
    """

    num_experts: int
    top_k: int
    size: int  # of each expert
    renormalize: bool  # whether the weights of the chosen ones are made to sum to 1
    activation: Activation = "silu"
    shared: MlpConfig | None = None


@dataclass(frozen=True)
class LayerConfig:
    """What may differ from layer to layer."""

    mlp: MlpConfig | ExpertsConfig
    window: int = 0  # tokens that attention sees; 0: all
    rope: int | None = 0  # index into the model's rotary embeddings; None: none


@dataclass(frozen=True)
class LearnedPositions:
    """A table of embeddings that are added to those of the ids; position p takes line p + offset."""

    num_lines: int
    offset: int = 0


@dataclass(frozen=True)
class TensorNames:
    """What a checkpoint calls the tensors, without .weight and .bias; those of a layer follow its prefix."""

    embedding: str = "model.embed_tokens"
    positions: str = ""
    layer: str = "model.layers.{}"
    project_in: str = ""  # from the size of the embeddings to the hidden size, and back before the head
    project_out: str = ""
    final_norm: str = "model.norm"  # "" of any norm: none; what it would stand before reads the sum itself
    head: str = "lm_head"
    input_norm: str = "input_layernorm"
    post_attention_norm: str = ""  # of the attention's output, before it is added (residual "sandwich"), or after
    mlp_norm: str = "post_attention_layernorm"  # "": the MLP reads what the attention reads (residual "parallel")
    post_mlp_norm: str = ""
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")  # or one that is fused
    output: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")  # or one: fused, or of an MLP that is not gated
    down: str = "mlp.down_proj"
    router: str = "mlp.gate"
    expert: str = "mlp.experts.{}"
    expert_up: tuple[str, str] = ("gate_proj", "up_proj")
    expert_down: str = "down_proj"
    shared_up: tuple[str, ...] = ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj")
    shared_down: str = "mlp.shared_expert.down_proj"
    shared_gate: str = "mlp.shared_expert_gate"
    optional_prefix: str = ""  # of all names but the head's, which some checkpoints leave out
    renamed: tuple[tuple[str, str], ...] = ()  # how some checkpoints begin names, and how they begin here

    def full(self, name: str) -> str:
        """Return what the decoder calls a tensor of a checkpoint."""
        for theirs, ours in self.renamed:
            if name.startswith(theirs):
                name = ours + name.removeprefix(theirs)
        if not self.optional_prefix or name.startswith((self.optional_prefix, f"{self.head}.")):
            return name
        return self.optional_prefix + name


@dataclass(frozen=True)
class ModelConfig:
    """A decoder.

    The residual is built in one of four ways: "pre": each part reads a norm of the sum so far and is added to it;
    "sandwich": as before, and a norm stands behind each part too; "parallel": attention and MLP read the same sum; "post":
    each part reads the sum, and a norm stands behind each addition.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    max_positions: int
    norm: NormConfig
    layers: tuple[LayerConfig, ...]
    tied_embeddings: bool
    dtype: str  # of the checkpoint: float32, float16 or bfloat16
    ropes: tuple[RopeConfig, ...] = ()
    rotates_neighbours: bool = False  # dimensions 2i and 2i + 1 against each other, not those of the halves
    positions: LearnedPositions | None = None
    residual: Literal["pre", "sandwich", "parallel", "post"] = "pre"
    qkv_bias: bool = False
    output_bias: bool = False  # of the attention's output projection
    qkv_by_group: bool = False  # a fused projection holds, for each KV head, its query heads, then key, then value
    qk_norm: NormConfig | None = None  # of each head of queries and keys, before the rotary embedding
    attention_scale: float | None = None  # None: head_size ** -0.5
    attention_softcap: float = 0.0  # 0: none
    logit_scale: float = 1.0  # logits are multiplied by it
    final_softcap: float = 0.0
    embedding_size: int | None = None  # None: hidden_size; else there are projections between the two
    embedding_scale: float = 1.0
    head_bias: bool = False
    transposed: bool = False  # matrices of the layers are stored as [inputs, outputs]
    names: TensorNames = field(default_factory=TensorNames)
    ignored: tuple[str, ...] = ()  # ends of names of tensors that nobody reads
    ignored_parts: tuple[str, ...] = ()  # beginnings of such names: whole parts of a model, as the one that sees images
    quantization: dict[str, Any] | None = None  # quantization_config as it stands

    @property
    def num_layers(self) -> int:
        """Layers of the decoder."""
        return len(self.layers)

    @property
    def cached(self) -> CachedHeads:
        """What a KV cache holds of a token."""
        return CachedHeads(self.num_layers, self.num_kv_heads, self.head_size)

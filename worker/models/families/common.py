"""What several families read alike from config.json."""

from typing import Any, NamedTuple, TypedDict

from octavo.kernels.activations import Activation
from octavo.worker.errors import ModelConfigError
from octavo.worker.models.description import NormConfig
from octavo.worker.models.fields import Fields

ROTARY_TABLES = (".rotary_emb.inv_freq",)
"""Tensors that old checkpoints carry and nobody reads: the tables are computed."""

FULL, SLIDING = "full_attention", "sliding_attention"
"""What layer_types calls a layer whose tokens see all earlier ones, and one with a window."""

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}

_MOST_LAYERS = 2**12


class Heads(NamedTuple):
    """Heads of the attention."""

    num_heads: int
    num_kv_heads: int
    head_size: int


class Common(TypedDict):
    """What all families say alike of a ModelConfig."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    dtype: str
    quantization: dict[str, Any] | None


def read_common(architecture: str, fields: Fields, heads: Heads, *, hidden: str = "hidden_size") -> Common:
    """Read what all families say alike.

    Args:
        architecture: its name.
        fields: of config.json.
        heads: that were read.
        hidden: what config.json calls the hidden size.

    Raises:
        ModelConfigError: a value is missing, malformed or unsupported.
    """
    return Common(
        architecture=architecture,
        vocab_size=fields.count("vocab_size"),
        hidden_size=fields.count(hidden),
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_size=heads.head_size,
        dtype=read_dtype(fields),
        quantization=fields.raw("quantization_config"),
    )


def read_heads(fields: Fields, default_size: int | None = None, *, rotates: bool = True) -> Heads:
    """Read num_attention_heads, num_key_value_heads and head_dim.

    Args:
        fields: of config.json.
        default_size: of a head without head_dim; None: what hidden_size gives to each head.
        rotates: whether heads have a rotary embedding, which needs pairs.

    Raises:
        ModelConfigError: they do not go together.
    """
    hidden_size, num_heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    num_kv_heads = fields.count("num_key_value_heads", num_heads)
    if not fields.has("head_dim") and default_size is None and hidden_size % num_heads:
        raise ModelConfigError(
            f"hidden_size = {hidden_size} is no multiple of num_attention_heads = {num_heads}, and there is no head_dim"
        )
    head_size = fields.count("head_dim", hidden_size // num_heads if default_size is None else default_size)
    return check_heads(Heads(num_heads, num_kv_heads, head_size), rotates=rotates)


def check_heads(heads: Heads, *, rotates: bool = True) -> Heads:
    """Return the heads if they go together.

    Raises:
        ModelConfigError: they do not.
    """
    if rotates and heads.head_size % 2:
        raise ModelConfigError(f"head_dim = {heads.head_size} is odd: rotary embedding needs pairs")
    if heads.num_heads % heads.num_kv_heads:
        raise ModelConfigError(
            f"num_attention_heads = {heads.num_heads} is no multiple of num_key_value_heads = {heads.num_kv_heads}"
        )
    return heads


def read_activation(fields: Fields, name: str, default: str) -> Activation:
    """Read an activation by the names that transformers gives them."""
    return _ACTIVATIONS[fields.choice(name, default, tuple(_ACTIVATIONS))]


def read_dtype(fields: Fields) -> str:
    """Read the dtype of the checkpoint."""
    dtype = fields.raw("dtype") if fields.raw("dtype") is not None else fields.raw("torch_dtype")
    dtype = "float32" if dtype is None else dtype
    if dtype not in ("float32", "float16", "bfloat16"):
        raise ModelConfigError(f"dtype = {dtype!r} is not supported; supported are float32, float16, bfloat16")
    return str(dtype)


def read_num_layers(fields: Fields, name: str = "num_hidden_layers") -> int:
    """Read how many layers a decoder has; bounded, since each is described on its own."""
    count = fields.count(name)
    if count > _MOST_LAYERS:
        raise fields.refusal(name, count, f"expected at most {_MOST_LAYERS}")
    return count


def read_layer_types(fields: Fields, num_layers: int) -> tuple[str, ...] | None:
    """Read layer_types: FULL or SLIDING for each layer, None where config.json has none."""
    return fields.choices("layer_types", num_layers, (FULL, SLIDING))


def read_window(fields: Fields, default: int | None) -> int:
    """Read sliding_window: how many tokens a token sees, itself among them; 0 where it is null, which means no window.

    Args:
        fields: of config.json.
        default: where config.json does not name it at all; None: no window.
    """
    if fields.has("sliding_window"):
        return fields.count("sliding_window")
    return 0 if fields.names("sliding_window") or default is None else default


def windows_of(fields: Fields, layer_types: tuple[str, ...], window: int) -> tuple[int, ...]:
    """Return the window of each layer, 0 where it has none.

    Raises:
        ModelConfigError: a layer should have a window, and there is none.
    """
    if SLIDING in layer_types and not window:
        raise fields.refusal("layer_types", SLIDING, "there is no sliding_window, or use_sliding_window is not true")
    return tuple(window if kind == SLIDING else 0 for kind in layer_types)


def refuse_true(fields: Fields, *names: str) -> None:
    """Refuse switches of config.json that are on.

    Raises:
        ModelConfigError: one of them is.
    """
    for name in names:
        if fields.flag(name, False):
            raise ModelConfigError(f"{name} = true is not supported")


def equal_heads(
    fields: Fields,
    num_kv_heads: int | None = None,
    *,
    hidden: str = "hidden_size",
    heads: str = "num_attention_heads",
    rotates: bool = True,
) -> Heads:
    """Read heads that share the hidden size among them; there is no head_dim.

    Args:
        fields: of config.json.
        num_kv_heads: None: as many as there are query heads.
        hidden: what config.json calls the hidden size.
        heads: what it calls the number of query heads.
        rotates: whether heads have a rotary embedding, which needs pairs.

    Raises:
        ModelConfigError: they do not go together.
    """
    hidden_size, num_heads = fields.count(hidden), fields.count(heads)
    if hidden_size % num_heads:
        raise ModelConfigError(f"{hidden} = {hidden_size} is no multiple of {heads} = {num_heads}")
    return check_heads(Heads(num_heads, num_kv_heads or num_heads, hidden_size // num_heads), rotates=rotates)


def layer_norm(fields: Fields, name: str) -> NormConfig:
    """Read the epsilon of norms by mean and variance."""
    return NormConfig("layer", fields.number(name, 1e-5, above=0.0))

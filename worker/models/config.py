"""config.json of a model folder, checked, as the description that the decoder is built from."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.worker.errors import ModelConfigError

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3")
MAX_CONFIG_BYTES = 2**20
_QWEN3_HEAD_SIZE = 128
"""Of a Qwen3 config without head_dim: transformers' default, which does not follow from hidden_size."""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding; `factor` and the llama3 numbers are those of config.json."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 0


@dataclass(frozen=True)
class ModelConfig:
    """A decoder: pre-norm attention with rotary embedding, then a gated MLP."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    max_positions: int
    rms_norm_eps: float
    rope: RopeConfig
    qkv_bias: bool
    output_bias: bool  # of the attention's output projection
    mlp_bias: bool
    qk_norm: bool  # RMS norm of each head of queries and keys, before the rotary embedding
    tied_embeddings: bool
    dtype: str  # of the checkpoint: float32, float16 or bfloat16

    @property
    def num_parameters(self) -> int:
        """Numbers in all weights together."""
        q_size, kv_size = self.num_heads * self.head_size, self.num_kv_heads * self.head_size
        attention = (q_size + 2 * kv_size) * (self.hidden_size + self.qkv_bias)
        attention += self.hidden_size * (q_size + self.output_bias) + 2 * self.head_size * self.qk_norm
        mlp = 3 * self.intermediate_size * self.hidden_size
        mlp += self.mlp_bias * (2 * self.intermediate_size + self.hidden_size)
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)
        return embeddings + self.num_layers * (attention + mlp + 2 * self.hidden_size) + self.hidden_size


def load_model_config(folder: Path) -> ModelConfig:
    """Read and check `folder`/config.json.

    Raises:
        ModelConfigError: it is missing or malformed, or names something unsupported; the message says what is supported.
    """
    path = folder / "config.json"
    try:
        size = path.stat().st_size
        if size > MAX_CONFIG_BYTES:
            raise ModelConfigError(f"{path} has {size} bytes, limit {MAX_CONFIG_BYTES}")
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelConfigError(f"{folder} is no model folder: it has no config.json") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ModelConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise ModelConfigError(f"{path} holds no JSON object")
    return parse_model_config(values)


def parse_model_config(values: dict[str, Any]) -> ModelConfig:
    """Build the description from config.json's values.

    Raises:
        ModelConfigError: a value is missing, malformed or unsupported.
    """
    fields = _Fields(values)
    architecture = _architecture(values)
    _refuse_unsupported(values)
    qwen2, qwen3 = architecture == "Qwen2ForCausalLM", architecture == "Qwen3ForCausalLM"
    hidden_size = fields.count("hidden_size")
    num_heads = fields.count("num_attention_heads")
    num_kv_heads = fields.count("num_key_value_heads", num_heads)
    head_size = _head_size(fields, values, _QWEN3_HEAD_SIZE if qwen3 else None)
    if num_heads % num_kv_heads:
        raise ModelConfigError(
            f"num_attention_heads = {num_heads} is no multiple of num_key_value_heads = {num_kv_heads}"
        )
    attention_bias = fields.flag("attention_bias", qwen2)
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.count("intermediate_size"),
        num_layers=fields.count("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        max_positions=fields.count("max_position_embeddings"),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6, above=0.0),
        rope=_rope(fields, values),
        qkv_bias=attention_bias,
        output_bias=attention_bias and not qwen2,
        mlp_bias=fields.flag("mlp_bias", False) and not (qwen2 or qwen3),
        qk_norm=qwen3,
        tied_embeddings=fields.flag("tie_word_embeddings", False),
        dtype=_dtype(values),
    )


def _architecture(values: dict[str, Any]) -> str:
    names = values.get("architectures")
    if not (isinstance(names, list) and len(names) == 1 and isinstance(names[0], str)):
        raise ModelConfigError(f"architectures = {names!r}: expected a list of one name")
    if names[0] not in SUPPORTED_ARCHITECTURES:
        raise ModelConfigError(
            f"architecture {names[0]!r} is not supported; supported are {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    return names[0]


def _head_size(fields: "_Fields", values: dict[str, Any], default: int | None) -> int:
    """Read head_dim; without it, the architecture's default, or what hidden_size gives to each head."""
    hidden_size, num_heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    if values.get("head_dim") is None and default is None and hidden_size % num_heads:
        raise ModelConfigError(
            f"hidden_size = {hidden_size} is no multiple of num_attention_heads = {num_heads}, and there is no head_dim"
        )
    head_size = fields.count("head_dim", hidden_size // num_heads if default is None else default)
    if head_size % 2:
        raise ModelConfigError(f"head_dim = {head_size} is odd: rotary embedding needs pairs")
    return head_size


def _refuse_unsupported(values: dict[str, Any]) -> None:
    activation = values.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelConfigError(f"hidden_act = {activation!r} is not supported; supported is silu")
    quantization = values.get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise ModelConfigError(f"quantization_config: method {method!r} is not supported; only unquantised weights are")
    if _Fields(values).flag("use_sliding_window", False):
        raise ModelConfigError("use_sliding_window = true is not supported; only full attention is")
    layer_types = values.get("layer_types")
    if layer_types is not None and not (
        isinstance(layer_types, list) and all(kind == "full_attention" for kind in layer_types)
    ):
        raise ModelConfigError(f"layer_types = {layer_types!r} is not supported; only full_attention is")


def _rope(fields: "_Fields", values: dict[str, Any]) -> RopeConfig:
    """Read the rotary embedding: rope_parameters, or the older rope_theta and rope_scaling with `type`."""
    given: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        part = values.get(key)
        if part is not None and not isinstance(part, dict):
            raise ModelConfigError(f"{key} = {part!r}: expected an object")
        given |= part or {}
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind not in SUPPORTED_ROPE_TYPES:
        raise ModelConfigError(f"rope type {kind!r} is not supported; supported are {', '.join(SUPPORTED_ROPE_TYPES)}")
    if values.get("partial_rotary_factor", given.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ModelConfigError("partial_rotary_factor is not supported")
    rope = _Fields({"rope_theta": values.get("rope_theta")} | given if "rope_theta" not in given else given)
    theta = rope.number("rope_theta", 10000.0, above=0.0)
    if kind == "default":
        return RopeConfig(theta)
    factor = rope.number("factor", None, above=0.0)
    if kind == "linear":
        return RopeConfig(theta, kind, factor)
    low = rope.number("low_freq_factor", None, above=0.0)
    high = rope.number("high_freq_factor", None, above=0.0)
    if high <= low:
        raise ModelConfigError(f"high_freq_factor = {high} must be above low_freq_factor = {low}")
    return RopeConfig(theta, kind, factor, low, high, rope.count("original_max_position_embeddings"))


def _dtype(values: dict[str, Any]) -> str:
    dtype = values.get("dtype", values.get("torch_dtype")) or "float32"
    if dtype not in ("float32", "float16", "bfloat16"):
        raise ModelConfigError(f"dtype = {dtype!r} is not supported; supported are float32, float16, bfloat16")
    return str(dtype)


class _Fields:
    """Typed access to config.json's values; null counts as absent."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def count(self, name: str, default: int | None = None) -> int:
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
            raise ModelConfigError(f"{name} = {value!r}: expected an integer from 1 to 2**31 - 1")
        return value

    def number(self, name: str, default: float | None, above: float) -> float:
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not above < value <= sys.float_info.max:
            raise ModelConfigError(f"{name} = {value!r}: expected a finite number above {above:g}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise ModelConfigError(f"{name} = {value!r}: expected true or false")
        return value

    def _get(self, name: str, default: Any) -> Any:
        value = self._values.get(name)
        value = default if value is None else value
        if value is None:
            raise ModelConfigError(f"{name} is missing from config.json")
        return value

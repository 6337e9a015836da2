"""config.json of transformers for what a GGUF file's metadata describe.

What changes how a model computes and is not understood is refused by its name; nothing of it is guessed.
"""

import math
import struct
from dataclasses import dataclass
from typing import Any

from gguf.constants import GGMLQuantizationType

from octavo.worker.errors import ModelConfigError
from octavo.worker.gguf.header import GgufFile

ROPE_FACTORS = "rope_freqs.weight"
"""Tensor of files made from Llama 3.1 and later: the frequencies are divided by it. Metadata say nothing of it."""
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_POSITIONS = 1.0, 4.0, 8192
"""Of all Llama models whose frequencies are scaled so; only the factor differs."""
_TOLERANCE = 1e-4
_DTYPES = {
    GGMLQuantizationType.F32: "float32",
    GGMLQuantizationType.F16: "float16",
    GGMLQuantizationType.BF16: "bfloat16",
}


@dataclass(frozen=True)
class GgufArchitecture:
    """How an architecture of GGUF is called by transformers, and what differs in its files.

    Attributes:
        name: of the class in transformers.
        model_type: as in config.json.
        interleaved_rope: whether the rows of queries and keys are in the order of interleaved rotary pairs.
        unit_offset: whether 1 was added to the weights of norms.
        sandwich: whether norms stand behind attention and MLP too.
        windows: whether layers have windows; their size is among the metadata.
        caps: whether logits are capped; the bounds are among the metadata.
        large: number of layers of the one size whose scale of attention follows from the width, not from the heads.
    """

    name: str
    model_type: str
    interleaved_rope: bool = False
    unit_offset: bool = False
    sandwich: bool = False
    windows: bool = False
    caps: bool = False
    large: int = 0


ARCHITECTURES = {
    "llama": GgufArchitecture("LlamaForCausalLM", "llama", interleaved_rope=True),
    "qwen2": GgufArchitecture("Qwen2ForCausalLM", "qwen2"),
    "qwen3": GgufArchitecture("Qwen3ForCausalLM", "qwen3"),
    "gemma": GgufArchitecture("GemmaForCausalLM", "gemma", unit_offset=True),
    "gemma2": GgufArchitecture(
        "Gemma2ForCausalLM", "gemma2", unit_offset=True, sandwich=True, windows=True, caps=True, large=46
    ),
    "gemma3": GgufArchitecture(
        "Gemma3ForCausalLM", "gemma3_text", unit_offset=True, sandwich=True, windows=True, large=62
    ),
}
_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
_WINDOW = "attention.sliding_window"
_PATTERN = "attention.sliding_window_pattern"
_GEMMA3_LOCAL_THETA = 10000.0
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "expert_count": (0,),
    _WINDOW: (0,),
    _PATTERN: (1,),
    "attention.causal": (True,),
    "attention.max_alibi_bias": (0.0,),
    "attention.clamp_kqv": (0.0,),
    "attention.scale": (),
    **dict.fromkeys(_CAPS, (0.0,)),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "nextn_predict_layers": (0,),
    "rope.dimension_sections": (),
    "rope.scaling.attn_factor": (0.0, 1.0),
    "rope.scaling.yarn_log_multiplier": (0.0,),
}
"""Metadata that change how a model computes, with the values that leave it as it is; others are refused."""


def architecture_of(file: GgufFile) -> GgufArchitecture:
    """Return what the file's architecture is.

    Raises:
        ModelConfigError: it is not supported.
    """
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ModelConfigError(
            f"{file.path}: general.architecture = {name!r} is not supported; supported are {', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[name]


def model_config_values(file: GgufFile) -> dict[str, Any]:
    """Return the values of config.json; special tokens are not among them.

    Raises:
        ModelConfigError: something is missing, malformed or not supported; the message names file and key.
    """
    architecture = architecture_of(file)
    values = _Values(file)
    values.refuse_unsupported(architecture)
    hidden_size, num_heads = values.count("embedding_length"), values.count("attention.head_count")
    head_size = values.head_size(hidden_size, num_heads)
    activation = "gelu_pytorch_tanh" if architecture.unit_offset else "silu"
    config: dict[str, Any] = {
        "architectures": [architecture.name],
        "model_type": architecture.model_type,
        "vocab_size": _vocab_size(file, hidden_size),
        "hidden_size": hidden_size,
        "intermediate_size": values.count("feed_forward_length"),
        "num_hidden_layers": values.count("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": values.count("attention.head_count_kv", num_heads),
        "head_dim": head_size,
        "max_position_embeddings": values.count("context_length"),
        "rms_norm_eps": values.number("attention.layer_norm_rms_epsilon"),
        "hidden_activation" if architecture.sandwich else "hidden_act": activation,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "rope_parameters": _rope(file, values),
        "dtype": _dtype(file),
        # What tells files apart that are described alike: the digest of config.json is the identity of a model.
        "gguf_header_sha256": file.digest,
        "gguf_num_bytes": file.num_bytes,
    }
    rotated = values.count("rope.dimension_count", head_size)
    if rotated != head_size:
        config["partial_rotary_factor"] = rotated / head_size
    return config | (_of_gemma(architecture, values, config) if architecture.sandwich else {})


def _of_gemma(architecture: GgufArchitecture, values: "_Values", config: dict[str, Any]) -> dict[str, Any]:
    """Return what config.json of Gemma 2 and 3 has beside that."""
    is_large = config["num_hidden_layers"] == architecture.large
    more: dict[str, Any] = {
        "sliding_window": values.count(_WINDOW),
        "query_pre_attn_scalar": config["hidden_size"] / config["num_attention_heads"]
        if is_large
        else config["head_dim"],
    }
    if architecture.caps:
        return more | {name: values.number(name) for name in _CAPS}
    local = {"rope_theta": values.number("rope.freq_base_swa", _GEMMA3_LOCAL_THETA), "rope_type": "default"}
    return more | {
        "sliding_window_pattern": values.count(_PATTERN, 6),
        "rope_parameters": {"full_attention": config["rope_parameters"], "sliding_attention": local},
    }


class _Values:
    """Typed access to the metadata of the file's own architecture."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._prefix = f"{file.metadata['general.architecture']}."

    def get(self, name: str) -> object:
        return self._file.metadata.get(self._prefix + name)

    def count(self, name: str, default: int | None = None) -> int:
        value = self.get(name)
        value = default if value is None else value
        if isinstance(value, list):
            raise self.error(name, value, "one number for all layers (different ones are not supported)")
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
            raise self.error(name, value, "an integer from 1 to 2**31 - 1")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.error(name, value, "a finite number above 0")
        return float(value)

    def head_size(self, hidden_size: int, num_heads: int) -> int:
        key, value = self.get("attention.key_length"), self.get("attention.value_length")
        if key is None and hidden_size % num_heads:
            raise self.error("embedding_length", hidden_size, f"a multiple of attention.head_count = {num_heads}")
        size = self.count("attention.key_length", hidden_size // num_heads)
        if value is not None and value != size:
            raise self.error("attention.value_length", value, f"attention.key_length, which is {size}")
        return size

    def refuse_unsupported(self, architecture: GgufArchitecture) -> None:
        read = ((_WINDOW, _PATTERN) if architecture.windows else ()) + (_CAPS if architecture.caps else ())
        for name, neutral in _NEUTRAL.items():
            value = self.get(name)
            if value is not None and value not in neutral and name not in read:
                raise ModelConfigError(f"{self._file.path}: {self._prefix}{name} = {value!r} is not supported")

    def error(self, name: str, value: object, expected: str) -> ModelConfigError:
        found = "is missing" if value is None else f"= {_short(value)}"
        return ModelConfigError(f"{self._file.path}: {self._prefix}{name} {found}, expected {expected}")


def _vocab_size(file: GgufFile, hidden_size: int) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelConfigError(f"{file.path} has no tensor token_embd.weight")
    if len(embedding.shape) != 2 or embedding.shape[1] != hidden_size:
        raise ModelConfigError(
            f"{file.path}: tensor token_embd.weight has shape {list(embedding.shape)}, expected [vocabulary, {hidden_size}]"
        )
    return embedding.shape[0]


def _dtype(file: GgufFile) -> str:
    """Return what the matrices are stored in; bfloat16 for quantised ones, whose steps are coarser than its own."""
    return _DTYPES.get(file.tensors["token_embd.weight"].type, "bfloat16")


def _rope(file: GgufFile, values: _Values) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_theta": values.number("rope.freq_base", 10000.0), "rope_type": "default"}
    kind = values.get("rope.scaling.type")
    factor = values.get("rope.scaling.factor")
    if kind in (None, "none") and values.get("rope.scale_linear") not in (None, 1.0):
        kind, factor = "linear", values.get("rope.scale_linear")
    if kind in ("linear", "yarn"):
        factor_key = "rope.scaling.factor" if factor is values.get("rope.scaling.factor") else "rope.scale_linear"
        rope |= {"rope_type": kind, "factor": values.number(factor_key)}
        if kind == "yarn":
            rope["original_max_position_embeddings"] = values.count("rope.scaling.original_context_length")
    elif kind not in (None, "none"):
        raise values.error("rope.scaling.type", kind, "none, linear or yarn")
    if ROPE_FACTORS in file.tensors:
        if rope["rope_type"] != "default":
            raise ModelConfigError(f"{file.path} has both rope.scaling.type = {kind!r} and {ROPE_FACTORS}")
        rope |= _llama3(file, rope["rope_theta"])
    return rope


def _llama3(file: GgufFile, theta: float) -> dict[str, Any]:
    """Find the numbers of llama3's scaling that the file's factors were made with."""
    factors = _read_factors(file)
    factor = max(factors)
    if math.isclose(factor, 1.0) and math.isclose(min(factors), 1.0):
        return {}
    for found, expected in zip(factors, _llama3_factors(len(factors), theta, factor), strict=True):
        if not math.isclose(found, expected, rel_tol=_TOLERANCE):
            raise ModelConfigError(
                f"{file.path}: tensor {ROPE_FACTORS} holds {found:g} where llama3's scaling by {factor:g} has {expected:g}; "
                "other factors are not supported"
            )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": _LLAMA3_POSITIONS,
    }


def _llama3_factors(count: int, theta: float, factor: float) -> list[float]:
    """Return by what llama3's scaling divides each frequency (the Llama 3.1 release)."""
    factors = []
    for index in range(count):
        wavelength = 2 * math.pi * theta ** (index / count)
        share = (_LLAMA3_POSITIONS / wavelength - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)
        share = min(max(share, 0.0), 1.0)
        factors.append(1.0 / ((1.0 - share) / factor + share))
    return factors


def _read_factors(file: GgufFile) -> list[float]:
    tensor = file.tensors[ROPE_FACTORS]
    if tensor.type != GGMLQuantizationType.F32 or len(tensor.shape) != 1 or tensor.shape[0] > 4096:
        raise ModelConfigError(
            f"{file.path}: tensor {ROPE_FACTORS} is {tensor.type.name} of shape {list(tensor.shape)}, expected F32 of one row"
        )
    try:
        with file.path.open("rb") as opened:
            opened.seek(tensor.start)
            data = opened.read(tensor.num_bytes)
        factors = list(struct.unpack(f"<{tensor.shape[0]}f", data))
    except (OSError, struct.error) as error:
        raise ModelConfigError(f"{file.path}: tensor {ROPE_FACTORS} cannot be read: {error}") from error
    if not all(math.isfinite(factor) and factor > 0 for factor in factors):
        raise ModelConfigError(f"{file.path}: tensor {ROPE_FACTORS} holds numbers that are no factors")
    return factors


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."

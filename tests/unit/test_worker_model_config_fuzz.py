"""Any change of a good config.json gives a description that a decoder can be laid out from, or a ModelConfigError."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.kernels.ops import get_ops
from octavo.worker.errors import ModelConfigError
from octavo.worker.models.config import SUPPORTED_ARCHITECTURES, parse_model_config
from octavo.worker.models.rope import rotary_table
from octavo.worker.models.sizes import weight_bytes
from octavo.worker.models.targets import Placement, ShardSpec
from tests.support.gpt_architectures import ARCHITECTURES, config_of
from tests.support.tiny_models import TINY_LLAMA, TINY_QWEN2_MOE

OTHERS = {name: config_of(kind) for kind, name in ARCHITECTURES.items()}
GOOD = {name: OTHERS.get(name, TINY_LLAMA | {"architectures": [name]}) for name in SUPPORTED_ARCHITECTURES}
for moe in ("MixtralForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"):
    GOOD[moe] = TINY_QWEN2_MOE | {"architectures": [moe]}
GOOD["Gemma3ForConditionalGeneration"] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "text_config": {k: v for k, v in TINY_LLAMA.items() if k != "architectures"},
}
WINDOWS = {
    "sliding_window": 5,
    "use_sliding_window": True,
    "max_window_layers": 1,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window_pattern": 2,
    "no_rope_layers": [1, 0],
    "no_rope_layer_interval": 2,
}
ROPE = {
    "rope_type": "default",
    "type": "linear",
    "rope_theta": 50.0,
    "factor": 2.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "partial_rotary_factor": 0.5,
    "attention_factor": 1.5,
    "beta_fast": 16.0,
    "beta_slow": 2.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
    "truncate": False,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "full_attention": {"rope_type": "default"},
    "sliding_attention": {"rope_type": "default"},
}
TYPES = st.sampled_from(["default", "linear", "dynamic", "llama3", "yarn", "longrope", "su", "axial"])
NUMBERS: list[float] = [
    0,
    1,
    2,
    3,
    7,
    -1,
    2**31 - 1,
    2**31,
    10**400,
    0.0,
    0.1,
    0.5,
    1.5,
    1e-300,
    1e300,
    float("nan"),
    float("inf"),
]
OTHER_VALUES: list[Any] = [
    None,
    True,
    False,
    "",
    "silu",
    "x",
    [],
    {},
    [1],
    ["full_attention"],
    [[]],
    {"factor": "x"},
    [1.0] * 4,
]
ODD = st.sampled_from([*NUMBERS, *OTHER_VALUES])


@st.composite
def ropes(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a rotary embedding of any type, most of its numbers good."""
    rope = {k: ROPE[k] for k in draw(st.sets(st.sampled_from(list(ROPE)), min_size=8))} | {"rope_type": draw(TYPES)}
    return rope | draw(st.dictionaries(st.sampled_from(list(ROPE)), ODD, max_size=1))


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a config of any architecture with some values that are others, absent or odd."""
    good = GOOD[draw(st.sampled_from(sorted(GOOD)))]
    inner = good.get("text_config", good)
    inner = inner | {k: WINDOWS[k] for k in draw(st.sets(st.sampled_from(list(WINDOWS))))}
    if draw(st.booleans()):
        inner |= {draw(st.sampled_from(["rope_scaling", "rope_parameters"])): draw(ropes())}
    names = st.sampled_from(sorted(set(inner) - {"architectures"}))
    inner |= draw(st.dictionaries(names, ODD, max_size=2))
    return good | {"text_config": inner} if inner is not good and "text_config" in good else inner


@settings(max_examples=300)
@given(configs())
def test_a_changed_config_is_described_or_refused(values: dict[str, Any]) -> None:
    try:
        config = parse_model_config(values)
        weight_bytes(config, torch.float32, ShardSpec(), "cpu")
    except ModelConfigError:
        return
    for rope in config.ropes:
        table = rotary_table(
            get_ops("reference"), rope, config.head_size, 3, Placement(torch.float32, torch.device("cpu"))
        )
        assert table.shape[0] == 3
        assert table.shape[1] <= config.head_size + 1
        assert table[0].isfinite().all()


@pytest.mark.parametrize("name", sorted(GOOD))
def test_the_config_that_is_changed_is_good(name: str) -> None:
    assert parse_model_config(GOOD[name]).architecture == name

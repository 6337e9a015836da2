"""config.json of Gemma models, in the forms that files on the hub have."""

from typing import Any

import pytest

from octavo.worker.errors import ModelConfigError
from octavo.worker.models.config import parse_model_config
from octavo.worker.models.description import MlpConfig
from octavo.worker.models.rope_config import RopeConfig
from tests.support.tiny_models import TINY_LLAMA

BASE: dict[str, Any] = {k: v for k, v in TINY_LLAMA.items() if k not in ("hidden_act", "tie_word_embeddings")}
GEMMA = BASE | {"architectures": ["GemmaForCausalLM"]}
GEMMA2 = BASE | {"architectures": ["Gemma2ForCausalLM"], "num_hidden_layers": 4}
GEMMA3 = BASE | {"architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 7, "sliding_window": 9}
GEMMA3.pop("rope_theta")
OF_IMAGES = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "text_config": {"sliding_window": 1024, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}},
    "torch_dtype": "bfloat16",
    "vision_config": {},
}
BY_LAYER = {"full_attention": {"rope_theta": 5e5}, "sliding_attention": {"rope_type": "default"}}


def windows(values: dict[str, Any]) -> tuple[int, ...]:
    return tuple(layer.window for layer in parse_model_config(values).layers)


def test_what_gemmas_have_in_common() -> None:
    for values in (GEMMA, GEMMA2, GEMMA3):
        config = parse_model_config(values)
        assert config.norm.unit_offset
        assert config.embedding_scale == 48**0.5
        assert config.tied_embeddings
        assert not config.qkv_bias
        mlp = config.layers[0].mlp
        assert isinstance(mlp, MlpConfig)
        assert (mlp.activation, mlp.is_gated) == ("gelu_tanh", True)
        no_head = {k: v for k, v in values.items() if k != "head_dim"}
        assert parse_model_config(no_head).head_size == 256


def test_gelu_of_the_first_files_is_the_approximation() -> None:
    mlp = parse_model_config(GEMMA | {"hidden_act": "gelu"}).layers[0].mlp
    assert isinstance(mlp, MlpConfig)
    assert mlp.activation == "gelu_tanh"
    mlp = parse_model_config(GEMMA2 | {"hidden_activation": "gelu"}).layers[0].mlp
    assert isinstance(mlp, MlpConfig)
    assert mlp.activation == "gelu"


def test_caps_and_scale() -> None:
    config = parse_model_config(GEMMA2)
    assert (config.attention_softcap, config.final_softcap, config.attention_scale) == (50.0, 30.0, 1 / 16)
    none = {"attn_logit_softcapping": None, "final_logit_softcapping": None, "query_pre_attn_scalar": 144}
    config = parse_model_config(GEMMA2 | none)
    assert (config.attention_softcap, config.final_softcap, config.attention_scale) == (0.0, 0.0, 1 / 12)
    config = parse_model_config(GEMMA3)
    assert (config.attention_softcap, config.final_softcap) == (0.0, 0.0)
    assert parse_model_config(GEMMA3 | {"final_logit_softcapping": 20}).final_softcap == 20.0


def test_windows() -> None:
    assert windows(GEMMA) == (0, 0)
    assert windows(GEMMA2) == (4096, 0, 4096, 0)
    assert windows(GEMMA3) == (9, 9, 9, 9, 9, 0, 9)
    assert windows(GEMMA3 | {"sliding_window_pattern": 2}) == (9, 0, 9, 0, 9, 0, 9)
    types = ["full_attention"] * 6 + ["sliding_attention"]
    config = parse_model_config(GEMMA3 | {"layer_types": types})
    assert [(layer.window, layer.rope) for layer in config.layers] == [(0, 0)] * 6 + [(9, 1)]


@pytest.mark.parametrize(
    ("given", "whole", "local"),
    [
        ({}, RopeConfig(1e6), RopeConfig(1e4)),
        ({"rope_theta": 7.0, "rope_local_base_freq": 3.0}, RopeConfig(7.0), RopeConfig(3.0)),
        ({"rope_scaling": {"rope_type": "linear", "factor": 8}}, RopeConfig(1e6, "linear", 8.0), RopeConfig(1e4)),
        ({"rope_parameters": BY_LAYER}, RopeConfig(5e5), RopeConfig(1e4)),
    ],
)
def test_rotary_embeddings_of_gemma3(given: dict[str, Any], whole: RopeConfig, local: RopeConfig) -> None:
    config = parse_model_config(GEMMA3 | given)
    assert config.ropes == (whole, local)
    assert config.max_positions == 256  # the file's are those that the factor has stretched


def test_the_text_part_of_a_model_of_images() -> None:
    config = parse_model_config(OF_IMAGES)
    assert (config.hidden_size, config.num_heads, config.num_kv_heads, config.head_size) == (2304, 8, 4, 256)
    assert (config.vocab_size, config.max_positions, config.num_layers) == (262208, 131072, 26)
    assert (config.dtype, config.tied_embeddings) == ("bfloat16", True)
    assert config.names.layer == "language_model.model.layers.{}"
    assert config.names.embedding == "language_model.model.embed_tokens"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (GEMMA | {"use_bidirectional_attention": True}, "use_bidirectional_attention = true is not supported"),
        (GEMMA | {"hidden_act": "mish"}, "hidden_act = 'mish' is not supported"),
        (GEMMA2 | {"hidden_activation": "mish"}, "hidden_activation = 'mish' is not supported"),
        (GEMMA2 | {"attn_logit_softcapping": 0}, "attn_logit_softcapping = 0: expected a finite number above 0"),
        (GEMMA2 | {"query_pre_attn_scalar": -1}, "query_pre_attn_scalar = -1: expected a finite number above 0"),
        (GEMMA2 | {"sliding_window": None}, "there is no sliding_window"),
        (GEMMA3 | {"sliding_window_pattern": 0}, "sliding_window_pattern = 0: expected an integer from 1"),
        (GEMMA3 | {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0: not supported for Gemma3"),
        (GEMMA3 | {"rope_parameters": {"rope_theta": 5.0}}, "rope_parameters = .* expected full_attention and sliding"),
        (GEMMA3 | {"rope_parameters": {"full_attention": 3}}, r"rope_parameters\.full_attention = 3: expected an obj"),
        (GEMMA3 | {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5: not supported for Gemma3"),
        (OF_IMAGES | {"text_config": None}, "text_config is missing"),
        (OF_IMAGES | {"text_config": {"num_hidden_layers": 0}}, r"text_config\.num_hidden_layers = 0: expected"),
    ],
)
def test_what_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        parse_model_config(values)

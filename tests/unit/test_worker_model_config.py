"""config.json: what is supported is read exactly, everything else is refused by name."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from octavo.worker.errors import ModelConfigError
from octavo.worker.models.config import load_model_config, parse_model_config
from octavo.worker.models.description import ExpertsConfig, LayerConfig, MlpConfig, ModelConfig
from octavo.worker.models.rope_config import RopeConfig
from octavo.worker.models.sizes import num_parameters
from tests.support.tiny_models import TINY_LLAMA, TINY_QWEN2_MOE, random_tensors

QWEN2: dict[str, Any] = {k: v for k, v in TINY_LLAMA.items() if k not in ("attention_bias", "mlp_bias", "head_dim")} | {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "use_sliding_window": False,
    "sliding_window": 4096,
}
QWEN3: dict[str, Any] = QWEN2 | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 16,
    "max_window_layers": 2,
    "sliding_window": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE = {
    "type": "longrope",
    "short_factor": [1.0, 1.5, 2, 3],
    "long_factor": [1.0, 2.0, 4.0, 8.0],
    "original_max_position_embeddings": 64,
}
MISTRAL: dict[str, Any] = TINY_LLAMA | {"architectures": ["MistralForCausalLM"]}
PHI3: dict[str, Any] = TINY_LLAMA | {"architectures": ["Phi3ForCausalLM"]}
SMOLLM3: dict[str, Any] = TINY_LLAMA | {"architectures": ["SmolLM3ForCausalLM"], "num_hidden_layers": 8}


def llama(**changes: Any) -> dict[str, Any]:
    return TINY_LLAMA | changes


def biases(config: ModelConfig) -> tuple[bool, bool, bool]:
    mlp = config.layers[0].mlp
    assert isinstance(mlp, MlpConfig)
    return config.qkv_bias, config.output_bias, mlp.has_bias


def test_llama_with_defaults() -> None:
    config = parse_model_config({k: v for k, v in TINY_LLAMA.items() if k not in ("num_key_value_heads", "rope_theta")})
    assert (config.num_heads, config.num_kv_heads, config.head_size) == (6, 6, 8)
    assert config.ropes == (RopeConfig(10000.0),)
    assert biases(config) == (False, False, False)


def test_biases_of_llama_and_qwen2() -> None:
    config = parse_model_config(llama(attention_bias=True, mlp_bias=True))
    assert biases(config) == (True, True, True)
    config = parse_model_config(QWEN2)
    assert biases(config) == (True, False, False)


def test_qwen3_has_norms_of_queries_and_keys_and_no_bias_unless_told() -> None:
    config = parse_model_config(QWEN3)
    assert (config.qk_norm == config.norm, *biases(config)) == (True, False, False, False)
    config = parse_model_config(QWEN3 | {"attention_bias": True, "mlp_bias": True})
    assert (config.qk_norm == config.norm, *biases(config)) == (True, True, True, False)
    assert not parse_model_config(QWEN2).qk_norm
    assert not parse_model_config(TINY_LLAMA).qk_norm


def test_the_head_size_of_qwen3_does_not_follow_from_its_hidden_size() -> None:
    assert parse_model_config(QWEN3).head_size == 16
    config = {key: value for key, value in QWEN3.items() if key != "head_dim"}
    assert parse_model_config(config | {"hidden_size": 49}).head_size == 128


def test_head_size_may_differ_from_hidden_size_over_heads() -> None:
    assert parse_model_config(llama(head_dim=16)).head_size == 16
    assert parse_model_config(llama(head_dim=None)).head_size == 8


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"rope_theta": 5e5}, RopeConfig(5e5)),
        ({"rope_theta": None, "rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}}, RopeConfig(7.0)),
        ({"rope_scaling": None}, RopeConfig(10000.0)),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, RopeConfig(10000.0, "linear", 2.0)),
        ({"rope_scaling": {"rope_type": "linear", "type": None, "factor": 2}}, RopeConfig(10000.0, "linear", 2.0)),
        ({"rope_scaling": LLAMA3}, RopeConfig(10000.0, "llama3", 8.0, 1.0, 4.0, 64)),
        ({"rope_parameters": LLAMA3 | {"rope_theta": 5e5}}, RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 64)),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.5}},
            RopeConfig(10000.0, "dynamic", 2.5, original_max_positions=256),
        ),
        (
            {"rope_scaling": YARN | {"beta_fast": 16, "truncate": False, "attention_factor": 0.5}},
            RopeConfig(
                10000.0,
                "yarn",
                4.0,
                original_max_positions=64,
                attention_factor=0.5,
                beta_fast=16.0,
                truncates=False,
            ),
        ),
        (
            {"rope_scaling": LONGROPE | {"attention_factor": 1.25}},
            RopeConfig(
                10000.0,
                "longrope",
                4.0,
                original_max_positions=64,
                attention_factor=1.25,
                short_factors=(1.0, 1.5, 2.0, 3.0),
                long_factors=(1.0, 2.0, 4.0, 8.0),
            ),
        ),
    ],
)
def test_rope(given: dict[str, Any], expected: RopeConfig) -> None:
    assert parse_model_config(llama(**given)).ropes == (expected,)


@pytest.mark.parametrize("written", [{}, {"rope_type": "default", "rope_theta": 10000.0}, None])
def test_a_scaling_that_was_added_by_hand_counts(written: dict[str, Any] | None) -> None:
    given = {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_parameters": written}
    assert parse_model_config(llama(**given)).ropes[0].factor == 4.0
    assert parse_model_config(llama(rope_scaling={}, rope_parameters=given["rope_scaling"])).ropes[0].factor == 4.0


def test_errors_name_the_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(llama(hidden_act="gelu_10")))
    with pytest.raises(ModelConfigError, match=rf"^{tmp_path}/config.json: hidden_act = 'gelu_10'"):
        load_model_config(tmp_path)


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        (YARN, 0.1 * math.log(4) + 1),
        (YARN | {"mscale": 0.5, "mscale_all_dim": 2}, (0.05 * math.log(4) + 1) / (0.2 * math.log(4) + 1)),
        (YARN | {"mscale": 0.5}, 0.1 * math.log(4) + 1),
        (YARN | {"factor": 1.0}, 1.0),
        (YARN | {"factor": None}, 0.1 * math.log(4) + 1),
        (LONGROPE, math.sqrt(1 + math.log(4) / math.log(64))),
        (LONGROPE | {"factor": 16}, math.sqrt(1 + math.log(16) / math.log(64))),
        (LONGROPE | {"original_max_position_embeddings": 256}, 1.0),
    ],
)
def test_attention_factor_that_follows_from_the_others(rope: dict[str, Any], expected: float) -> None:
    assert parse_model_config(llama(rope_scaling=rope)).ropes[0].attention_factor == pytest.approx(expected)


@pytest.mark.parametrize(
    ("rope", "positions"),
    [
        (None, 256),
        ({"type": "linear", "factor": 2.5}, 640),
        ({"type": "dynamic", "factor": 2.0}, 512),
        (YARN, 256),
        (YARN | {"factor": 40}, 2560),
        (LLAMA3, 256),
        (LONGROPE, 256),
    ],
)
def test_positions_that_a_model_is_served_for(rope: dict[str, Any] | None, positions: int) -> None:
    assert parse_model_config(llama(rope_scaling=rope)).max_positions == positions


def test_names_of_older_files_for_longrope() -> None:
    expected = parse_model_config(PHI3 | {"rope_scaling": LONGROPE}).ropes
    beside = {k: v for k, v in LONGROPE.items() if k != "original_max_position_embeddings"}
    for name in ("su", "yarn"):
        given = PHI3 | {"rope_scaling": beside | {"type": name}, "original_max_position_embeddings": 64}
        assert parse_model_config(given).ropes == expected


@pytest.mark.parametrize("given", [{"partial_rotary_factor": 0.5}, {"rope_parameters": {"partial_rotary_factor": 0.5}}])
def test_a_part_of_each_head_may_be_rotated(given: dict[str, Any]) -> None:
    (rope,) = parse_model_config(PHI3 | given).ropes
    assert (rope.rotated_share, rope.num_rotated(8)) == (0.5, 4)


SLIDE = ["sliding_attention", "full_attention"]


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        (MISTRAL, (4096, 4096)),
        (MISTRAL | {"sliding_window": None}, (0, 0)),
        (MISTRAL | {"sliding_window": 9, "layer_types": SLIDE}, (9, 0)),
        (PHI3, (0, 0)),
        (PHI3 | {"sliding_window": 9}, (9, 9)),
        (QWEN2, (0, 0)),
        (QWEN2 | {"use_sliding_window": True}, (0, 0)),  # from layer 28 on
        (QWEN2 | {"use_sliding_window": True, "max_window_layers": 1}, (0, 4096)),
        (QWEN3 | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, (8, 8)),
        (QWEN3 | {"use_sliding_window": True, "sliding_window": 8, "layer_types": SLIDE}, (8, 0)),
        (SMOLLM3 | {"sliding_window": 9}, (0,) * 8),
        (SMOLLM3 | {"sliding_window": 9, "use_sliding_window": True}, (0, 0, 0, 9) * 2),
    ],
)
def test_windows_of_the_layers(config: dict[str, Any], windows: tuple[int, ...]) -> None:
    assert tuple(layer.window for layer in parse_model_config(config).layers) == windows


def test_layers_of_smollm3_without_a_rotary_embedding() -> None:
    config = parse_model_config(SMOLLM3)
    assert [layer.rope for layer in config.layers] == [0, 0, 0, None] * 2
    assert config.ropes[0].theta == 10000.0
    config = parse_model_config({k: v for k, v in SMOLLM3.items() if k not in ("rope_theta", "tie_word_embeddings")})
    assert (config.ropes[0].theta, config.tied_embeddings) == (2e6, True)
    config = parse_model_config(SMOLLM3 | {"no_rope_layers": [1, 0, 0, 1, 1, 1, 1, 0]})
    assert [layer.rope for layer in config.layers] == [0, None, None, 0, 0, 0, 0, None]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MISTRAL | {"sliding_window": 0}, "sliding_window = 0: expected an integer from 1"),
        (MISTRAL | {"sliding_window": 2.5}, r"sliding_window = 2\.5: expected an integer"),
        (MISTRAL | {"layer_types": SLIDE[:1]}, "layer_types = .* expected a name for each of 2 layers"),
        (MISTRAL | {"layer_types": [*SLIDE, SLIDE[0]]}, "layer_types = .* expected a name for each of 2 layers"),
        (MISTRAL | {"layer_types": ["chunked_attention"] * 2}, "only full_attention, sliding_attention are"),
        (MISTRAL | {"layer_types": SLIDE, "sliding_window": None}, "sliding_attention.*: there is no sliding_window"),
        (QWEN2 | {"layer_types": SLIDE}, "sliding_attention.*: there is no sliding_window, or use_sliding_window"),
        (QWEN3 | {"max_window_layers": -1}, "max_window_layers = -1: expected an integer from 0"),
        (SMOLLM3 | {"no_rope_layers": [1, 0]}, r"no_rope_layers = \[1, 0\]: expected 0 or 1 for each of 8 layers"),
        (SMOLLM3 | {"no_rope_layers": [2] * 8}, "no_rope_layers = .*: expected 0 or 1 for each of 8"),
        (SMOLLM3 | {"no_rope_layer_interval": 0}, "no_rope_layer_interval = 0: expected an integer from 1"),
        (PHI3 | {"hidden_act": "mish"}, "hidden_act = 'mish' is not supported; supported are silu"),
        (PHI3 | {"head_dim": 9}, "head_dim = 9 is odd"),
        (PHI3 | {"partial_rotary_factor": 1.5}, "partial_rotary_factor = 1.5: expected at most 1"),
        (PHI3 | {"partial_rotary_factor": 0.1}, "0 of 8 dimensions of a head are rotated"),
        (PHI3 | {"partial_rotary_factor": 0.5, "rope_scaling": LONGROPE}, "short_factor has 4 numbers: expected 2"),
        (PHI3 | {"rope_scaling": LONGROPE | {"long_factor": [1.0]}}, "long_factor has 1 numbers: expected 4"),
        (PHI3 | {"rope_scaling": LONGROPE | {"long_factor": [1, 2, 3, 0]}}, "long_factor = 0: expected a finite"),
        (PHI3 | {"rope_scaling": LONGROPE | {"short_factor": "x"}}, "short_factor = 'x': expected a list"),
        (PHI3 | {"rope_scaling": LONGROPE | {"short_mscale": 1.1}}, "short_mscale = 1.1: not supported"),
    ],
)
def test_what_is_refused_of_windows_and_partial_rotation(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        parse_model_config(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["FooForCausalLM"]},
            "'FooForCausalLM' is not supported; supported are LlamaForCausalLM, ",
        ),
        ({"architectures": []}, r"architectures = \[\]: expected a list of one name"),
        ({"architectures": "LlamaForCausalLM"}, "expected a list of one name"),
        ({"architectures": None}, "expected a list of one name"),
        ({"quantization_config": {"quant_method": "exl2"}}, "method 'exl2' is not supported; supported are auto-r"),
        ({"quantization_config": {}}, "method None is not supported"),
        ({"hidden_act": "mish"}, "hidden_act = 'mish' is not supported; supported are silu, swish, gelu"),
        ({"use_sliding_window": True}, "use_sliding_window = true is not supported"),
        ({"use_sliding_window": "no"}, "use_sliding_window = 'no': expected true or false"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types = .* only full_attention is"),
        ({"layer_types": [[]]}, "only full_attention is"),
        ({"layer_types": 3}, "only full_attention is"),
        (
            {"rope_scaling": {"type": "proportional", "factor": 2}},
            "rope type 'proportional' is not supported; supported are default, linear, dynamic, llama3, yarn, longrope",
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 2}}, "original_max_position_embeddings is missing"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 0.5}}, "factor = 0.5: expected at least 1"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2}, "head_dim": 2}, "expected at least 4 for rope type"),
        ({"rope_scaling": YARN | {"beta_fast": 0.5}}, "beta_fast = 0.5 must not be below beta_slow = 1"),
        ({"rope_scaling": YARN | {"truncate": 1}}, "truncate = 1: expected true or false"),
        ({"rope_theta": 1.0}, "rope_theta = 1: expected more than 1 to 1e.30"),
        ({"rope_scaling": YARN | {"beta_slow": 1e-300}}, "beta_slow = 1e-300: expected 1e-09 to 1e.30"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 1e9}},
            "factor = 1e.09 stretches the positions beyond 2147483647",
        ),
        ({"num_hidden_layers": 2**31 - 1}, "num_hidden_layers = 2147483647: expected at most 4096"),
        ({"rope_scaling": {"rope_type": None, "type": ["x"]}}, r"rope type \['x'\] is not supported"),
        ({"rope_scaling": {"factor": 8.0}}, r"rope type is missing beside factor = 8\.0"),
        ({"rope_scaling": {"rope_type": ""}}, "rope type '' is not supported"),
        ({"max_position_embeddings": 1}, "1 positions: expected at least 2"),
        ({"dtype": 0}, "dtype = 0 is not supported"),
        ({"rope_scaling": "linear"}, "rope_scaling = 'linear': expected an object"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor = 0: expected a finite number above 0"),
        (
            {"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}},
            "high_freq_factor = 1.0 must be above low_freq_factor = 1",
        ),
        (
            {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": None}},
            "original_max_position_embeddings is mis",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5: not supported for LlamaForCausalLM"),
        ({"rope_theta": float("nan")}, "rope_theta = nan: expected a finite number"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps = 10+: expected a finite number"),
        ({"rms_norm_eps": True}, "rms_norm_eps = True: expected a finite number"),
        ({"hidden_size": None}, r"hidden_size is missing$"),
        ({"hidden_size": 48.0}, r"hidden_size = 48\.0: expected an integer"),
        ({"hidden_size": True}, "hidden_size = True: expected an integer"),
        ({"vocab_size": 0}, "vocab_size = 0: expected an integer from 1"),
        ({"num_hidden_layers": -1}, "num_hidden_layers = -1: expected an integer from 1"),
        ({"num_attention_heads": 2**31}, "num_attention_heads = 2147483648: expected an integer from 1 to"),
        ({"num_attention_heads": 5, "head_dim": None}, "hidden_size = 48 is no multiple of num_attention_heads = 5"),
        ({"num_key_value_heads": 4}, "num_attention_heads = 6 is no multiple of num_key_value_heads = 4"),
        ({"head_dim": 7}, "head_dim = 7 is odd"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings = 1: expected true or false"),
        ({"mlp_bias": "true"}, "mlp_bias = 'true': expected true or false"),
        ({"dtype": "int8"}, "dtype = 'int8' is not supported; supported are float32"),
        ({"dtype": ["float32"]}, "is not supported"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        parse_model_config(llama(**changes))


MIXTRAL: dict[str, Any] = {k: v for k, v in TINY_LLAMA.items() if k not in ("attention_bias", "mlp_bias")} | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": 4096,
    "rope_theta": None,
}
QWEN3_MOE = {k: v for k, v in TINY_QWEN2_MOE.items() if not k.startswith("shared")} | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "norm_topk_prob": True,
    "num_hidden_layers": 6,
    "decoder_sparse_step": 2,
    "mlp_only_layers": [3],
}


def test_mixtral_has_experts_and_a_window_in_every_layer() -> None:
    config = parse_model_config(MIXTRAL)
    assert set(config.layers) == {LayerConfig(ExpertsConfig(8, 2, 80, renormalize=True), 4096)}
    assert config.ropes == (RopeConfig(1_000_000.0),)
    assert parse_model_config(MIXTRAL | {"sliding_window": None}).layers[0].window == 0


def test_qwen3_moe_has_experts_in_some_layers() -> None:
    config = parse_model_config(QWEN3_MOE)
    experts, dense = ExpertsConfig(6, 3, 28, renormalize=True), MlpConfig(80)
    assert [layer.mlp for layer in config.layers] == [dense, experts, dense, dense, dense, experts]
    assert config.qk_norm == config.norm
    assert {layer.window for layer in config.layers} == {0}
    config = parse_model_config(QWEN3_MOE | {"use_sliding_window": True, "sliding_window": 9})
    assert {layer.window for layer in config.layers} == {9}
    assert parse_model_config(TINY_QWEN2_MOE).layers[0].mlp == ExpertsConfig(6, 3, 28, False, shared=MlpConfig(36))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (MIXTRAL | {"num_experts_per_tok": 9}, "num_experts_per_tok = 9 is above num_local_experts = 8"),
        (MIXTRAL | {"num_local_experts": None}, "num_experts is missing"),
        (MIXTRAL | {"num_local_experts": 0}, "num_local_experts = 0: expected an integer from 1"),
        (MIXTRAL | {"sliding_window": 0}, "sliding_window = 0: expected an integer from 1"),
        (MIXTRAL | {"hidden_act": "elu"}, "hidden_act = 'elu' is not supported; supported are silu"),
        (QWEN3_MOE | {"mlp_only_layers": 3}, "mlp_only_layers = 3: expected a list of layers"),
        (QWEN3_MOE | {"mlp_only_layers": ["3"]}, r"mlp_only_layers = \['3'\]: expected a list of layers"),
        (QWEN3_MOE | {"decoder_sparse_step": 0}, "decoder_sparse_step = 0: expected an integer from 1"),
        (QWEN3_MOE | {"moe_intermediate_size": None}, "moe_intermediate_size is missing"),
        (QWEN3_MOE | {"norm_topk_prob": "yes"}, "norm_topk_prob = 'yes': expected true or false"),
        (QWEN3_MOE | {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5: not supported for Qwen3Moe"),
        (TINY_QWEN2_MOE | {"use_sliding_window": True}, "use_sliding_window = true is not supported"),
        (TINY_QWEN2_MOE | {"shared_expert_intermediate_size": None}, "shared_expert_intermediate_size is missing"),
        (MIXTRAL | {"architectures": ["DeepseekV3ForCausalLM"]}, "'DeepseekV3ForCausalLM' is not supported"),
    ],
)
def test_what_is_refused_of_experts(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        parse_model_config(values)


@pytest.mark.parametrize("content", [b"", b"[]", b"3", b"{", b"[" * 100_000, b"\xff\xfe{", b'{"a":' * 50_000])
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelConfigError, match=r"config\.json (cannot be read|holds no JSON object)"):
        load_model_config(tmp_path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match=r"is no model folder: it has no config\.json"):
        load_model_config(tmp_path)


def test_an_oversized_file_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY_LLAMA) + " " * 2**20)
    with pytest.raises(ModelConfigError, match=r"has \d+ bytes, limit 1048576"):
        load_model_config(tmp_path)


@pytest.mark.parametrize(
    "config",
    [
        TINY_LLAMA,
        QWEN2,
        QWEN3,
        QWEN3 | {"attention_bias": True, "tie_word_embeddings": False},
        PHI3,
        llama(attention_bias=True, mlp_bias=True, tie_word_embeddings=False, head_dim=16),
    ],
)
def test_the_number_of_parameters_is_that_of_the_checkpoint(config: dict[str, Any]) -> None:
    expected = sum(tensor.numel() for tensor in random_tensors(config).values())
    assert num_parameters(parse_model_config(config)) == expected

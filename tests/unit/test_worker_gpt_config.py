"""config.json of Falcon, GPT-2, OPT and their like: what is read, and what is refused by name."""

from typing import Any

import pytest

from octavo.worker.errors import ModelConfigError
from octavo.worker.models.config import parse_model_config
from octavo.worker.models.description import LearnedPositions, MlpConfig
from octavo.worker.models.rope_config import RopeConfig
from octavo.worker.models.sizes import num_parameters
from tests.support.gpt_architectures import ARCHITECTURES, config_of
from tests.support.tiny_models import random_tensors


def shape(hidden_size: int, num_layers: int, num_heads: int, vocab_size: int, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "vocab_size": vocab_size,
        "max_position_embeddings": 2048,
        **more,
    }


# Shapes of well known checkpoints, and how many numbers each of them holds.
PUBLISHED: list[tuple[str, dict[str, Any], int]] = [
    ("gpt2", {"n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257}, 124_439_808),
    ("gpt2", {"n_embd": 1600, "n_head": 25, "n_layer": 48, "n_positions": 1024, "vocab_size": 50257}, 1_557_611_200),
    (
        "gpt_bigcode",
        {"n_embd": 6144, "n_head": 48, "n_layer": 40, "n_inner": 24576, "n_positions": 8192, "vocab_size": 49152},
        15_517_456_384,
    ),
    (
        "gpt_neo",
        {
            "hidden_size": 768,
            "num_heads": 12,
            "num_layers": 12,
            "attention_types": [[["global", "local"], 6]],
            "vocab_size": 50257,
        },
        125_198_592,
    ),
    ("cohere", shape(8192, 40, 64, 256000, intermediate_size=22528), 34_980_831_232),
    ("cohere2", shape(4096, 32, 32, 256000, intermediate_size=14336, num_key_value_heads=8), 8_028_033_024),
    (
        "glm",
        shape(4096, 40, 32, 151552, intermediate_size=13696, num_key_value_heads=2),
        9_399_951_360,
    ),
    ("gptj", {"n_embd": 4096, "n_head": 16, "n_layer": 28, "rotary_dim": 64, "vocab_size": 50400}, 6_050_882_784),
    ("gpt_neox", shape(512, 6, 8, 50304, intermediate_size=2048), 70_426_624),
    ("gpt_neox", shape(6144, 44, 64, 50432, intermediate_size=24576, hidden_act="gelu_fast"), 20_554_567_680),
    ("falcon", shape(4544, 32, 71, 65024), 6_921_720_704),
    ("falcon", shape(8192, 60, 128, 65024, num_kv_heads=8, new_decoder_architecture=True), 41_303_293_952),
    ("opt", shape(768, 12, 12, 50272, ffn_dim=3072), 125_239_296),
    ("opt", shape(1024, 24, 16, 50272, ffn_dim=4096, word_embed_proj_dim=512, do_layer_norm_before=False), 331_196_416),
    ("phi", shape(2560, 32, 32, 51200, intermediate_size=10240, partial_rotary_factor=0.4), 2_779_683_840),
    ("stablelm", shape(2560, 32, 32, 50304, intermediate_size=6912), 2_795_443_200),
    ("starcoder2", shape(3072, 30, 24, 49152, intermediate_size=12288, num_key_value_heads=2), 3_030_371_328),
]
OPT_350M = {"do_layer_norm_before": False, "word_embed_proj_dim": 32}
NEW_FALCON = {"new_decoder_architecture": True, "num_kv_heads": 2}


def test_falcon_has_three_forms() -> None:
    config = parse_model_config(config_of("falcon", num_kv_heads=6))
    assert (config.num_kv_heads, config.residual, config.names.mlp_norm) == (1, "parallel", "")
    config = parse_model_config(config_of("falcon", **NEW_FALCON))
    assert (config.num_kv_heads, config.residual, config.names.mlp_norm) == (2, "parallel", "ln_mlp")
    config = parse_model_config(config_of("falcon", **NEW_FALCON, num_ln_in_parallel_attn=1))
    assert (config.names.input_norm, config.names.mlp_norm) == ("input_layernorm", "")
    config = parse_model_config(config_of("falcon", multi_query=False, parallel_attn=False))
    assert (config.num_kv_heads, config.residual, config.names.mlp_norm) == (6, "pre", "post_attention_layernorm")


def test_learned_positions_bound_the_context() -> None:
    config = parse_model_config(config_of("gpt2"))
    assert (config.max_positions, config.positions, config.layers[0].rope) == (128, LearnedPositions(128), None)
    config = parse_model_config(config_of("opt"))
    assert (config.max_positions, config.positions) == (128, LearnedPositions(130, 2))


def test_the_rotated_dimensions_of_gptj_come_out_whole() -> None:
    for head_size in (44, 45, 64, 256):
        for rotary_dim in range(2, head_size + 1, 2):
            values = config_of("gptj", n_head=1, n_embd=head_size + head_size % 2, rotary_dim=rotary_dim)
            config = parse_model_config(values)
            assert config.ropes[0].num_rotated(config.head_size) == rotary_dim


def test_defaults_are_those_of_transformers() -> None:
    config = parse_model_config({k: v for k, v in config_of("gpt2").items() if k not in ("n_inner", "n_positions")})
    mlp = config.layers[0].mlp
    assert isinstance(mlp, MlpConfig)
    assert (mlp.size, mlp.activation, config.max_positions, config.tied_embeddings) == (192, "gelu_tanh", 1024, True)
    assert parse_model_config(config_of("falcon", ffn_hidden_size=None)).layers[0].mlp == MlpConfig(192, "gelu", False)
    assert parse_model_config(config_of("gpt2", scale_attn_weights=False)).attention_scale == 1.0


@pytest.mark.parametrize(
    ("kind", "given", "expected"),
    [
        ("gpt_neox", {}, RopeConfig(10000.0, rotated_share=0.25)),
        ("gpt_neox", {"rotary_pct": 1.0, "rotary_emb_base": 500}, RopeConfig(500.0)),
        (
            "gpt_neox",
            {"rope_scaling": {"type": "linear", "factor": 2}},
            RopeConfig(1e4, "linear", 2.0, rotated_share=0.25),
        ),
        ("gpt_neox", {"rope_parameters": {"partial_rotary_factor": 0.5}}, RopeConfig(1e4, rotated_share=0.5)),
        ("phi", {}, RopeConfig(10000.0, rotated_share=0.5)),
        ("phi", {"partial_rotary_factor": 0.4}, RopeConfig(10000.0, rotated_share=0.4)),
        ("stablelm", {"rope_theta": 7.0}, RopeConfig(7.0, rotated_share=0.25)),
        ("starcoder2", {}, RopeConfig(10000.0)),
        ("cohere", {}, RopeConfig(500000.0)),
        ("cohere2", {}, RopeConfig(10000.0)),
        ("falcon", {"rope_theta": 500042.0}, RopeConfig(500042.0)),
    ],
)
def test_rotated_shares(kind: str, given: dict[str, Any], expected: RopeConfig) -> None:
    config = {k: v for k, v in config_of(kind).items() if k != "rope_parameters"}
    assert parse_model_config(config | given).ropes == (expected,)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("cohere", {"use_qk_norm": True}, "use_qk_norm = true is not supported"),
        ("cohere", {"logit_scale": 0}, "logit_scale = 0: expected a finite number above 0"),
        ("cohere2", {"layer_types": ["full_attention"]}, "layer_types = .*: expected a name for each of 3 layers"),
        ("falcon", {"alibi": True}, "alibi = true is not supported; only the rotary embedding is"),
        ("falcon", {**NEW_FALCON, "parallel_attn": False}, "parallel_attn = False: expected true with new_decoder"),
        ("falcon", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn = 2: expected 1, or 2 with new_decoder"),
        ("falcon", {**NEW_FALCON, "num_ln_in_parallel_attn": 3}, "num_ln_in_parallel_attn = 3: expected 1, or 2"),
        ("falcon", {"multi_query": False, "num_kv_heads": 2}, "num_kv_heads = 2: expected num_attention_heads = 6"),
        ("falcon", {**NEW_FALCON, "num_kv_heads": 4}, "6 is no multiple of"),
        ("falcon", {"num_attention_heads": 5}, "hidden_size = 48 is no multiple of num_attention_heads = 5"),
        ("falcon", {"num_attention_heads": 16}, "head_dim = 3 is odd"),
        ("falcon", {"activation": "tanh"}, "activation = 'tanh' is not supported; supported are silu"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = true is not supported"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention = true is not supported"),
        ("gpt2", {"n_head": 7}, "n_embd = 48 is no multiple of n_head = 7"),
        ("gpt2", {"n_layer": 0}, "n_layer = 0: expected an integer from 1"),
        ("gpt_bigcode", {"add_cross_attention": True}, "add_cross_attention = true is not supported"),
        (
            "gpt_neo",
            {"attention_types": [[["global", "block"], 1]]},
            "attention_types = .*: expected pairs of a list of",
        ),
        (
            "gpt_neo",
            {"attention_types": [[["global"], 10**9]]},
            "attention_types = .*: expected a kind for each of 3 lay",
        ),
        ("gpt_neo", {"attention_types": [[["local"] * 9, 10**9]] * 9}, "expected a kind for each of 3 layers"),
        ("gpt_neo", {"num_layers": 2**31 - 1}, "num_layers = 2147483647: expected at most"),
        ("cohere2", {"num_hidden_layers": 2**31 - 1}, "num_hidden_layers = 2147483647: expected at most"),
        (
            "gpt_neo",
            {"attention_types": [[[], 10**9], [["local"], 3]]},
            "attention_types = .*: expected pairs of a list",
        ),
        ("gpt_neo", {"attention_types": "global"}, "attention_types = 'global': expected pairs"),
        ("gpt_neo", {"attention_types": [[["global"], 2]]}, "expected a kind for each of 3 layers"),
        ("gpt_neox", {"rotary_pct": 0}, "rotary_pct = 0: expected a finite number above 0"),
        ("gpt_neox", {"rotary_pct": 1.5}, "partial_rotary_factor = 1.5: expected at most 1"),
        ("gpt_neox", {"hidden_act": "quick_gelu"}, "hidden_act = 'quick_gelu' is not supported; supported are"),
        ("gptj", {"rotary_dim": 7}, "rotary_dim = 7: expected an even number up to the head's 16"),
        ("gptj", {"rotary_dim": 18}, "rotary_dim = 18: expected an even number up to the head's 16"),
        ("gptj", {"tie_word_embeddings": True}, "tie_word_embeddings = true is not supported: the output head has a"),
        ("phi", {"qk_layernorm": True}, "qk_layernorm = true is not supported"),
        ("phi", {"tie_word_embeddings": True}, "tie_word_embeddings = true is not supported: the output head has a"),
        ("stablelm", {"qk_layernorm": True}, "qk_layernorm = true is not supported"),
        ("starcoder2", {"sliding_window": 0}, "sliding_window = 0: expected an integer from 1"),
        ("opt", {"do_layer_norm_before": "no"}, "do_layer_norm_before = 'no': expected true or false"),
        ("opt", {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine = false is not supported"),
        ("opt", {"word_embed_proj_dim": 0}, "word_embed_proj_dim = 0: expected an integer from 1"),
    ],
)
def test_what_is_refused(kind: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        parse_model_config(config_of(kind, **changes))


@pytest.mark.parametrize("config", [*map(config_of, ARCHITECTURES), config_of("opt", **OPT_350M)])
def test_the_number_of_parameters_is_that_of_the_checkpoint(config: dict[str, Any]) -> None:
    expected = sum(tensor.numel() for tensor in random_tensors(config).values())
    assert num_parameters(parse_model_config(config)) == expected


@pytest.mark.parametrize(("kind", "changes", "expected"), PUBLISHED)
def test_published_shapes_have_their_number_of_parameters(kind: str, changes: dict[str, Any], expected: int) -> None:
    config = {"architectures": [ARCHITECTURES[kind]], **changes}
    assert num_parameters(parse_model_config(config)) == expected

"""What configs of quantised checkpoints mean for each layer, and what is refused with what is supported."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from octavo.worker.errors import ModelConfigError
from octavo.worker.models.config import parse_model_config
from octavo.worker.models.sizes import num_parameters, weight_bytes
from octavo.worker.models.targets import ShardSpec
from octavo.worker.quantization import config as reading
from octavo.worker.quantization import methods
from octavo.worker.quantization.awq import AWQScheme
from octavo.worker.quantization.compressed import IntegerScheme
from octavo.worker.quantization.config import read_quantization
from octavo.worker.quantization.fp8 import Float8Scheme
from octavo.worker.quantization.gptq import GPTQScheme
from octavo.worker.quantization.layers import OnLoadScheme
from octavo.worker.quantization.methods import config_beside, method_of
from octavo.worker.quantization.plain import PLAIN
from octavo.worker.quantization.scheme import LinearScheme
from octavo.worker.quantization.squeezellm import SqueezeLLMScheme
from tests.support.quantized import WIDE_LLAMA, StoredTensor

GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True, "sym": True}
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
AUTO_ROUND: dict[str, Any] = {
    "quant_method": "auto-round",
    "bits": 4,
    "group_size": 128,
    "sym": True,
    "data_type": "int",
    "packing_format": "auto_round:auto_gptq",
}
FP8: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128, "dynamic": False}
FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}
PACKED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": INT4, "input_activations": None}},
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
    "global_compression_ratio": None,
}
Q, DOWN = "model.layers.3.self_attn.q_proj", "model.layers.3.mlp.down_proj"


def scheme_of(config: dict[str, Any], prefix: str = Q, **more: Any) -> LinearScheme:
    return read_quantization(config, **more).scheme_of(prefix)


def group(weights: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights or INT4} | more}}


@pytest.mark.parametrize(
    ("config", "scheme"),
    [
        (GPTQ, GPTQScheme(4, 128, True, 1)),
        (GPTQ | {"group_size": -1, "desc_act": False}, GPTQScheme(4, None, False, 1)),
        (GPTQ | {"checkpoint_format": "gptq_v2", "bits": 3}, GPTQScheme(3, 128, True, 0)),
        (GPTQ | {"format": "gptq_v2"}, GPTQScheme(4, 128, True, 0)),
        ({"bits": 8, "group_size": 32}, GPTQScheme(8, 32, False, 1)),
        (AWQ, AWQScheme("gemm", 128)),
        (AWQ | {"version": "GEMV", "group_size": 64}, AWQScheme("gemv", 64)),
        ({"zero_point": True, "q_group_size": -1, "w_bit": 4, "version": "GEMM"}, AWQScheme("gemm", None)),
        (AUTO_ROUND | {"bits": 3}, GPTQScheme(3, 128, False, 1)),
        (AUTO_ROUND | {"packing_format": "auto_round:auto_awq", "sym": False}, AWQScheme("gemm", 128)),
        ({"quant_method": "squeezellm", "wbits": 3}, SqueezeLLMScheme(3)),
        ({"wbits": 4}, SqueezeLLMScheme(4)),
        (FP8, Float8Scheme(None, "dynamic")),
        (FP8 | {"activation_scheme": "static"}, Float8Scheme(None, "static")),
        (
            FP8 | {"weight_block_size": [128, 128], "fmt": "e4m3"},
            Float8Scheme((128, 128), "dynamic", "weight_scale_inv"),
        ),
        (PACKED, IntegerScheme(4, True, "group", 128, True)),
        (PACKED | group(INT4 | {"actorder": "group"}), IntegerScheme(4, True, "group", 128, True, ordered=True)),
        (PACKED | group(INT4 | {"actorder": "weight"}), IntegerScheme(4, True, "group", 128, True)),
        (
            PACKED | group({"num_bits": 8, "strategy": "channel", "symmetric": False}),
            IntegerScheme(8, True, "channel", None, False),
        ),
        (PACKED | {"format": "float-quantized"} | group(FLOAT8), Float8Scheme(None, "none")),
        (
            PACKED
            | {"format": "float-quantized"}
            | group(
                FLOAT8 | {"strategy": "block", "block_structure": [128, 128]},
                input_activations={"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
            ),
            Float8Scheme((128, 128), "dynamic"),
        ),
        (
            PACKED
            | {"format": "float-quantized"}
            | group(
                FLOAT8 | {"strategy": "tensor"},
                input_activations={"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False},
            ),
            Float8Scheme(None, "static"),
        ),
        (
            PACKED
            | {"format": "int-quantized"}
            | group({"num_bits": 8, "strategy": "channel"}, input_activations={"num_bits": 8, "dynamic": True}),
            IntegerScheme(8, False, "channel", None, True, input_tensors=("input_scale", "input_zero_point")),
        ),
        (
            PACKED | {"format": "mixed-precision"} | group(format="pack-quantized"),
            IntegerScheme(4, True, "group", 128, True),
        ),
    ],
)
def test_configs_of_real_checkpoints(config: dict[str, Any], scheme: LinearScheme) -> None:
    assert scheme_of(config) == scheme
    assert scheme_of(config, "lm_head") is PLAIN


def test_rules_of_gptq() -> None:
    rules = {"-:.*k_proj": {}, r"+:.*\.3\..*": {"bits": 8, "group_size": -1}, r".*down.*": {"bits": 2}}
    config = GPTQ | {"dynamic": rules}
    assert scheme_of(config) == GPTQScheme(8, None, True, 1)
    assert scheme_of(config, DOWN) == GPTQScheme(8, None, True, 1)  # the first that matches
    assert scheme_of(config, DOWN.replace("3", "4")) == GPTQScheme(2, 128, True, 1)
    assert scheme_of(config, "model.layers.3.self_attn.k_proj") is PLAIN
    only = GPTQ | {"modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.up_proj"]]}
    assert scheme_of(only) == scheme_of(GPTQ)
    assert scheme_of(only, DOWN) is PLAIN
    assert scheme_of(GPTQ | {"lm_head": True}, "lm_head") == scheme_of(GPTQ)


def test_single_layers_of_auto_round() -> None:
    extra = {
        Q: {"bits": 8, "group_size": 32},
        r".*\.mlp\..*": {"bits": 16},
        "k_proj$": {"bits": 2},
        "lm_head": {"bits": 8},
    }
    config = AUTO_ROUND | {"extra_config": extra}
    assert scheme_of(config) == GPTQScheme(8, 32, False, 1)
    assert scheme_of(config, DOWN) is PLAIN
    assert scheme_of(config, "model.layers.3.self_attn.k_proj") == GPTQScheme(2, 128, False, 1)
    assert scheme_of(config, "model.layers.3.self_attn.v_proj") == GPTQScheme(4, 128, False, 1)
    assert scheme_of(config, "lm_head") == GPTQScheme(8, 128, False, 1)


def test_lists_of_what_is_left_out() -> None:
    assert scheme_of(AWQ | {"modules_to_not_convert": ["self_attn"]}) is PLAIN
    assert scheme_of(AWQ | {"modules_to_not_convert": ["self_attn"]}, DOWN) == scheme_of(AWQ)
    for entry in (Q, "q_proj", "model.layers.3", "self_attn.q_proj"):
        assert scheme_of(FP8 | {"ignored_layers": [entry]}) is PLAIN, entry
        assert scheme_of(FP8 | {"modules_to_not_convert": [entry]}) is PLAIN, entry
    for entry in ("model.layers.30", "model.layers", "q", "layers.3.self_attn.q"):
        left_out = scheme_of(FP8 | {"ignored_layers": [entry]}) is PLAIN
        assert left_out is (entry == "model.layers"), entry
    for entry in (Q, r"re:.*q_proj$", r"re:model\.layers\.[0-3]\..*"):
        assert scheme_of(PACKED | {"ignore": [entry]}) is PLAIN, entry
    assert scheme_of(PACKED | {"ignore": [r"re:.*k_proj", "q_proj"]}) == scheme_of(PACKED)


def test_groups_of_compressed_tensors_from_the_most_specific_on() -> None:
    groups = {
        "a": {"targets": ["Linear"], "weights": INT4},
        "b": {"targets": [r"re:.*\.3\..*"], "weights": INT4 | {"group_size": 32}},
        "c": {"targets": [Q], "weights": INT4 | {"num_bits": 8}},
    }
    config = PACKED | {"config_groups": groups}
    assert scheme_of(config) == IntegerScheme(8, True, "group", 128, True)
    assert scheme_of(config, DOWN) == IntegerScheme(4, True, "group", 32, True)
    assert scheme_of(config, "model.layers.4.x") == IntegerScheme(4, True, "group", 128, True)
    del groups["a"]
    assert scheme_of(config, "model.layers.4.x") is PLAIN


def test_the_checkpoint_has_the_last_word() -> None:
    plain = {f"{Q}.weight": StoredTensor((64, 64), "BF16")}
    assert scheme_of(GPTQ, tensors=plain) is PLAIN
    stored = {"lm_head.qweight": StoredTensor((8, 64), "I32")}
    assert scheme_of(GPTQ, "lm_head", tensors=stored) == scheme_of(GPTQ)
    # A weight of 8 bits without its scale is no plain weight: the loader says what is missing.
    unscaled = {f"{Q}.weight": StoredTensor((64, 64), "F8_E4M3")}
    assert scheme_of(FP8, tensors=unscaled) == scheme_of(FP8)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"quant_method": "exl2"},
            "method 'exl2' is not supported; supported are auto-round, awq, compressed-tensors, fp8",
        ),
        ({}, "method None is not supported"),
        (7, "method 7 is not supported"),
        ("gptq", "quantization_config = 'gptq': expected an object"),
        (GPTQ | {"bits": 5}, r"quantization_config\.bits = 5: not supported; supported are 2, 3, 4, 8"),
        (GPTQ | {"bits": None}, r"quantization_config\.bits is missing"),
        (GPTQ | {"bits": "4"}, r"quantization_config\.bits = '4': expected an integer"),
        (GPTQ | {"group_size": 0}, r"group_size = 0: expected an integer from 1"),
        (GPTQ | {"group_size": -2}, r"group_size = -2: expected an integer from 1"),
        (GPTQ | {"desc_act": 1}, "desc_act = 1: expected true or false"),
        (
            GPTQ | {"checkpoint_format": "marlin"},
            "checkpoint_format = 'marlin' is not supported; supported are gptq, gptq_v2",
        ),
        (GPTQ | {"is_marlin_format": True}, "is_marlin_format = True: not supported"),
        (GPTQ | {"pack_dtype": "int16"}, "pack_dtype = 'int16': not supported; supported: none, \"int32\""),
        (GPTQ | {"dynamic": {"(": {}}}, r"pattern '\(' is not supported"),
        (GPTQ | {"dynamic": {"a": {"bits": 7}}}, r"dynamic\.a\.bits = 7: not supported; supported are 2, 3, 4, 8"),
        (GPTQ | {"dynamic": {"a": 3}}, r"dynamic\.a = 3: expected an object"),
        (GPTQ | {"dynamic": {"a": {"method": "awq"}}}, r"dynamic\.a\.method = 'awq': not supported"),
        (GPTQ | {"modules_in_block_to_quantize": "q"}, "modules_in_block_to_quantize = 'q': expected a list of names"),
        (AWQ | {"bits": 3}, "bits = 3: not supported; supported are 4"),
        (AWQ | {"version": "marlin"}, "version = 'marlin' is not supported; supported are gemm, gemv"),
        (AWQ | {"version": "gemv_fast"}, "version = 'gemv_fast' is not supported"),
        (AWQ | {"backend": "llm-awq"}, "backend = 'llm-awq': not supported"),
        (AWQ | {"modules_to_not_convert": "x"}, "modules_to_not_convert = 'x': expected a list"),
        (
            AUTO_ROUND | {"packing_format": "auto_round:fp8"},
            "packing_format = 'auto_round:fp8' is not supported; supported",
        ),
        (AUTO_ROUND | {"data_type": "mx_fp"}, "data_type = 'mx_fp': not supported"),
        (AUTO_ROUND | {"act_bits": 8}, "act_bits = 8: not supported; 16 is"),
        (AUTO_ROUND | {"extra_config": [1]}, r"extra_config = \[1\]: expected an object"),
        (AUTO_ROUND | {"extra_config": {"a": 3}}, r"extra_config\.a = 3: expected an object"),
        (
            AUTO_ROUND | {"extra_config": {"a": {"bits": 5}}},
            r"extra_config\.a\.bits = 5: not supported; supported are 2",
        ),
        ({"quant_method": "squeezellm", "wbits": 2}, "wbits = 2: not supported; supported are 3, 4"),
        (
            FP8 | {"activation_scheme": "none"},
            "activation_scheme = 'none' is not supported; supported are dynamic, static",
        ),
        (FP8 | {"fmt": "e5m2"}, "fmt = 'e5m2': not supported"),
        (FP8 | {"weight_block_size": [128]}, r"weight_block_size = \[128\]: expected two integers"),
        (FP8 | {"weight_block_size": [128, 0]}, "expected two integers of at least 1"),
        (
            FP8 | {"weight_block_size": [128, 128], "activation_scheme": "static"},
            "activation_scheme = 'static': not supported with weight_block_size",
        ),
        (
            PACKED | {"format": "marlin-24"},
            "format = 'marlin-24' is not supported; supported are float-quantized, int-",
        ),
        (PACKED | {"format": "nvfp4-pack-quantized"}, "format = 'nvfp4-pack-quantized' is not supported"),
        (PACKED | {"quantization_status": "frozen"}, "quantization_status = 'frozen': not supported"),
        (
            PACKED | {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparsity_config = .* not supported; dense weights",
        ),
        (PACKED | {"transform_config": {"config_groups": {"u": {}}}}, "transform_config = .* not supported"),
        (PACKED | {"config_groups": {}}, "config_groups = {}: expected an object of 1 to 256 groups"),
        (PACKED | {"config_groups": {"a": None}}, "config_groups.a = None: expected an object"),
        (PACKED | group(INT4 | {"num_bits": 6}), r"group_0\.weights\.num_bits = 6: not supported; supported are 4, 8"),
        (PACKED | group(FLOAT8), r"weights\.type = 'float': not supported in format pack-quantized"),
        (
            PACKED | group(INT4 | {"strategy": "block"}),
            "strategy = 'block' is not supported; supported are tensor, channel",
        ),
        (PACKED | group(INT4 | {"actorder": "best"}), "actorder = 'best': not supported; supported are group, weight"),
        (PACKED | group(INT4 | {"dynamic": True}), "dynamic = True: not supported"),
        (PACKED | group(output_activations={"num_bits": 8}), "output_activations = .*: not supported"),
        (PACKED | {"ignore": ["re:["]}, r"pattern '\[' is not supported"),
        (
            PACKED | {"format": "float-quantized"} | group(FLOAT8 | {"num_bits": 4}),
            "num_bits = 4: not supported; supported are 8",
        ),
        (
            PACKED | {"format": "float-quantized"} | group(FLOAT8 | {"strategy": "block"}),
            "block_structure = None: contradicts strategy block",
        ),
    ],
)
def test_what_is_refused(config: Any, message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        read_quantization(config)


def test_what_is_chosen() -> None:
    assert scheme_of(GPTQ, chosen="gptq") == scheme_of(GPTQ)
    assert isinstance(read_quantization(None, "fp8").scheme_of(Q), OnLoadScheme)
    assert read_quantization(None, "fp8").scheme_of("lm_head") is PLAIN
    assert read_quantization(None).scheme_of(Q) is PLAIN
    with pytest.raises(ModelConfigError, match=r"--quantization awq contradicts .* it is gptq"):
        read_quantization(GPTQ, "awq")
    with pytest.raises(ModelConfigError, match=r"--quantization fp8 contradicts .* it is gptq"):
        read_quantization(GPTQ, "fp8")
    with pytest.raises(
        ModelConfigError, match="--quantization 'bitsandbytes' is not supported; supported are auto-round, aw"
    ):
        read_quantization(None, "bitsandbytes")
    with pytest.raises(
        ModelConfigError, match=r"--quantization gptq: the model folder says nothing of it.*become fp8, int8 on"
    ):
        read_quantization(None, "gptq")


def test_sizes_of_a_quantised_model() -> None:
    plain = parse_model_config(WIDE_LLAMA)
    stored = parse_model_config(WIDE_LLAMA | {"quantization_config": GPTQ | {"group_size": 16}})
    assert num_parameters(stored) == num_parameters(plain)
    dtype = torch.float16
    # Four bits a number, scales of 16 bits, zero points of 4 and the group of each input; all else as it was.
    sizes = {backend: weight_bytes(stored, dtype, ShardSpec(), backend) for backend in ("triton", "cpu", "reference")}
    whole = weight_bytes(plain, dtype, ShardSpec(), "cpu")
    assert 0.4 < sizes["triton"] / whole < 0.6
    # What a backend has no products with becomes plain numbers.
    assert sizes == {"triton": sizes["triton"], "cpu": sizes["triton"], "reference": whole}
    assert weight_bytes(stored, torch.float32, ShardSpec(), "triton") == 2 * whole


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (None, "none"),
        (GPTQ | {"group_size": -1, "desc_act": True}, "gptq, 4 bits, one group, desc_act"),
        ({"w_bit": 4, "q_group_size": 128, "zero_point": True}, "awq, 4 bits, groups of 128"),
        ({"quant_method": "compressed-tensors", "format": "int-quantized"}, "compressed-tensors, int-quantized"),
    ],
)
def test_methods_in_words(config: dict[str, Any] | None, words: str) -> None:
    assert methods.method_in_words(config) == words


def test_every_method_is_read() -> None:
    assert set(reading._READERS) == set(methods.SUPPORTED_METHODS)
    assert set(reading._ON_LOAD) == set(methods.ON_LOAD_METHODS)


def test_files_beside_the_config(tmp_path: Path) -> None:
    assert config_beside(tmp_path) is None
    (tmp_path / "quant_config.json").write_text(json.dumps({"wbits": 4}))
    assert method_of(config_beside(tmp_path)) == "squeezellm"
    (tmp_path / "quantize_config.json").write_text(json.dumps({"bits": 4, "group_size": 128, "desc_act": False}))
    assert method_of(config_beside(tmp_path)) == "gptq"
    for content, message in (
        ("[]", "holds no JSON object"),
        ("{", "cannot be read"),
        (" " * (2**20 + 1), "limit 1048576"),
    ):
        (tmp_path / "quantize_config.json").write_text(content)
        with pytest.raises(ModelConfigError, match=rf"quantize_config\.json.*{message}"):
            config_beside(tmp_path)


def paths(value: Any, start: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return where values stand in an object."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path for key, inner in items for path in [(*start, key), *paths(inner, (*start, key))]]


RICH = [
    GPTQ | {"dynamic": {"a": {"bits": 4}, "-:b": {}}, "modules_in_block_to_quantize": [["a"]], "lm_head": True},
    AWQ | {"modules_to_not_convert": ["a"]},
    AUTO_ROUND | {"extra_config": {"a": {"bits": 4}}},
    FP8 | {"weight_block_size": [8, 8], "ignored_layers": ["a"], "fmt": "e4m3"},
    PACKED,
    PACKED | {"format": "float-quantized"} | group(FLOAT8, input_activations={"num_bits": 8, "type": "float", "dynamic": True}),
]  # fmt: skip
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["", "a", "re:(", "gptq", "dense"])
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["a", "format"]), inner, max_size=2)
)  # fmt: skip


@given(st.sampled_from(RICH), st.data())
def test_any_value_is_read_or_refused(config: dict[str, Any], data: st.DataObject) -> None:
    changed = copy.deepcopy(config)
    path = data.draw(st.sampled_from(paths(changed)))
    inner: Any = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = data.draw(VALUES)
    try:
        scheme_of(changed)
    except ModelConfigError:
        return

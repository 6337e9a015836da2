"""Quantised checkpoints as whole models: the logits are those of plain checkpoints with the same numbers, bit for bit."""

import json
import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.worker.errors import ModelConfigError, WeightsError
from octavo.worker.models import layers
from tests.support import quantized
from tests.support.architectures import logits_of
from tests.support.gpt_architectures import config_of
from tests.support.quantized import WIDE_LLAMA, WIDE_QWEN2_MOE, Draw, quantized_model
from tests.support.tiny_models import load_eager, random_tensors, write_model

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False, "sym": False}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}


def compressed(form: str, weights: dict[str, Any], **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights} | more
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


INPUTS = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}
CHECKPOINTS: dict[str, tuple[dict[str, Any], Draw]] = {
    "gptq desc_act": (GPTQ | {"desc_act": True}, quantized.gptq(desc_act=True)),
    "gptq 3": (GPTQ | {"bits": 3, "group_size": 32}, quantized.gptq(3, 32)),
    "gptq 8 v2": (GPTQ | {"bits": 8, "checkpoint_format": "gptq_v2", "group_size": -1}, quantized.gptq(8, -1, stored_minus=0)),
    "awq gemm": ({"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True}, quantized.awq_gemm()),
    "awq gemv": ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "GEMV"}, quantized.awq_gemv(32)),
    "squeezellm": ({"quant_method": "squeezellm", "wbits": 4}, quantized.squeezellm(4, sparse=True, full_rows=5)),
    "fp8": (FP8, quantized.fp8()),
    "fp8 static": (FP8 | {"activation_scheme": "static"}, quantized.fp8(static=True)),
    "fp8 blocks": (FP8 | {"weight_block_size": [16, 32]}, quantized.fp8("block", name="weight_scale_inv")),
    "packed integers": (
        compressed("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16, "symmetric": False}),
        quantized.compressed_integers(symmetric=False),
    ),
    "compressed fp8": (
        compressed("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}, input_activations=INPUTS),
        quantized.fp8("channel"),
    ),
    "compressed int8": (
        compressed("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}),
        quantized.compressed_integers(8, "channel", packed=False),
    ),
}  # fmt: skip
IDS = torch.randint(96, (30,), generator=torch.Generator().manual_seed(1)).tolist()


def logits(folder: Path, backend: str = "reference", **settings: Any) -> Tensor:
    runner = load_eager(folder, backend=backend, **settings)
    return logits_of(runner._model, runner._caches, IDS, [17, *([1] * 13)], runner.rows.limits.block_size)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_quantised_model_is_the_plain_one_of_its_numbers(tmp_path: Path, name: str) -> None:
    config, draw = CHECKPOINTS[name]
    stored, plain = quantized_model(WIDE_LLAMA, draw)
    write_model(tmp_path / "stored", WIDE_LLAMA | {"quantization_config": config}, stored, num_shards=2)
    write_model(tmp_path / "plain", WIDE_LLAMA, plain)
    expected = logits(tmp_path / "plain")
    assert torch.equal(logits(tmp_path / "stored"), expected)
    assert torch.allclose(logits(tmp_path / "stored", backend="cpu"), expected, atol=1e-3, rtol=1e-3)
    random = logits(tmp_path / "stored", load_format="dummy")
    assert bool(random.isfinite().all())


@pytest.mark.parametrize("name", ["gptq desc_act", "awq gemm", "squeezellm", "fp8 blocks", "compressed int8"])
def test_quantised_experts_are_plain_ones_of_their_numbers(tmp_path: Path, name: str) -> None:
    config, draw = CHECKPOINTS[name]
    stored, plain = quantized_model(WIDE_QWEN2_MOE, draw)
    assert sum("experts" in key for key in stored.keys() - plain.keys()) > 0
    write_model(tmp_path / "stored", WIDE_QWEN2_MOE | {"quantization_config": config}, stored)
    write_model(tmp_path / "plain", WIDE_QWEN2_MOE, plain)
    expected = logits(tmp_path / "plain")
    assert torch.equal(logits(tmp_path / "stored"), expected)
    assert torch.allclose(logits(tmp_path / "stored", backend="cpu"), expected, atol=1e-3, rtol=1e-3)


def test_an_order_of_the_inputs_that_is_not_told_is_missed(tmp_path: Path) -> None:
    config, draw = CHECKPOINTS["gptq desc_act"]
    stored, _ = quantized_model(WIDE_LLAMA, draw)
    without = {name: tensor for name, tensor in stored.items() if not name.endswith(".g_idx")}
    write_model(tmp_path, WIDE_LLAMA | {"quantization_config": config}, without)
    with pytest.raises(WeightsError, match=r"lacks \d+ tensors that the model needs: .*\.g_idx"):
        logits(tmp_path)


def test_half_precision_rounds_each_number_once(tmp_path: Path) -> None:
    stored, plain = quantized_model(WIDE_LLAMA, quantized.gptq())
    write_model(tmp_path / "stored", WIDE_LLAMA | {"quantization_config": GPTQ}, stored)
    write_model(tmp_path / "plain", WIDE_LLAMA, plain)
    ours = logits(tmp_path / "stored", dtype="bfloat16")
    assert torch.equal(ours, logits(tmp_path / "plain", dtype="bfloat16"))


@pytest.mark.parametrize(
    ("file", "config", "draw"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 16, "desc_act": False}, quantized.gptq()),
        ("quant_config.json", {"zero_point": True, "q_group_size": 16, "w_bit": 4, "version": "GEMM"}, quantized.awq_gemm()),
        ("quant_config.json", {"wbits": 3}, quantized.squeezellm(3)),
    ],
    ids=["gptq", "awq", "squeezellm"],
)  # fmt: skip
def test_what_older_tools_wrote_beside_the_config(
    tmp_path: Path, file: str, config: dict[str, Any], draw: Draw
) -> None:
    stored, plain = quantized_model(WIDE_LLAMA, draw)
    write_model(tmp_path / "stored", WIDE_LLAMA, stored)
    (tmp_path / "stored" / file).write_text(json.dumps(config))
    write_model(tmp_path / "plain", WIDE_LLAMA, plain)
    assert torch.equal(logits(tmp_path / "stored"), logits(tmp_path / "plain"))


def test_layers_that_are_left_out_are_plain_even_in_a_fused_one(tmp_path: Path) -> None:
    for only, config in (("mlp.", {"modules_in_block_to_quantize": [["mlp.up_proj"], ["mlp.gate_proj", "mlp.down_proj"]]}),
                         ("k_proj", {"dynamic": {r"-:.*(?:q|v|o|up|gate|down)_proj": {}}})):  # fmt: skip
        stored, plain = quantized_model(WIDE_LLAMA, quantized.gptq(), only=only)
        write_model(tmp_path / only / "stored", WIDE_LLAMA | {"quantization_config": GPTQ | config}, stored)
        write_model(tmp_path / only / "plain", WIDE_LLAMA, plain)
        # A fused product in parts adds up in the same order: each output is a sum of its own.
        assert torch.equal(logits(tmp_path / only / "stored"), logits(tmp_path / only / "plain"))


def test_the_checkpoint_itself_says_what_is_plain(tmp_path: Path) -> None:
    stored, plain = quantized_model(WIDE_LLAMA, quantized.fp8(), only="mlp.")
    write_model(tmp_path / "stored", WIDE_LLAMA | {"quantization_config": FP8}, stored)
    write_model(tmp_path / "plain", WIDE_LLAMA, plain)
    assert torch.equal(logits(tmp_path / "stored"), logits(tmp_path / "plain"))


def test_plain_weights_become_float8_on_load(tmp_path: Path) -> None:
    write_model(tmp_path, WIDE_LLAMA)
    plain, rounded = logits(tmp_path), logits(tmp_path, quantization="fp8")
    assert 0.001 < (plain - rounded).abs().mean() / plain.std() < 0.1


def test_what_is_dequantised_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stored, _ = quantized_model(WIDE_LLAMA, quantized.gptq())
    write_model(tmp_path, WIDE_LLAMA | {"quantization_config": GPTQ}, stored)
    layers._say_dequantized.cache_clear()
    with caplog.at_level(logging.INFO, "octavo.worker.models.layers"):
        load_eager(tmp_path)
    assert [record.message for record in caplog.records if "dequantised" in record.message] == [
        "this backend has no products with weights so quantised: they are dequantised to torch.float32"
    ]


def refused(
    folder: Path, changes: dict[str, Tensor | None], config: dict[str, Any] = GPTQ, draw: Draw | None = None
) -> str:
    stored, _ = quantized_model(WIDE_LLAMA, draw or quantized.gptq())
    for name, tensor in changes.items():
        if tensor is None:
            del stored[name]
        else:
            stored[name] = tensor
    write_model(folder, WIDE_LLAMA | {"quantization_config": config}, stored)
    with pytest.raises((WeightsError, ModelConfigError)) as caught:
        load_eager(folder)
    return str(caught.value)


Q = "model.layers.1.self_attn.q_proj"


def test_damage_is_named_with_tensor_expected_and_found(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Tensor | None], str]] = [
        ({f"{Q}.scales": None}, f"lacks 1 tensors that the model needs: {Q}.scales"),
        ({f"{Q}.weight": torch.zeros(64, 64)}, f"holds 1 tensors that the model does not know: {Q}.weight"),
        ({f"{Q}.qweight": torch.zeros(8, 63, dtype=torch.int32)}, f"{Q}.qweight in .* has shape [8, 63], expected [8, 64]"),
        ({f"{Q}.qweight": torch.zeros(8, 64)}, f"{Q}.qweight in .* has dtype F32, expected I32"),
        ({f"{Q}.scales": torch.zeros(4, 64, dtype=torch.int8)}, f"{Q}.scales in .* has dtype I8, expected F32, F16, BF16"),
        ({f"{Q}.qzeros": torch.zeros(5, 8, dtype=torch.int32)}, f"{Q}.qzeros in .* has shape [5, 8], expected [4, 8]"),
        ({f"{Q}.bias": torch.ones(64).half()}, f"tensor {Q}.bias: is not zero, but the model has no bias there"),
    ]  # fmt: skip
    for number, (changes, message) in enumerate(cases):
        pattern = re.escape(message).replace(r"\.\*", ".*")
        assert re.search(pattern, refused(tmp_path / str(number), changes)), message


def test_zero_biases_of_old_tools_are_no_surplus(tmp_path: Path) -> None:
    stored, plain = quantized_model(WIDE_LLAMA, quantized.gptq())
    stored[f"{Q}.bias"] = torch.zeros(64).half()
    write_model(tmp_path / "stored", WIDE_LLAMA | {"quantization_config": GPTQ}, stored)
    write_model(tmp_path / "plain", WIDE_LLAMA, plain)
    assert torch.equal(logits(tmp_path / "stored"), logits(tmp_path / "plain"))


def test_scales_of_the_cache_are_named_and_not_read(tmp_path: Path) -> None:
    stored, plain = quantized_model(WIDE_LLAMA, quantized.fp8())
    stored["model.layers.0.self_attn.k_scale"] = torch.tensor(0.5)
    write_model(tmp_path / "stored", WIDE_LLAMA | {"quantization_config": FP8}, stored)
    write_model(tmp_path / "plain", WIDE_LLAMA, plain)
    assert torch.equal(logits(tmp_path / "stored"), logits(tmp_path / "plain"))


LAYOUTS: dict[str, dict[str, Any]] = {
    "gpt2": config_of("gpt2", n_embd=64, n_head=4, n_inner=96),
    "gpt_neox": config_of("gpt_neox", hidden_size=64, num_attention_heads=4, intermediate_size=96),
    "falcon": config_of(
        "falcon",
        hidden_size=64,
        num_attention_heads=4,
        ffn_hidden_size=96,
        new_decoder_architecture=True,
        num_kv_heads=2,
    ),
    "gptj": config_of("gptj", n_embd=64, n_head=4, n_inner=96),
}
"""Kinds with matrices that are fused, interleaved, transposed or reordered."""


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("name", ["gptq desc_act", "awq gemm"])
def test_fused_and_reordered_matrices(tmp_path: Path, kind: str, name: str) -> None:
    config = LAYOUTS[kind]
    quantization, draw = CHECKPOINTS[name]
    transposed = kind == "gpt2"  # quantised ones never are
    stored, plain = quantized_model(config, draw)
    write_model(tmp_path / "stored", config | {"quantization_config": quantization}, stored)
    if transposed and name == "awq gemm":
        with pytest.raises(ModelConfigError, match=r"AWQ is not supported for layers that are stored as \[inputs"):
            load_eager(tmp_path / "stored")
        return
    write_model(tmp_path / "plain", config, plain)
    assert torch.equal(logits(tmp_path / "stored"), logits(tmp_path / "plain"))


def test_the_flag_must_not_contradict_the_config(tmp_path: Path) -> None:
    write_model(tmp_path, WIDE_LLAMA | {"quantization_config": GPTQ}, random_tensors(WIDE_LLAMA))
    with pytest.raises(
        ModelConfigError, match="--quantization awq contradicts the quantization_config of the model: it is gptq"
    ):
        load_eager(tmp_path, quantization="awq")


def test_a_quantised_head(tmp_path: Path) -> None:
    config = WIDE_LLAMA | {"tie_word_embeddings": False, "vocab_size": 96}
    stored, plain = quantized_model(config, quantized.gptq())
    drawn = quantized.gptq()(96, 64, np.random.default_rng(5))
    del stored["lm_head.weight"]
    stored |= {f"lm_head.{name}": tensor for name, tensor in drawn.tensors.items()}
    plain["lm_head.weight"] = torch.from_numpy(drawn.numbers)
    write_model(tmp_path / "stored", config | {"quantization_config": GPTQ | {"lm_head": True}}, stored)
    write_model(tmp_path / "plain", config, plain)
    assert torch.equal(logits(tmp_path / "stored"), logits(tmp_path / "plain"))

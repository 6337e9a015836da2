"""Tensors of GGUF files: bit for bit what the library makes of them, in the layout of transformers' checkpoints."""

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGUFWriter
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize
from torch import Tensor

from octavo.kernels.ops import get_ops
from octavo.worker.errors import ModelConfigError, WeightsError
from octavo.worker.gguf import reader
from octavo.worker.gguf.config import architecture_of, model_config_values
from octavo.worker.gguf.header import GgufError, GgufFile, read_header
from octavo.worker.gguf.kinds import READABLE
from octavo.worker.models.config import parse_model_config
from octavo.worker.models.decoder import Decoder
from octavo.worker.models.targets import Placement, ShardSpec, Target
from octavo.worker.staging import Staging
from octavo.worker.weights import load_weights, open_checkpoint
from tests.support.gguf_files import TINY, stored, write_gguf
from tests.support.tiny_models import random_tensors

CPU = torch.device("cpu")


def read(folder: Path, path: Path, config: dict[str, object], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    decoder = Decoder(parse_model_config(dict(config)), get_ops("reference"), Placement(dtype, CPU), ShardSpec(), 16)
    seen: list[tuple[int, int]] = []
    load_weights(
        open_checkpoint(folder, path),
        decoder.targets(),
        decoder.is_ignored,
        lambda done, total: seen.append((done, total)),
    )
    assert seen[-1] == (path.stat().st_size,) * 2
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    return {name: target.view for name, target in decoder.targets().items()}


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q5_1, Kind.Q8_0])
@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": False, "attention_bias": True}], ids=["", "biases"])
def test_every_tensor_arrives(tmp_path: Path, kind: Kind, changes: dict[str, bool]) -> None:
    """The rows of Llama's queries and keys are in transformers' order again."""
    config = TINY | changes
    tensors = random_tensors(config)
    path = write_gguf(tmp_path / "m.gguf", config, tensors, kind)
    found = read(tmp_path, path, config)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(found[name], stored(tensor, kind) if tensor.dim() > 1 else tensor), name


def file_of(path: Path, kind: Kind, raw: np.ndarray[tuple[int, int], np.dtype[np.uint8]], name: str) -> GgufFile:
    tensors = random_tensors(TINY)
    writer = GGUFWriter(path, "llama")
    for key, value in (
        ("block_count", 2),
        ("context_length", 8),
        ("embedding_length", 64),
        ("feed_forward_length", 96),
    ):
        writer.add_uint32(f"llama.{key}", value)
    writer.add_uint32("llama.attention.head_count", 4)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tensor("token_embd.weight", tensors["model.embed_tokens.weight"].numpy())
    writer.add_tensor(name, raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read_header(path)


def raw_blocks(kind: Kind, rows: int, columns: int) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    block, size = GGML_QUANT_SIZES[kind]
    return np.random.default_rng(0).integers(0, 120, (rows, columns // block * size), np.uint8)


@pytest.mark.parametrize("kind", READABLE, ids=lambda kind: kind.name)
def test_numbers_are_the_librarys_bit_for_bit(tmp_path: Path, kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of random blocks, whatever they mean, cut into pieces; whole, and the share of one rank of two."""
    monkeypatch.setattr(reader, "PIECE_ELEMENTS", 3 * 768)
    monkeypatch.setattr(reader, "_BLOCK_ELEMENTS", 768)
    raw = raw_blocks(kind, 10, 768)
    file = file_of(tmp_path / "m.gguf", kind, raw, "blk.0.ffn_down.weight")
    expected = torch.from_numpy(dequantize(raw, kind).reshape(10, 768))
    for rows, columns in ((slice(0, 10), slice(0, 768)), (slice(5, 10), slice(256, 512))):
        view = torch.full((rows.stop - rows.start, columns.stop - columns.start), 7.0)
        with reader.GgufCheckpoint(file) as checkpoint:
            (tensor,) = (tensor for tensor in checkpoint.tensors if "down_proj" in tensor.name)
            steps = list(tensor.fill(Target(view, (10, 768), (rows, columns)), Staging(CPU)))
        assert torch.equal(view.nan_to_num(), expected[rows, columns].nan_to_num())
        assert steps[-1] == view.numel()


def test_numbers_are_rounded_once(tmp_path: Path) -> None:
    tensors = random_tensors(TINY)
    found = read(tmp_path, write_gguf(tmp_path / "m.gguf", TINY, tensors, Kind.Q4_1), TINY, torch.bfloat16)
    name = "model.layers.1.self_attn.q_proj.weight"
    assert torch.equal(found[name], stored(tensors[name], Kind.Q4_1).bfloat16())


def test_a_type_that_is_not_read_is_named(tmp_path: Path) -> None:
    file = file_of(tmp_path / "m.gguf", Kind.Q8_K, raw_blocks(Kind.Q8_K, 2, 256), "blk.0.ffn_down.weight")
    with pytest.raises(
        GgufError, match=r"m\.gguf: tensor blk\.0\.ffn_down\.weight has type Q8_K, expected one of F32, "
    ):
        reader.GgufCheckpoint(file)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda tensors: tensors.pop("model.norm.weight"),
            r"lacks 1 tensors that the model needs: model\.norm\.weight",
        ),
        (
            lambda tensors: tensors.update({"model.layers.0.self_attn.v_proj.bias": torch.zeros(32)}),
            r"does not know: model\.layers\.0\.self_attn\.v_proj\.bias",
        ),
        (
            lambda tensors: tensors.update({"model.layers.0.mlp.up_proj.weight": torch.zeros(64, 96)}),
            r"up_proj\.weight in .*m\.gguf has shape \[64, 96\], expected \[96, 64\]",
        ),
    ],
)
def test_every_tensor_is_accounted_for(tmp_path: Path, change: object, message: str) -> None:
    tensors = random_tensors(TINY)
    assert callable(change)
    change(tensors)
    path = write_gguf(tmp_path / "m.gguf", TINY, tensors)
    with pytest.raises(WeightsError, match=message):
        read(tmp_path, path, TINY)


def test_heads_that_do_not_share_the_rows_are_named(tmp_path: Path) -> None:
    metadata = {"attention.head_count": 7340036, "attention.head_count_kv": 2}
    path = write_gguf(tmp_path / "m.gguf", TINY, random_tensors(TINY), metadata=metadata)
    with pytest.raises(GgufError, match=r"m\.gguf: tensor .* has 64 rows, expected a multiple of 14680072: pairs in"):
        open_checkpoint(tmp_path, path)


def test_the_config_is_the_models(tmp_path: Path) -> None:
    file = read_header(write_gguf(tmp_path / "m.gguf", TINY, random_tensors(TINY), Kind.Q8_0))
    values = model_config_values(file)
    assert architecture_of(file).name == "LlamaForCausalLM"
    known = {name: value for name, value in TINY.items() if name not in ("rope_theta", "rms_norm_eps")}
    assert {name: values[name] for name in known} == known
    assert values["rms_norm_eps"] == pytest.approx(1e-5)
    assert values["rope_parameters"] == {"rope_theta": 1000.0, "rope_type": "default"}
    assert values["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("metadata", "rope"),
    [
        ({"rope.scaling.type": "none"}, {"rope_type": "default"}),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 64,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        ),
    ],
)
def test_scaled_positions(tmp_path: Path, metadata: dict[str, object], rope: dict[str, object]) -> None:
    path = write_gguf(tmp_path / "m.gguf", TINY, random_tensors(TINY), metadata=metadata)
    values = model_config_values(read_header(path))
    assert values["rope_parameters"] == {"rope_theta": 1000.0} | rope
    parse_model_config(values)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"block_count": None}, "llama.block_count is missing, expected an integer"),
        ({"attention.head_count_kv": [2, 2]}, r"head_count_kv = \[2, 2\], expected one number for all layers"),
        ({"attention.value_length": 8}, "value_length = 8, expected attention.key_length, which is 16"),
        ({"expert_count": 8}, "llama.expert_count = 8 is not supported"),
        ({"attention.sliding_window": 4096}, "llama.attention.sliding_window = 4096 is not supported"),
        ({"rope.scaling.type": "longrope"}, "'longrope', expected none, linear or yarn"),
        ({"embedding_length": 65}, r"token_embd\.weight has shape \[97, 64\], expected \[vocabulary, 65\]"),
        ({"attention.layer_norm_rms_epsilon": float("nan")}, "= nan, expected a finite number above 0"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path: Path, metadata: dict[str, object], message: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", TINY, random_tensors(TINY), metadata=metadata)
    with pytest.raises(ModelConfigError, match=message) as caught:
        model_config_values(read_header(path))
    assert str(path) in str(caught.value)


def test_other_architectures_are_refused_by_name(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", TINY | {"model_type": "mamba"}, random_tensors(TINY))
    with pytest.raises(ModelConfigError, match=r"'mamba' is not supported; supported are llama, qwen2, qwen3, gemma"):
        model_config_values(read_header(path))

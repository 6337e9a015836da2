"""Every tensor of a checkpoint is accounted for, and every damage named."""

import json
import logging
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from octavo.kernels.ops import get_ops
from octavo.worker.errors import WeightsError
from octavo.worker.models.config import parse_model_config
from octavo.worker.models.decoder import Decoder
from octavo.worker.models.targets import Placement, ShardSpec, whole
from octavo.worker.weights import fill_dummy, load_weights, open_checkpoint
from tests.support.tiny_models import TINY_LLAMA, random_tensors, write_model

UNTIED = TINY_LLAMA | {"tie_word_embeddings": False}


def make_decoder(config: dict[str, object] = TINY_LLAMA, dtype: torch.dtype = torch.float32) -> Decoder:
    placement = Placement(dtype, torch.device("cpu"))
    return Decoder(parse_model_config(dict(config)), get_ops("reference"), placement, ShardSpec(), 16)


def load_into(decoder: Decoder, folder: Path, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
    load_weights(open_checkpoint(folder), decoder.targets(), decoder.is_ignored, progress)


def read(folder: Path, config: dict[str, object] = TINY_LLAMA) -> Decoder:
    decoder = make_decoder(config)
    load_into(decoder, folder)
    return decoder


def assert_holds(decoder: Decoder, tensors: dict[str, Tensor]) -> None:
    targets = decoder.targets()
    for name, tensor in tensors.items():
        assert torch.equal(targets[name].view, tensor), name


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    tensors = random_tensors(TINY_LLAMA)
    change(tensors)
    return write_model(folder, tensors=tensors)


@pytest.mark.parametrize("num_shards", [0, 1, 3])
def test_every_tensor_arrives(tmp_path: Path, num_shards: int) -> None:
    tensors = random_tensors(UNTIED, seed=5)
    assert_holds(read(write_model(tmp_path, UNTIED, tensors, num_shards), UNTIED), tensors)


def test_fused_weights_hold_the_parts_in_order(tmp_path: Path) -> None:
    tensors = random_tensors(TINY_LLAMA)
    decoder = read(write_model(tmp_path, tensors=tensors))
    q, k, v = (decoder.targets()[f"model.layers.1.self_attn.{x}_proj.weight"].view for x in "qkv")
    assert q.data_ptr() + q.nbytes == k.data_ptr()
    assert k.data_ptr() + k.nbytes == v.data_ptr()
    gate, up = (decoder.targets()[f"model.layers.1.mlp.{x}_proj.weight"].view for x in ("gate", "up"))
    assert gate.data_ptr() + gate.nbytes == up.data_ptr()


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
def test_dtypes_are_converted(tmp_path: Path, stored: torch.dtype) -> None:
    tensors = {name: tensor.to(stored) for name, tensor in random_tensors(TINY_LLAMA).items()}
    decoder = read(write_model(tmp_path, tensors=tensors))
    assert_holds(decoder, {name: tensor.float() for name, tensor in tensors.items()})


@pytest.mark.parametrize("num_shards", [0, 3])
def test_progress_reaches_the_total_and_never_falls(tmp_path: Path, num_shards: int) -> None:
    write_model(tmp_path, num_shards=num_shards)
    size = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    seen: list[tuple[int, int]] = []
    load_into(make_decoder(), tmp_path, lambda done, total: seen.append((done, total)))
    done = [d for d, _ in seen]
    assert done == sorted(done)
    assert seen[-1] == (size, size)
    assert {total for _, total in seen} == {size}
    assert len(set(done)) > 10


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    rewrite(tmp_path, lambda tensors: tensors.__delitem__(name))
    with pytest.raises(WeightsError, match=f"lacks 1 tensors that the model needs: {name}"):
        read(tmp_path)


def test_an_unexpected_tensor_is_named(tmp_path: Path) -> None:
    rewrite(tmp_path, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(48)}))
    with pytest.raises(WeightsError, match=r"does not know: model\.layers\.0\.self_attn\.q_proj\.bias"):
        read(tmp_path)


def test_a_wrong_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    rewrite(tmp_path, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(47)}))
    with pytest.raises(WeightsError, match=r"model\.norm\.weight in .* has shape \[47\], expected \[48\]"):
        read(tmp_path)


@pytest.mark.parametrize(("dtype", "name"), [(torch.int8, "I8"), (torch.float64, "F64"), (torch.bool, "BOOL")])
def test_a_wrong_dtype_is_named(tmp_path: Path, dtype: torch.dtype, name: str) -> None:
    rewrite(tmp_path, lambda tensors: tensors.update({"model.norm.weight": torch.ones(48, dtype=dtype)}))
    with pytest.raises(WeightsError, match=rf"model\.norm\.weight in .* has dtype {name}, expected F32, F16, BF16"):
        read(tmp_path)


def test_known_leftovers_are_ignored(tmp_path: Path) -> None:
    tensors = random_tensors(TINY_LLAMA)
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4), "lm_head.weight": torch.zeros(97, 48)}
    assert_holds(read(write_model(tmp_path, tensors=tensors | extra)), tensors)


def test_the_head_is_not_ignored_when_it_is_not_tied(tmp_path: Path) -> None:
    write_model(tmp_path, UNTIED, random_tensors(TINY_LLAMA))
    with pytest.raises(WeightsError, match=r"lacks 1 tensors that the model needs: lm_head\.weight"):
        read(tmp_path, UNTIED)


@pytest.mark.parametrize(("stored", "message"), [(torch.int32, None), (torch.float32, "has dtype F32, expected I32")])
def test_numbers_that_are_no_floats_are_taken_as_they_are(
    tmp_path: Path, stored: torch.dtype, message: str | None
) -> None:
    numbers = torch.tensor([[1, -2, 3], [2**31 - 1, -(2**31), 0]])
    save_file({"packed": numbers.to(stored)}, tmp_path / "model.safetensors")
    target = whole(torch.zeros(2, 3, dtype=torch.int32))
    if message is None:
        load_weights(open_checkpoint(tmp_path), {"packed": target}, lambda name: False, lambda done, total: None)
        assert torch.equal(target.view, numbers.int())
    else:
        with pytest.raises(WeightsError, match=message):
            load_weights(open_checkpoint(tmp_path), {"packed": target}, lambda name: False, lambda done, total: None)


def test_nothing_is_read_of_a_checkpoint_that_does_not_fit(tmp_path: Path) -> None:
    """The headers tell it: nobody waits for gigabytes first."""
    rewrite(tmp_path, lambda tensors: tensors.__delitem__("model.norm.weight"))
    with pytest.raises(WeightsError, match=r"model\.norm\.weight"):
        load_into(make_decoder(), tmp_path, lambda done, total: pytest.fail("something was read"))


def test_tensors_that_lie_at_odd_places_arrive(tmp_path: Path) -> None:
    """The format does not align them: a header of any length is valid."""
    tensors = random_tensors(TINY_LLAMA, seed=3)
    write_model(tmp_path, tensors=tensors)
    content = (tmp_path / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    set_header(tmp_path / "model.safetensors", content[8 : 8 + length].rstrip() + b" ")
    assert_holds(read(tmp_path), tensors)


def test_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(WeightsError, match=r"neither model\.safetensors nor .*; only safetensors are read"):
        read(tmp_path)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def set_header(path: Path, header: bytes, length: int | None = None) -> None:
    content = path.read_bytes()
    old = struct.unpack("<Q", content[:8])[0]
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + content[8 + old :])


def overlap(path: Path) -> None:
    content = path.read_bytes()
    header = json.loads(content[8 : 8 + struct.unpack("<Q", content[:8])[0]])
    norms = [name for name in header if name.endswith("layernorm.weight")]
    header[norms[0]]["data_offsets"] = header[norms[1]]["data_offsets"]
    set_header(path, json.dumps(header).encode())


@pytest.mark.parametrize(
    "damage",
    [
        cut,
        overlap,
        lambda path: set_header(path, b"{}", 2**60),
        lambda path: set_header(path, b"not json"),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"\0" * 4),
    ],
    ids=["one byte short", "overlap", "huge header", "no JSON", "empty", "shorter than its length field"],
)
@pytest.mark.parametrize("num_shards", [0, 3])
def test_a_damaged_file_is_named_with_its_size(tmp_path: Path, damage: Callable[[Path], None], num_shards: int) -> None:
    write_model(tmp_path, num_shards=num_shards)
    path = max(tmp_path.glob("*.safetensors"))
    damage(path)
    with pytest.raises(WeightsError) as caught:
        read(tmp_path)
    assert str(path) in str(caught.value)
    assert f"({path.stat().st_size} bytes) is damaged: " in str(caught.value)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_model(tmp_path, num_shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"index\.json names model-00002-of-00003\.safetensors, which is not in"):
        read(tmp_path)


def test_a_shard_whose_name_no_file_can_have_is_named(tmp_path: Path) -> None:
    write_model(tmp_path, num_shards=2)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "x" * 300 + ".safetensors"}}))
    with pytest.raises(WeightsError, match=r"index\.json names x+\.safetensors, which is not in"):
        read(tmp_path)


def test_what_is_no_regular_file_is_not_waited_for(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"model\.safetensors cannot be read: it is no regular file"):
        read(tmp_path)
    os.mkfifo(tmp_path / "model.safetensors.index.json")
    with pytest.raises(WeightsError, match=r"index\.json cannot be read: it is no regular file"):
        read(tmp_path)


def test_an_extra_shard_is_not_read_and_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tensors = random_tensors(TINY_LLAMA)
    write_model(tmp_path, tensors=tensors, num_shards=2)
    save_file({"model.norm.weight": torch.zeros(48)}, tmp_path / "model-00003-of-00003.safetensors")
    with caplog.at_level(logging.WARNING):
        assert_holds(read(tmp_path), tensors)
    assert "model-00003-of-00003.safetensors" in caplog.text


def test_a_shard_that_differs_from_the_index_is_named(tmp_path: Path) -> None:
    write_model(tmp_path, num_shards=2)
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.norm.weight"] = "model-00001-of-00002.safetensors"
    if "model.norm.weight" in sorted(random_tensors(TINY_LLAMA))[0::2]:
        content["weight_map"]["model.norm.weight"] = "model-00002-of-00002.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(WeightsError, match=r"and the index differ about 1 tensors: model\.norm\.weight"):
        read(tmp_path)


@pytest.mark.parametrize(
    "file", ["../model.safetensors", "/etc/model.safetensors", "a/../../b.safetensors", "..", "", "model.bin", 7, None]
)
def test_an_index_that_leaves_the_folder_is_refused(tmp_path: Path, file: object) -> None:
    outside = write_model(tmp_path)
    folder = write_model(outside / "inner", num_shards=2)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.norm.weight"] = file
    index.write_text(json.dumps(content))
    with pytest.raises(WeightsError, match=r"expected the name of a \.safetensors file in the folder"):
        read(folder)


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": []}}', "[" * 100_000, "\ud800"]
)
def test_a_malformed_index_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_bytes(content.encode("utf-8", "surrogatepass"))
    with pytest.raises(WeightsError, match=r"index\.json is no index"):
        read(tmp_path)


def test_dummy_weights_depend_on_the_seed_alone() -> None:
    decoders = [make_decoder() for _ in range(3)]
    for decoder, seed in zip(decoders, (1, 1, 2), strict=True):
        fill_dummy(decoder.targets(), seed, lambda done, total: None)
    first, same, other = ({name: target.view for name, target in d.targets().items()} for d in decoders)
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])
    assert all(view.isfinite().all() for view in first.values())

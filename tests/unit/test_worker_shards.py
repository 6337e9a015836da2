"""Shards: every rank's parts together are the whole, and what does not split is refused with its numbers."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.kernels.ops import get_ops
from octavo.worker.errors import ModelConfigError
from octavo.worker.models.attention import Attention
from octavo.worker.models.config import parse_model_config
from octavo.worker.models.decoder import Decoder
from octavo.worker.models.description import ExpertsConfig, MlpConfig, ModelConfig
from octavo.worker.models.experts import Experts
from octavo.worker.models.interface import Batch, KVCache
from octavo.worker.models.layers import ColumnParallel, Linear, RowParallel
from octavo.worker.models.mlp import Mlp
from octavo.worker.models.rope import rotary_table
from octavo.worker.models.targets import Placement, ShardSpec, Target
from octavo.worker.quantization.plain import Unquantized
from octavo.worker.quantization.scheme import Projection
from tests.support.gpt_architectures import config_of
from tests.support.tiny_models import TINY_LLAMA, TINY_QWEN2_MOE, random_tensors

OPS = get_ops("reference")
PLACEMENT = Placement(torch.float32, torch.device("cpu"))
UNQUANTIZED = Unquantized()
PHI3 = TINY_LLAMA | {"architectures": ["Phi3ForCausalLM"], "tie_word_embeddings": False}


def fill(targets: dict[str, Target], tensors: dict[str, Tensor]) -> None:
    for name, target in targets.items():
        target.view.copy_(target.take(tensors[name]))


def random_for(targets: dict[str, Target]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(target.full_shape, generator=generator) for name, target in targets.items()}


def product(layer: Linear, x: Tensor) -> Tensor:
    layer.finish_loading(OPS)
    return layer(OPS, x)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_column_parallel_ranks_concatenate_to_the_whole(world: int) -> None:
    def make(shard: ShardSpec) -> ColumnParallel:
        return ColumnParallel(
            PLACEMENT,
            6,
            tuple(Projection(name, size, shard.part(size, "features")) for name, size in (("a", 8), ("b", 4))),
            bias=True,
        )

    whole = make(ShardSpec())
    tensors = random_for(whole.targets)
    fill(whole.targets, tensors)
    x = torch.randn(3, 6)
    a, b = torch.split(product(whole, x), [8, 4], dim=-1)
    parts_a, parts_b = [], []
    for rank in range(world):
        part = make(ShardSpec(rank, world))
        fill(part.targets, tensors)
        mine = torch.split(product(part, x), [8 // world, 4 // world], dim=-1)
        parts_a.append(mine[0])
        parts_b.append(mine[1])
    assert torch.allclose(torch.cat(parts_a, -1), a, atol=1e-6)
    assert torch.allclose(torch.cat(parts_b, -1), b, atol=1e-6)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_row_parallel_ranks_sum_to_the_whole(world: int) -> None:
    def make(shard: ShardSpec) -> RowParallel:
        return RowParallel(PLACEMENT, "o", 8, shard.part(8, "features"), 5, bias=True)

    whole = make(ShardSpec())
    tensors = random_for(whole.targets)
    fill(whole.targets, tensors)
    x = torch.randn(3, 8)
    total = torch.zeros(3, 5)
    for rank in range(world):
        shard = ShardSpec(rank, world)
        part = make(shard)
        fill(part.targets, tensors)
        total += product(part, x[:, shard.part(8, "features")])
    assert torch.allclose(total, product(whole, x), atol=1e-6)


def test_the_ranks_of_experts_sum_to_the_whole() -> None:
    config = parse_model_config(TINY_QWEN2_MOE)
    tensors, x = random_tensors(TINY_QWEN2_MOE), torch.randn(9, config.hidden_size)

    def computed(shard: ShardSpec) -> Tensor:
        mlp = config.layers[0].mlp
        assert isinstance(mlp, ExpertsConfig)
        part = Experts(config, mlp, PLACEMENT, shard, "model.layers.0", Unquantized())
        fill(part.targets, tensors)
        part.finish_loading(OPS)
        return part(OPS, x)

    total = computed(ShardSpec(0, 2)) + computed(ShardSpec(1, 2))
    assert torch.allclose(total, computed(ShardSpec()), atol=1e-5)


@pytest.mark.parametrize(
    "values", [TINY_LLAMA | {"attention_bias": True, "mlp_bias": True}, TINY_QWEN2_MOE], ids=["llama", "experts"]
)
def test_the_ranks_of_a_decoder_cover_every_sharded_tensor_once(values: dict[str, Any]) -> None:
    config = parse_model_config(values)
    decoders = [Decoder(config, OPS, PLACEMENT, ShardSpec(rank, 2), 4) for rank in range(2)]
    for name, target in Decoder(config, OPS, PLACEMENT, ShardSpec(), 4).targets().items():
        covered = torch.zeros(target.full_shape)
        for decoder in decoders:
            covered[decoder.targets()[name].part] += 1
            assert decoder.targets()[name].view.shape == covered[decoder.targets()[name].part].shape
        sharded = "_proj" in name and not name.endswith(("o_proj.bias", "down_proj.bias"))
        assert (covered == (1 if sharded else 2)).all(), name


FUSED: dict[str, tuple[dict[str, Any], set[str]]] = {
    "transposed": (config_of("gpt2"), {"attn.c_proj.bias", "mlp.c_proj.bias"}),
    "by group": (
        config_of("falcon", new_decoder_architecture=True, num_kv_heads=2, bias=True),
        {"self_attention.dense.bias", "mlp.dense_4h_to_h.bias"},
    ),
    "by head": (
        config_of("gpt_neox", num_attention_heads=6),
        {"attention.dense.bias", "mlp.dense_4h_to_h.bias"},
    ),
    "neighbours": (config_of("gptj", n_head=6, rotary_dim=4), {"mlp.fc_out.bias"}),
    "stacked": (PHI3, set()),
}
"""Layout of fused matrices -> a config, and the biases that every rank holds whole."""


@pytest.mark.parametrize("layout", FUSED)
def test_the_ranks_cover_every_line_of_fused_matrices_once(layout: str) -> None:
    config, whole_biases = FUSED[layout]
    description = parse_model_config(config)
    description = replace(description, layers=description.layers[:1])
    decoders = [Decoder(description, OPS, PLACEMENT, ShardSpec(rank, 2), 4) for rank in range(2)]
    layer = description.names.layer.format(0)
    for name, target in Decoder(description, OPS, PLACEMENT, ShardSpec(), 4).targets().items():
        places = torch.arange(math.prod(target.full_shape)).view(target.full_shape)
        covered = torch.zeros(places.numel(), dtype=torch.int64)
        for decoder in decoders:
            taken = decoder.targets()[name].take(places)
            assert taken.shape == decoder.targets()[name].view.shape, name
            covered += torch.bincount(taken.flatten(), minlength=covered.numel())
        part = name.removeprefix(f"{layer}.")
        sharded = part != name and "norm" not in part and "ln_" not in part and part not in whole_biases
        assert (covered == (1 if sharded else 2)).all(), name


@pytest.mark.parametrize("layout", FUSED)
def test_the_ranks_of_a_layer_sum_to_the_whole(layout: str) -> None:
    description = parse_model_config(FUSED[layout][0])
    x = torch.randn(5, description.hidden_size, generator=torch.Generator().manual_seed(1))
    tensors: dict[str, Tensor] = {}
    attended, inner = layer_of(description, ShardSpec(), tensors, x)
    ranks = [layer_of(description, ShardSpec(rank, 2), tensors, x) for rank in range(2)]
    assert torch.allclose(ranks[0][0] + ranks[1][0], attended, atol=1e-5)
    assert torch.allclose(ranks[0][1] + ranks[1][1], inner, atol=1e-5)
    assert not torch.allclose(ranks[0][0], attended, atol=1e-2)


def layer_of(config: ModelConfig, shard: ShardSpec, tensors: dict[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """Return what attention and MLP of one rank make of x [T, hidden_size]; tensors that are not there are drawn."""
    layer = config.layers[0]
    assert isinstance(layer.mlp, MlpConfig)
    attention = Attention(config, layer, PLACEMENT, shard, "layer", UNQUANTIZED)
    mlp = Mlp(config, layer.mlp, PLACEMENT, shard, "layer", UNQUANTIZED)
    for part in (attention, mlp):
        for name, tensor in random_for(part.targets).items():
            tensors.setdefault(name, tensor * tensor.shape[-1] ** -0.5)
        fill(part.targets, tensors)
        part.finish_loading(OPS)
    caches = torch.zeros(2, 2, 8, config.num_kv_heads // shard.world, config.head_size)
    places = torch.arange(len(x))
    table = torch.zeros(1, 1, dtype=torch.int32)
    ends = torch.tensor([0, len(x)], dtype=torch.int32)
    batch = Batch(places, places, places, table, ends, ends[1:], None)
    cos_sin = rotary_table(OPS, config.ropes[0] if config.ropes else None, config.head_size, 8, PLACEMENT)
    return attention(OPS, x, cos_sin, batch, KVCache(*caches)), mlp(OPS, x)


@pytest.mark.parametrize(
    ("changes", "world", "message"),
    [
        ({"num_attention_heads": 9, "num_key_value_heads": 3}, 2, r"9 attention heads .* split evenly over 2 ranks"),
        ({"num_attention_heads": 9, "num_key_value_heads": 1}, 3, r"1 KV heads .* split evenly over 3 ranks"),
        ({"intermediate_size": 81}, 2, r"81 features of the MLP .* split evenly over 2 ranks"),
        (TINY_QWEN2_MOE | {"moe_intermediate_size": 27}, 2, r"27 features of an expert .* evenly over 2 ranks"),
    ],
)
def test_what_does_not_split_is_refused(changes: dict[str, Any], world: int, message: str) -> None:
    config = parse_model_config(TINY_LLAMA | changes)
    with pytest.raises(ModelConfigError, match=message):
        Decoder(config, OPS, PLACEMENT, ShardSpec(0, world), 4)

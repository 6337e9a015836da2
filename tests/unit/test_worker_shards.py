"""Shards: every rank's parts together are the whole, and what does not split is refused with its numbers."""

from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.kernels.ops import get_ops
from octavo.worker.errors import ModelConfigError
from octavo.worker.models.config import parse_model_config
from octavo.worker.models.decoder import Decoder
from octavo.worker.models.layers import ColumnParallel, Linear, RowParallel
from octavo.worker.models.targets import Placement, ShardSpec, Target
from octavo.worker.quantization.scheme import Projection
from tests.support.tiny_models import TINY_LLAMA

OPS = get_ops("reference")
PLACEMENT = Placement(torch.float32, torch.device("cpu"))


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


def test_the_ranks_of_a_decoder_cover_every_sharded_tensor_once() -> None:
    config = parse_model_config(TINY_LLAMA | {"attention_bias": True, "mlp_bias": True})
    decoders = [Decoder(config, OPS, PLACEMENT, ShardSpec(rank, 2), 4) for rank in range(2)]
    for name, target in Decoder(config, OPS, PLACEMENT, ShardSpec(), 4).targets().items():
        covered = torch.zeros(target.full_shape)
        for decoder in decoders:
            covered[decoder.targets()[name].part] += 1
            assert decoder.targets()[name].view.shape == covered[decoder.targets()[name].part].shape
        sharded = "_proj" in name and not name.endswith(("o_proj.bias", "down_proj.bias"))
        assert (covered == (1 if sharded else 2)).all(), name


@pytest.mark.parametrize(
    ("changes", "world", "message"),
    [
        ({"num_attention_heads": 9, "num_key_value_heads": 3}, 2, r"9 attention heads .* split evenly over 2 ranks"),
        ({"num_attention_heads": 9, "num_key_value_heads": 1}, 3, r"1 KV heads .* split evenly over 3 ranks"),
        ({"intermediate_size": 81}, 2, r"81 features of the MLP .* split evenly over 2 ranks"),
    ],
)
def test_what_does_not_split_is_refused(changes: dict[str, Any], world: int, message: str) -> None:
    config = parse_model_config(TINY_LLAMA | changes)
    with pytest.raises(ModelConfigError, match=message):
        Decoder(config, OPS, PLACEMENT, ShardSpec(0, world), 4)

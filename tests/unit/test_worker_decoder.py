"""The decoder reads nothing back: a captured graph could not. On the meta device there is nothing that could be read."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from octavo.kernels import reference
from octavo.kernels.ops import Ops
from octavo.worker.models.config import parse_model_config
from octavo.worker.models.decoder import Decoder
from octavo.worker.models.interface import Batch, KVCache
from octavo.worker.models.targets import Placement, ShardSpec
from tests.support.gpt_architectures import ARCHITECTURES, config_of
from tests.support.tiny_models import TINY_LLAMA

META = torch.device("meta")


def rotated(q: Tensor, *rest: Any, **options: Any) -> Tensor:
    return torch.empty_like(q)


# The reference's attention and cache are for the CPU; the GPU's own tests show that its kernels read nothing back.
OPS = cast(Ops, SimpleNamespace(**vars(reference) | {"rotary_and_write_kv": rotated, "paged_attention": rotated}))


@pytest.mark.parametrize("config", [TINY_LLAMA, *(config_of(kind) for kind in ARCHITECTURES)])
def test_nothing_is_read_back(config: dict[str, Any]) -> None:
    description = parse_model_config(config)
    decoder = Decoder(description, OPS, Placement(torch.float16, META), ShardSpec(), 16)
    decoder.finish_loading()
    batch = Batch(
        input_ids=torch.empty(5, dtype=torch.int32, device=META),
        positions=torch.empty(5, dtype=torch.int32, device=META),
        slot_mapping=torch.empty(5, dtype=torch.int64, device=META),
        block_tables=torch.empty(2, 4, dtype=torch.int32, device=META),
        query_start=torch.empty(3, dtype=torch.int32, device=META),
        seq_lens=torch.empty(2, dtype=torch.int32, device=META),
        logits_index=torch.empty(2, dtype=torch.int64, device=META),
        num_decodes=1,
    )
    cache = KVCache(*torch.empty(2, 8, 4, description.num_kv_heads, description.head_size, device=META))
    logits = decoder.forward(batch, [cache] * description.num_layers)
    assert (logits.shape, logits.dtype, logits.is_meta) == ((2, 97), torch.float16, True)

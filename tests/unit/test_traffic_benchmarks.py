"""Workloads are the same lists everywhere, and the KV cache is as full as is claimed."""

import pytest

from benchmarks.kv_waste import TARGET, measure
from benchmarks.workloads import VOCABULARIES, all_workloads, decode, offline_256, shared_prefix, sharegpt_like
from octavo.scheduler.simulate.traffic_setup import Setup

VOCAB = VOCABULARIES["llama-3.1-8b"]


def test_digests_do_not_change() -> None:
    """Published figures name these lists."""
    assert {w.name: w.digest for w in all_workloads(VOCAB)} == {
        "decode_b1": "cb71c3742d9e0bae",
        "decode_b8": "e8e8f19d9133d7a4",
        "decode_b32": "6756baa97932f2b0",
        "decode_b64": "b3129b689c8eb29f",
        "decode_b128": "abe812fad50a13fe",
        "decode_b256": "7f6d5228db6cb032",
        "sharegpt_like": "24a292df85ac2a18",
        "prefill": "3b02b2c9d7a32dd9",
        "shared_prefix": "cc95743d75e25b13",
        "unique_prefix": "55b8acca159a4037",
        "serving_sharegpt_c1": "e19c374befd4c3d5",
        "serving_sharegpt_c8": "c878fd54c8860094",
        "serving_sharegpt_c32": "1f16d4a813982455",
        "serving_sharegpt_c64": "04e43df1a6c770a8",
        "serving_sharegpt_c128": "8bc14d71c1b2370c",
        "serving_sharegpt_c256": "f72d831eb91f435b",
        "offline_256": "c98882dec195c664",
    }
    assert sharegpt_like(VOCABULARIES["llama-2-7b"]).digest == "f1dd9df7d4b88bb9"


def test_workloads_are_what_they_say() -> None:
    chats = sharegpt_like(VOCAB)
    assert (chats.num_prompt_tokens, chats.num_output_tokens) == (218_982, 188_630)
    lengths = [len(r.prompt_ids) for r in chats.requests] + [r.num_output_tokens for r in chats.requests]
    assert min(lengths) >= 4
    assert max(lengths) == 1024
    assert offline_256().num_output_tokens == 133_966
    shared = shared_prefix(VOCAB).requests
    assert len({tuple(r.prompt_ids[:1024]) for r in shared}) == 1
    assert len({tuple(r.prompt_ids[1024:]) for r in shared}) == 256
    ids = [i for r in decode(VOCAB, 8).requests for i in r.prompt_ids]
    assert min(ids) >= 1_000
    assert max(ids) < 128_000


def test_blocks_waste_little_and_reservations_much() -> None:
    setup = Setup(num_blocks=8193, max_model_len=4096)
    blocks, request_length, model_length = measure(sharegpt_like(VOCAB), setup)
    assert blocks["value"] <= TARGET
    assert 0.1 < request_length["value"] < 0.5
    assert 0.8 < model_length["value"] < 1
    assert blocks["most_running"] == 256
    assert model_length["most_running"] == 131_072 // 4096
    assert model_length["virtual_s"] > 2 * blocks["virtual_s"]


@pytest.mark.parametrize("block_size", [1, 64])
def test_waste_follows_the_size_of_blocks(block_size: int) -> None:
    (blocks, *_) = measure(
        sharegpt_like(VOCAB, 100), Setup(num_blocks=131_072 // block_size + 1, block_size=block_size)
    )
    assert (blocks["value"] == 0) == (block_size == 1)
    assert (blocks["value"] > TARGET) == (block_size == 64)

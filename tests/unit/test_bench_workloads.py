"""The workloads of benchmarks are the lists that other engines were measured with."""

from pathlib import Path

import pytest

from octavo.cli import bench_workloads as workloads
from octavo.cli.bench_models import CONFIGS, VOCABULARIES, write_config_folder
from octavo.wire.model_digest import model_digest
from octavo.worker.models.config import load_model_config
from octavo.worker.models.sizes import num_parameters

LLAMA_2 = VOCABULARIES["llama-2-7b"]


@pytest.mark.parametrize("model", ["llama-3.1-8b", "qwen3-0.6b"])
def test_digests_of_large_vocabularies(model: str) -> None:
    """No id is above 128000, so these two have the same lists."""
    vocab_size = VOCABULARIES[model]
    more = [workloads.serving(vocab_size, c, fixed=True) for c in (1, 64)]
    assert {w.name: w.digest for w in (*workloads.all_workloads(vocab_size), workloads.warmup(vocab_size), *more)} == {
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
        "offline_256": "c98882dec195c664",
        "serving_sharegpt_c1": "e19c374befd4c3d5",
        "serving_sharegpt_c8": "c878fd54c8860094",
        "serving_sharegpt_c32": "1f16d4a813982455",
        "serving_sharegpt_c64": "04e43df1a6c770a8",
        "serving_sharegpt_c128": "8bc14d71c1b2370c",
        "serving_sharegpt_c256": "f72d831eb91f435b",
        "serving_fixed_c1": "f7e7b58dc3e2561e",
        "serving_fixed_c64": "7baf7d171d3df734",
        "warmup": "32b170bd92c5fc67",
    }


def test_digests_of_a_small_vocabulary() -> None:
    offline = {name: workloads.make_offline(name, LLAMA_2).digest for name in workloads.OFFLINE}
    assert offline == {
        "sharegpt_like": "f1dd9df7d4b88bb9",
        "prefill": "813d7c616ffb046b",
        "shared_prefix": "86bc4b9037c543e5",
        "unique_prefix": "fb385dc07601a596",
        "offline_256": "c98882dec195c664",
    }
    assert workloads.decode(LLAMA_2, 256).digest == "eee68fa8e566d0e0"
    assert workloads.make_offline("sharegpt_like", LLAMA_2, 20).digest == "a169a07e0425eb54"


def test_only_offline_256_draws() -> None:
    temperatures = {name: workloads.make_offline(name, LLAMA_2, 2).temperature for name in workloads.OFFLINE}
    assert temperatures == dict.fromkeys(workloads.OFFLINE, 0.0) | {"offline_256": 0.6}


@pytest.mark.parametrize("limit", [2, 3, 20, 100, 142])
def test_a_warm_up_fits_the_engine(limit: int) -> None:
    cut = workloads.warmup(LLAMA_2, max_model_len=limit)
    assert len(cut.requests) == 32
    assert cut.longest == limit
    assert min(min(len(r.prompt_ids), r.num_output_tokens) for r in cut.requests) >= 1


def test_a_warm_up_that_fits_is_not_cut() -> None:
    assert workloads.warmup(LLAMA_2).longest == 143
    assert workloads.warmup(LLAMA_2, max_model_len=143).digest == workloads.warmup(LLAMA_2).digest


def test_sizes_in_words() -> None:
    assert workloads.sharegpt_like(LLAMA_2).sizes == "1000 requests, 218,982 tokens in, 188,630 out"
    assert workloads.decode(LLAMA_2, 1).sizes == "1 request, 512 tokens in, 128 out"


def test_what_there_is_not() -> None:
    with pytest.raises(workloads.UnknownWorkload, match="'sharegpt' is unknown; there are sharegpt_like, prefill"):
        workloads.make_offline("sharegpt", LLAMA_2)
    with pytest.raises(workloads.SmallVocabulary, match="a vocabulary of 97"):
        workloads.decode(97, 1)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-2-7b", 6_738_415_616),
        ("qwen3-0.6b", 596_042_752),
        ("qwen3-30b-a3b", 30_532_110_336),
    ],
)
def test_folders_describe_the_models(model: str, expected: int, tmp_path: Path) -> None:
    folder = write_config_folder(model, tmp_path)
    config = load_model_config(folder)
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    assert config.vocab_size == VOCABULARIES[model]
    assert config.dtype == "bfloat16"
    # Peers count neither head norms nor anything else that is not a matrix of a layer, its two norms, or an embedding.
    head_norms = 2 * config.head_size * config.num_layers if model.startswith("qwen3") else 0
    assert num_parameters(config) - head_norms == expected


def test_every_shape_has_an_identity_of_its_own(tmp_path: Path) -> None:
    digests = {model_digest(write_config_folder(name, tmp_path)) for name in CONFIGS}
    assert len(digests) == len(CONFIGS)

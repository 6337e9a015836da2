"""Models that transformers computes with paged attention: what it makes of them alone, or a refusal that names the trait."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from octavo.kernels import reference
from octavo.kernels.ops import get_ops
from octavo.wire.columns import unpack_floats
from octavo.wire.plan import RowSampling
from octavo.worker import kv_cache
from octavo.worker.errors import ModelConfigError, StartError, WeightsError
from octavo.worker.gpu.runner import GpuRunner
from octavo.worker.interface import Runner
from octavo.worker.loading import LoadedWorker
from octavo.worker.mirror import RowLimits
from octavo.worker.models import paged_interface, transformers_model
from octavo.worker.models.interface import KVCache, LoadedModel
from octavo.worker.models.targets import Placement, ShardSpec
from octavo.worker.models.transformers_model import TransformersModel, read_transformers_config
from octavo.worker.runner import EagerRunner
from tests.support.architectures import logits_of
from tests.support.parity import Oracle, run_together
from tests.support.plan_driver import PlanDriver, faults_of, generate, tokens_of
from tests.support.tiny_models import load_worker, worker_config

CPU = Placement(torch.float32, torch.device("cpu"))
SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
CASES: dict[str, dict[str, Any]] = {
    "Olmo2": {},
    "Granite": {"logits_scaling": 2.0, "residual_multiplier": 0.7, "attention_multiplier": 0.3},
    "Cohere": {"logit_scale": 0.3, "use_qk_norm": True},
    "Cohere2": {"sliding_window": 9, "num_hidden_layers": 4},
    "Glm4": {"head_dim": 16},
    "Helium": {"head_dim": 8},
    "Nemotron": {},
    "BioGpt": {},
    "Olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "Llama": {"num_hidden_layers": 3},
    "Gemma2": {"sliding_window": 7, "head_dim": 8, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0},
}
"""Architecture -> what its config has beside SMALL. Of windows and soft caps, and one that is described here too."""


def write(folder: Path, name: str, changes: dict[str, Any]) -> Any:
    """Write a random model; return it as transformers computes it alone."""
    import transformers

    torch.manual_seed(0)
    model_class = getattr(transformers, f"{name}ForCausalLM")
    model: Any = model_class(model_class.config_class(**(SMALL | changes), attn_implementation="eager"))
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            parameter.normal_(0.0, 0.5 if parameter.dim() == 1 else 1.5 * parameter.shape[-1] ** -0.5)
            if "norm" in parameter_name:
                parameter += 1.0
    model.eval().save_pretrained(folder)
    return model


def load(folder: Path, ops: Any = reference, **settings: Any) -> LoadedModel:
    config = worker_config(folder, **settings)
    values = json.loads((folder / "config.json").read_text())
    model = read_transformers_config(values)
    return model.load(config, ops, CPU, config.max_model_len or model.max_positions, lambda done, total: None)


def load_whole(folder: Path, **settings: Any) -> LoadedWorker:
    return load_worker(folder, **({"model_impl": "transformers"} | settings))


def caches_of(loaded: LoadedModel) -> list[KVCache]:
    spec = kv_cache.spec_of(loaded.cached, ShardSpec(), 4, torch.float32, CPU.device, head_major=False)
    return kv_cache.allocate(spec, 40)


@torch.inference_mode()
def logits_alone(model: Any, ids: list[int]) -> Tensor:
    logits: Tensor = model(torch.tensor([ids])).logits[0]
    return logits


@pytest.fixture(scope="module")
def olmo2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("olmo2")
    write(folder, "Olmo2", {})
    return folder


@pytest.mark.parametrize("name", CASES)
def test_logits_agree(tmp_path: Path, name: str) -> None:
    theirs = write(tmp_path, name, CASES[name])
    loaded = load(tmp_path)
    ids = torch.randint(97, (60,), generator=torch.Generator().manual_seed(1)).tolist()
    expected = logits_alone(theirs, ids)
    assert expected.std() > 0.02
    for chunks in ([60], [1, 7, 23, 16, 5, *([1] * 8)]):
        ours = logits_of(loaded.model, caches_of(loaded), ids, chunks, block_size=4)
        assert (ours - expected).abs().max() < 1e-3, chunks


def test_the_described_decoder_computes_the_same(tmp_path: Path) -> None:
    write(tmp_path, "Llama", {})
    ids, logits = list(range(3, 43)), []
    for model_impl in ("octavo", "transformers"):
        runner = load_whole(tmp_path, model_impl=model_impl).runner
        assert isinstance(runner, EagerRunner)
        assert isinstance(runner._model, TransformersModel) == (model_impl == "transformers")
        logits.append(logits_of(runner._model, runner._caches, ids, [17, 1, 22], block_size=4))
    assert (logits[0] - logits[1]).abs().max() < 1e-4


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_runner_needs_nothing_new(tmp_path: Path, backend: str, caplog: pytest.LogCaptureFixture) -> None:
    """Chunks beside decodes, blocks found again, forks, beams and log-probabilities of prompts."""
    theirs = write(tmp_path, "Olmo2", {"num_hidden_layers": 1})
    with caplog.at_level("INFO"):
        runner = load_whole(tmp_path, backend=backend).runner
    assert "computed by transformers, with paged attention and without CUDA graphs" in caplog.text
    prompts = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [5, 6, 7, 8, 9, 10, 11, 12, 40, 41], [50]]
    outputs = run_together(runner, prompts, 3, logprobs=True, longest_chunk=4)
    Oracle(tmp_path, torch.float32, CPU.device).check(outputs)
    check_forks_and_beams(runner, theirs)


def check_forks_and_beams(runner: Runner, theirs: Any) -> None:
    prompt = [5, 6, 7, 8, 9, 10]
    driver = PlanDriver.of(runner)
    driver.begin(0, prompt, RowSampling(seed=0, temperature=0.0, prompt_logprobs=1))
    driver.fork(0, 1, choice=1)
    result = runner.execute(driver.plan({0: 6}))
    alone = logits_alone(theirs, prompt).log_softmax(-1)
    told = [value for part in result.prompt_logprobs for value in unpack_floats(part.logprob)]
    assert told == pytest.approx(alone[:-1].gather(-1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist(), abs=1e-3)
    first = int(alone[-1].argmax())
    assert tokens_of(result) == {0: first, 1: first}
    driver.go_on(2, 0, 42)  # as a beam does that goes on with another id, from a block that all have
    result = runner.execute(driver.plan({0: 1, 1: 1, 2: 1}))
    assert faults_of(result) == {}
    greedy, other = (int(logits_alone(theirs, [*prompt, token])[-1].argmax()) for token in (first, 42))
    assert tokens_of(result) == {0: greedy, 1: greedy, 2: other}


def test_kernels_of_the_gpu(tmp_path: Path) -> None:
    theirs = write(tmp_path, "Gemma2", CASES["Gemma2"] | {"num_hidden_layers": 1, "vocab_size": 33})
    loaded = load(tmp_path, get_ops("triton"), max_model_len=12, block_size=16)
    limits = RowLimits(4, 12, 8, block_size=16, num_blocks=7, vocab_size=33)
    spec = kv_cache.spec_of(loaded.cached, ShardSpec(), 16, torch.float32, CPU.device, head_major=True)
    runner = GpuRunner(loaded.model, get_ops("triton"), kv_cache.allocate(spec, 7), limits, CPU.device, 33)
    prompt = [5, 6, 7, 8, 9, 10, 11, 12, 13]
    ids, _ = generate(runner, prompt, 3, chunk=6)
    assert ids == [int(line.argmax()) for line in logits_alone(theirs, [*prompt, *ids])[len(prompt) - 1 : -1]]


def test_random_weights_and_16_bits(tmp_path: Path, olmo2: Path) -> None:
    (tmp_path / "config.json").write_bytes((olmo2 / "config.json").read_bytes())
    assert load_whole(tmp_path, load_format="dummy", dtype="bfloat16").facts.dtype == "bfloat16"


def test_no_masks_are_made(olmo2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    seen: list[Tensor | None] = []
    attend = paged_interface.attend

    def look(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **arguments: Any) -> Any:
        seen.append(attention_mask)
        return attend(module, query, key, value, attention_mask, **arguments)

    loaded = load(olmo2)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "octavo_paged", look)
    logits_of(loaded.model, caches_of(loaded), [1, 2, 3], [3], block_size=4)
    assert seen == [None, None]


def config_only(folder: Path, name: str, changes: dict[str, Any], **raw: Any) -> Path:
    import transformers

    model_class = getattr(transformers, name)
    values = model_class.config_class(**changes).to_dict() | {"architectures": [name]} | raw
    (folder / "config.json").write_text(json.dumps(values, default=str))
    return folder


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "alibi": ("BloomForCausalLM", {}, "does not attend through transformers' attention interface"),
    "recurrent": ("MambaForCausalLM", {}, "keeps a recurrent state"),
    "linear": ("MiniMaxForCausalLM", {}, "has layers of type linear_attention"),
    "chunked": ("Llama4ForCausalLM", {}, "has layers of type chunked_attention"),
    "sinks": ("GptOssForCausalLM", SMALL | {"head_dim": 8, "num_local_experts": 4}, "attention sinks"),
    "latent": ("DeepseekV3ForCausalLM", SMALL | {"num_key_value_heads": 6}, "keys of 192 and values of 128"),
    "encoder": ("BertLMHeadModel", SMALL, "masks that are neither causal nor sliding windows"),
    "encoder-decoder": ("T5ForConditionalGeneration", {}, "is an encoder and a decoder"),
}


@pytest.mark.parametrize("trait", REFUSED)
def test_what_paged_attention_does_not_do_is_named(tmp_path: Path, trait: str) -> None:
    name, changes, words = REFUSED[trait]
    folder = config_only(tmp_path, name, changes)
    with pytest.raises(ModelConfigError, match=f"{name}.*{words}"):
        load_whole(folder, load_format="dummy", max_model_len=64)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"auto_map": {"AutoModelForCausalLM": "modeling.Evil"}}, "code of its own"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"is quantised \(quantization_config\)"),
        ({"add_cross_attention": True}, "cross attention"),
        ({"architectures": ["NoSuchModel"]}, "neither described here.*LlamaForCausalLM.*nor.*Olmo2ForCausalLM"),
        ({"model_type": "no-such"}, "neither described here"),
        ({"model_type": None}, "model_type"),
        ({"hidden_size": "wide"}, "transformers cannot read config.json"),
        ({"num_attention_heads": 5}, "transformers"),
        ({"max_position_embeddings": 0}, "max_position_embeddings = 0"),
    ],
)
def test_a_config_that_cannot_be_served_is_named(tmp_path: Path, olmo2: Path, raw: dict[str, Any], words: str) -> None:
    values = json.loads((olmo2 / "config.json").read_text()) | raw
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ModelConfigError, match=words):
        load_whole(tmp_path, load_format="dummy")


def test_a_config_chooses_no_code(tmp_path: Path, olmo2: Path) -> None:
    values = json.loads((olmo2 / "config.json").read_text())
    values |= {"_attn_implementation": "owner/kernel", "attn_implementation": "owner/kernel", "use_kernels": True}
    (tmp_path / "config.json").write_text(json.dumps(values))
    load_whole(tmp_path, load_format="dummy")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"model_impl": "octavo"}, "Olmo2ForCausalLM.*is not supported by --model-impl octavo"),
        ({"model_impl": "vllm"}, "model_impl 'vllm'"),
        ({"batch_invariant": True}, "bits depend on the batch"),
        ({"quantization": "fp8"}, "--quantization fp8"),
    ],
)
def test_settings_that_do_not_hold_are_named(olmo2: Path, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(StartError, match=words):
        load_whole(olmo2, **settings)


def test_a_rotation_that_depends_on_the_step_is_refused(tmp_path: Path) -> None:
    rope: dict[str, Any] = {"rope_type": "longrope", "rope_theta": 1e4}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    write(tmp_path, "Phi3", {"rope_parameters": rope, "original_max_position_embeddings": 32})
    with pytest.raises(ModelConfigError, match=r"beyond 32.*longrope.*--max-model-len 32"):
        load_whole(tmp_path)
    load_whole(tmp_path, max_model_len=32)


def test_every_tensor_is_accounted_for(tmp_path: Path, olmo2: Path) -> None:
    (tmp_path / "config.json").write_bytes((olmo2 / "config.json").read_bytes())
    tensors = load_file(olmo2 / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    wrong: list[tuple[dict[str, Tensor], str]] = [
        ({key: value for key, value in tensors.items() if key != name}, f"lacks 1 tensors.*{name}"),
        (tensors | {"model.extra.weight": torch.zeros(2)}, "holds 1 tensors.*model.extra.weight"),
        (tensors | {name: torch.zeros(3, 48)}, rf"{name}.*shape \[3, 48\], expected \[80, 48\]"),
        (tensors | {name: torch.zeros(80, 48, dtype=torch.int32)}, f"{name}.*has dtype I32"),
    ]
    for content, words in wrong:
        save_file(content, tmp_path / "model.safetensors")
        with pytest.raises(WeightsError, match=words):
            load_whole(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"a pickle")
    with pytest.raises(WeightsError, match="safetensors"):
        load_whole(tmp_path)


def test_attention_that_differs_from_the_models_own_is_noticed(tmp_path: Path) -> None:
    write(tmp_path, "Cohere2", CASES["Cohere2"])

    def without_windows(*args: Any, **kwargs: Any) -> Tensor:
        return reference.paged_attention(*args, **(kwargs | {"window": 0}))

    names = ("paged_attention", "rotary_and_write_kv", "rotary_cos_sin")
    ops = SimpleNamespace(**{name: getattr(reference, name) for name in names})
    load(tmp_path, ops)
    ops.paged_attention = without_windows
    with pytest.raises(ModelConfigError, match="attends otherwise than its arguments say"):
        load(tmp_path, ops)


def test_a_state_beside_keys_and_values_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if nothing names it: here convolutions over tokens, which chunks cut and other rows run into."""
    monkeypatch.setattr(transformers_model, "_LAYER_TYPES", ("full_attention", "conv"))
    write(tmp_path, "Lfm2", {"layer_types": ["conv", "full_attention"]})
    with pytest.raises(ModelConfigError, match="computes something else in chunks"):
        load_whole(tmp_path)


def test_a_step_that_attends_otherwise_ends(olmo2: Path) -> None:
    loaded = load(olmo2)
    assert isinstance(loaded.model, TransformersModel)
    layers = loaded.model.interface.layers
    layers[1] = replace(layers[1], asked=replace(layers[1].asked, softcap=1.0))
    with pytest.raises(RuntimeError, match="does not attend as it did"):
        logits_of(loaded.model, caches_of(loaded), [1, 2, 3], [3], block_size=4)

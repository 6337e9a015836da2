"""serve refuses a folder that cannot run before it starts anything, and says every reason at once."""

import json
from pathlib import Path

import pytest

from octavo.cli.errors import ConfigurationError
from octavo.cli.model_check import examine, require_servable
from octavo.cli.model_store import Model
from tests.support.tiny_models import write_model


def model_of(folder: Path) -> Model:
    return Model(folder, (folder.name,), folder)


def test_every_problem_is_found_at_once(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    (folder / "config.json").write_text('{"architectures": ["NoSuchModel"]}')
    (folder / "model.safetensors").write_bytes(b"short")
    found = examine(model_of(folder))
    assert found.config is None
    assert found.weights is None
    assert len(found.problems) == 3
    with pytest.raises(ConfigurationError, match=r"NoSuchModel.*model\.safetensors.*tokenizer\.json"):
        require_servable(model_of(folder), "auto")


def test_a_whole_folder_passes_and_dummy_weights_need_no_file(demo_model: Path, tmp_path: Path) -> None:
    require_servable(model_of(demo_model), "auto")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((demo_model / name).read_bytes())
    require_servable(model_of(tmp_path), "dummy")
    with pytest.raises(ConfigurationError, match="holds neither"):
        require_servable(model_of(tmp_path), "auto")


def test_flags_that_contradict_the_config(demo_model: Path) -> None:
    require_servable(model_of(demo_model), "auto", quantization="int8", max_model_len=8192)
    with pytest.raises(ConfigurationError, match="--quantization awq: the model folder says nothing of it"):
        require_servable(model_of(demo_model), "auto", quantization="awq")
    with pytest.raises(ConfigurationError, match="--max-model-len 8193: expected 2 to 8192, the model's positions"):
        require_servable(model_of(demo_model), "auto", max_model_len=8193)


def test_what_is_not_described_is_left_to_transformers(demo_model: Path, tmp_path: Path) -> None:
    """Nothing is loaded here that would know whether it can, but what config.json shows already is refused."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((demo_model / name).read_bytes())
    values = {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"}
    (tmp_path / "config.json").write_text(json.dumps(values))
    require_servable(model_of(tmp_path), "dummy")
    assert examine(model_of(tmp_path)).foreign == "Olmo2ForCausalLM"
    with pytest.raises(ConfigurationError, match=r"Olmo2ForCausalLM.*--model-impl octavo.*LlamaForCausalLM"):
        require_servable(model_of(tmp_path), "dummy", "octavo")
    (tmp_path / "config.json").write_text(json.dumps(values | {"auto_map": {}}))
    with pytest.raises(ConfigurationError, match=r"Olmo2ForCausalLM brings code of its own \(auto_map\)"):
        require_servable(model_of(tmp_path), "dummy")
    assert examine(model_of(demo_model), "transformers").foreign == "LlamaForCausalLM"

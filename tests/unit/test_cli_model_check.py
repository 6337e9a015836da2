"""serve refuses a folder that cannot run before it starts anything, and says every reason at once."""

from pathlib import Path

import pytest

from octavo.cli.errors import ConfigurationError
from octavo.cli.model_check import examine, require_servable
from tests.support.tiny_models import write_model


def test_every_problem_is_found_at_once(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    (folder / "config.json").write_text('{"architectures": ["NoSuchModel"]}')
    (folder / "model.safetensors").write_bytes(b"short")
    found = examine(folder)
    assert found.config is None
    assert found.weights is None
    assert len(found.problems) == 3
    with pytest.raises(ConfigurationError, match=r"NoSuchModel.*model\.safetensors.*tokenizer\.json"):
        require_servable(folder, with_weights=True)


def test_a_whole_folder_passes_and_dummy_weights_need_no_file(demo_model: Path, tmp_path: Path) -> None:
    require_servable(demo_model, with_weights=True)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((demo_model / name).read_bytes())
    require_servable(tmp_path, with_weights=False)
    with pytest.raises(ConfigurationError, match="holds neither"):
        require_servable(tmp_path, with_weights=True)

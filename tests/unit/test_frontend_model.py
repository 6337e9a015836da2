"""The model's folder: what is read of it, and how its faults are named."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from octavo.frontend.config import FrontendConfig
from octavo.frontend.generation_config import SamplingDefaults, parse_override
from octavo.frontend.model import load_model_files
from octavo.frontend.server import check_vocabulary
from octavo.frontend.tokenizer import ModelFilesError
from tests.support.tiny_tokenizers import llama_like, write_model_folder


def test_defaults_come_from_generation_config(tmp_path: Path) -> None:
    config = {
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "do_sample": True,
    }
    folder = write_model_folder(tmp_path, generation_config=config)
    assert load_model_files(folder).defaults == SamplingDefaults(0.6, 0.95, 20, 0.1, 1.2)


def test_what_generation_config_leaves_out_is_off(tmp_path: Path) -> None:
    assert load_model_files(write_model_folder(tmp_path)).defaults == SamplingDefaults(1.0, 1.0, 0, 0.0, 1.0)


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", -1), ("top_p", 0), ("top_p", "0.5"), ("top_k", -5), ("min_p", True), ("repetition_penalty", 0)],
)
def test_defaults_out_of_range_are_named(tmp_path: Path, name: str, value: Any) -> None:
    folder = write_model_folder(tmp_path, generation_config={name: value})
    with pytest.raises(ModelFilesError, match=f"generation_config.json: {name} is"):
        load_model_files(folder)


def test_whose_defaults_hold_is_the_operators_to_say(tmp_path: Path) -> None:
    own = {"temperature": 0.6, "top_k": 20, "eos_token_id": [5]}
    folder = write_model_folder(tmp_path / "model", generation_config=own)
    other = tmp_path / "other"
    other.mkdir()
    (other / "generation_config.json").write_text('{"top_p": 0.5, "eos_token_id": 9}')
    for source, override, defaults, end in (
        ("auto", {}, SamplingDefaults(temperature=0.6, top_k=20), 5),
        ("auto", {"temperature": 0.0, "eos_token_id": [7]}, SamplingDefaults(temperature=0.0, top_k=20), 7),
        ("auto", {"temperature": None}, SamplingDefaults(top_k=20), 5),
        ("vllm", {}, SamplingDefaults(), 5),
        ("vllm", {"min_p": 0.1}, SamplingDefaults(min_p=0.1), 5),
        (str(other), {}, SamplingDefaults(top_p=0.5), 9),
        (str(other), {"top_p": 1.0}, SamplingDefaults(), 9),
    ):
        found = load_model_files(folder, generation_config=source, override_generation_config=override)
        assert (found.defaults, end in found.eos_ids) == (defaults, True), (source, override)
    with pytest.raises(ModelFilesError, match=f"{tmp_path}/none/generation_config.json"):
        load_model_files(folder, generation_config=str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        ("[]", r"is no JSON object: \[\]"),
        ('{"temprature": 1, "seed": 2}', "has seed, temprature; there are temperature, top_p, top_k"),
        ('{"top_p": 0}', "--override-generation-config: top_p is 0, expected a number"),
    ],
)
def test_overrides_that_are_refused(text: str, message: str) -> None:
    with pytest.raises(ModelFilesError, match=message):
        parse_override(text)


def test_ends_of_sequence_are_united(tmp_path: Path) -> None:
    folder = write_model_folder(
        tmp_path,
        generation_config={"eos_token_id": [5, 7]},
        tokenizer_config={"eos_token": "<|pad|>"},
    )
    assert load_model_files(folder).eos_ids == (5, 7, 258)
    (folder / "generation_config.json").unlink()
    assert load_model_files(folder).eos_ids == (256, 258)
    (folder / "config.json").write_text('{"eos_token_id": "two"}')
    with pytest.raises(ModelFilesError, match=r"config\.json: eos_token_id holds 'two'"):
        load_model_files(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"a":' * 5000, b"\xff\xfe", b"null"])
def test_broken_files_are_named(tmp_path: Path, name: str, content: bytes) -> None:
    folder = write_model_folder(tmp_path)
    (folder / name).write_bytes(content)
    with pytest.raises(ModelFilesError, match=name):
        load_model_files(folder)


@pytest.mark.parametrize("kind", ["pipe", "folder"])
@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "chat_template.jinja",
        "additional_chat_templates/tool_use.jinja",
    ],
)
def test_what_is_no_regular_file_is_named_and_not_waited_for(tmp_path: Path, name: str, kind: str) -> None:
    path = write_model_folder(tmp_path) / name
    path.unlink(missing_ok=True)
    path.parent.mkdir(exist_ok=True)
    os.mkfifo(path) if kind == "pipe" else path.mkdir()
    with pytest.raises(ModelFilesError, match=f"^cannot read {re.escape(str(path))}: it is no regular file$"):
        load_model_files(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_missing_files_are_named(tmp_path: Path, name: str) -> None:
    folder = write_model_folder(tmp_path)
    (folder / name).unlink()
    with pytest.raises(ModelFilesError, match=name):
        load_model_files(folder)


def test_a_tokenizer_larger_than_the_embedding_is_refused(tmp_path: Path) -> None:
    model = load_model_files(write_model_folder(tmp_path))
    assert check_vocabulary(model, 300) is None
    assert check_vocabulary(model, model.tokenizer.num_ids) is None
    reason = check_vocabulary(model, model.tokenizer.num_ids - 1)
    assert reason is not None
    assert str(model.tokenizer.num_ids - 1) in reason


def test_truncation_and_padding_of_training_are_off(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path)
    saved = json.loads((folder / "tokenizer.json").read_text())
    saved["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    (folder / "tokenizer.json").write_text(json.dumps(saved))
    assert load_model_files(folder).tokenizer.encode_text("abcdefgh") == list(b"abcdefgh")


def test_the_tokenizers_own_additions_stand_before_text_only(tmp_path: Path) -> None:
    tokenizer = load_model_files(write_model_folder(tmp_path, llama_like())).tokenizer
    assert tokenizer.encode_text("we")[0] == 1
    assert tokenizer.encode_template("we")[0] != 1


def test_the_limit_on_text_allows_every_text_that_fits(tmp_path: Path) -> None:
    tokenizer = load_model_files(write_model_folder(tmp_path)).tokenizer
    text = "å" * 10 + "hello wall" * 10
    assert len(text.encode()) <= tokenizer.max_prompt_bytes(len(tokenizer.encode_text(text)))


def test_neither_torch_nor_transformers_is_imported() -> None:
    code = (
        "import sys, octavo.frontend.main, octavo.frontend.server\n"
        "bad = {'torch', 'transformers'} & set(sys.modules)\n"
        "sys.exit(', '.join(bad) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_panic_of_the_tokenizer_library_is_an_ordinary_error(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path, llama_like())
    saved = json.loads((folder / "tokenizer.json").read_text())
    saved["post_processor"]["special_tokens"] = {}
    (folder / "tokenizer.json").write_text(json.dumps(saved))
    with pytest.raises(RuntimeError, match="panicked"):
        load_model_files(folder).tokenizer.encode_text("we")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"served_model_names": ()}, "served_model_names"),
        ({"served_model_names": ("a", "")}, "served_model_names"),
        ({"grpc_port": 65536}, "65536"),
        ({"max_n": 0}, "max_n is 0"),
        ({"recovery_timeout_s": -1.0}, "recovery_timeout_s"),
    ],
)
def test_settings_out_of_range_are_named(settings: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {"model_path": Path("m"), "served_model_names": ("a",), "address": "ipc:///x", **settings}
    with pytest.raises(ValueError, match=words):
        FrontendConfig(**given)

"""octavo models list | inspect, and the headers of safetensors files that they read."""

import json
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

from octavo.cli.checkpoint import read_checkpoint
from octavo.cli.errors import CommandError
from octavo.cli.main import build
from octavo.worker.safetensors_file import INDEX_FILE, SINGLE_FILE
from tests.support import tool_templates


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(build("models"), ["models", *arguments], env={"COLUMNS": "300"})
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save_file({"a": np.zeros((3, 5), np.float32), "b": np.zeros(7, np.float16)}, tmp_path / SINGLE_FILE)
    return tmp_path


def test_a_header_tells_all(checkpoint: Path) -> None:
    (file,) = read_checkpoint(checkpoint)
    assert (file.num_tensors, file.num_parameters, file.dtypes) == (2, 22, frozenset({"F32", "F16"}))
    assert file.num_bytes == (checkpoint / SINGLE_FILE).stat().st_size


def test_an_index_names_the_files(checkpoint: Path) -> None:
    save_file({"a": np.zeros(1, np.float32)}, checkpoint / "two.safetensors")
    save_file({"b": np.zeros(1, np.float32)}, checkpoint / "one.safetensors")
    (checkpoint / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": "two.safetensors", "b": "one.safetensors"}}))
    assert [file.path.name for file in read_checkpoint(checkpoint)] == ["one.safetensors", "two.safetensors"]


@pytest.mark.parametrize(
    ("index", "reason"),
    [
        ('{"weight_map": {"a": "absent.safetensors"}}', "names absent.safetensors, which is not in"),
        ('{"weight_map": {"a": "../model.safetensors"}}', "names '../model.safetensors'"),
        ('{"weight_map": {"a": 1}}', "names 1"),
        ('{"weight_map": {"a": "model.safetensors"}}', "differ about 1 tensors: b"),
        ('{"weight_map": {}}', "names no tensor"),
        ("[]", "is no index"),
        ("{", "is no index"),
        ("[" * 100_000, "is no index"),
    ],
)
def test_a_wrong_index_is_named(checkpoint: Path, index: str, reason: str) -> None:
    (checkpoint / INDEX_FILE).write_text(index)
    with pytest.raises(CommandError, match=reason) as caught:
        read_checkpoint(checkpoint)
    assert INDEX_FILE in str(caught.value) or "the index" in str(caught.value)


def header(text: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", r"\(0 bytes\) is damaged: it is too short"),
        (b"1234567", r"\(7 bytes\) is damaged: it is too short"),
        (struct.pack("<Q", 2**60) + b"{}", f"names a header of {2**60}"),
        (struct.pack("<Q", 3) + b"{}", "names a header of 3"),
        (header(b"no JSON"), "cannot be read"),
        (header(b"[]"), "is no JSON object"),
        (header(b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}', b"1234"), "tensor 'a'"),
        (header(b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}', b"1234"), "tensor 'a'"),
        (header(b'{"a": {"dtype": 1, "shape": [1], "data_offsets": [0, 4]}}', b"1234"), "tensor 'a'"),
        (header(b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}', b"123"), "describes 73 bytes"),
        (header(b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}', b"12345"), "describes 73 bytes"),
        (header(b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', b"1234"), "cannot have 4 bytes"),
        (header(b'{"a": {"dtype": "X", "shape": [1], "data_offsets": [1, 4]}}', b"1234"), "leaves a gap"),
        (header(b'{"a": 1, "a": 2}'), "a name stands there twice"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / SINGLE_FILE).write_bytes(content)
    with pytest.raises(CommandError, match=reason) as caught:
        read_checkpoint(tmp_path)
    assert str(tmp_path / SINGLE_FILE) in str(caught.value)


def test_a_folder_without_weights_is_named(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=f"{tmp_path} holds neither"):
        read_checkpoint(tmp_path)


def test_inspect_describes_the_demo_model(demo_model: Path) -> None:
    code, text = run("inspect", str(demo_model))
    assert code == 0, text
    for words in (
        "LlamaForCausalLM",
        "30, hidden size 576, MLP 1536",
        "9 heads of 64, 3 for keys and values",
        "8192 tokens",
        "134,515,008 as BF16 in 272 tensors",
        "46080 bytes a token in float32",
        "916 MB for one request of 8192 tokens in float32: weights 538 MB, KV cache 377 MB",
        "2,605 MB for one request of 8192 tokens in bfloat16: weights 269 MB, KV cache 189 MB, context and graphs 2,147 MB",
        "49152 ids, end of sequence: 2",
    ):
        assert words in text
    assert text.splitlines()[-1] == "would run"
    assert row_of(text, "tools").startswith("no: the template does not show them")
    assert row_of(text, "reasoning") == "no"


def test_inspect_for_programs(demo_model: Path) -> None:
    code, text = run("inspect", str(demo_model), "--json", "--max-model-len", "1000")
    found = json.loads(text)
    assert (code, found["runs"], found["problems"], found["num_parameters"]) == (0, True, [], 134_515_008)
    assert found["config"]["max_positions"] == 8192
    assert [file["dtypes"] for file in found["files"]] == [["BF16"]]
    assert found["memory"][0] == {
        "device": "cpu",
        "dtype": "float32",
        "weight_bytes": 4 * 134_515_008,
        "kv_cache_bytes_per_token": 46080,
        "kv_cache_bytes": 46_080_000,
        "reserved_bytes": 0,
        "total_bytes": 4 * 134_515_008 + 46_080_000,
    }
    assert found["text"]["eos_ids"] == [2]


def test_inspect_compares_the_files_with_the_config(demo_model: Path, tmp_path: Path) -> None:
    """Headers that are whole by themselves may be those of another model."""
    for path in demo_model.iterdir():
        (tmp_path / path.name).symlink_to(path)
    config = json.loads((demo_model / "config.json").read_text()) | {"num_hidden_layers": 29}
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, text = run("inspect", str(tmp_path), "--json")
    (problem,) = json.loads(text)["problems"]
    assert code == 1
    assert "holds 9 tensors that the model does not know: model.layers.29.input_layernorm.weight" in problem


def test_inspect_for_programs_tells_of_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"no model")
    code, text = run("inspect", str(tmp_path / "m.gguf"), "--json")
    found = json.loads(text)
    assert (code, found["runs"]) == (1, False)
    assert "is no GGUF file" in found["problems"][0]


@pytest.mark.parametrize(
    ("types", "where"),
    [(["sliding_attention"] * 30, "all layers"), (["sliding_attention", "full_attention"] * 15, "15 of the layers")],
)
def test_inspect_names_windows(demo_model: Path, tmp_path: Path, types: list[str], where: str) -> None:
    window = {"architectures": ["MistralForCausalLM"], "sliding_window": 512, "layer_types": types}
    (tmp_path / "config.json").write_text(json.dumps(json.loads((demo_model / "config.json").read_text()) | window))
    _, text = run("inspect", str(tmp_path))
    assert row_of(text, "attention").endswith(f"a window of 512 tokens in {where}")


def row_of(text: str, name: str) -> str:
    (found,) = (line.strip().removeprefix(name).strip() for line in text.splitlines() if line.split()[:1] == [name])
    return found


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        (tool_templates.HERMES, "yes (--tool-call-parser hermes)", "no"),
        (tool_templates.THINKING, "yes (--tool-call-parser hermes)", "yes (--reasoning-parser qwen3)"),
        (tool_templates.LLAMA, "yes (--tool-call-parser llama3_json)", "no"),
        ("{{ tools }}", "the form of calls is not known: name it with --tool-call-parser", "no"),
    ],
)
def test_inspect_tells_which_parsers_apply(
    demo_model: Path, tmp_path: Path, template: str, tools: str, reasoning: str
) -> None:
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(demo_model / name, tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    _, text = run("inspect", str(tmp_path))
    assert (row_of(text, "tools"), row_of(text, "reasoning")) == (tools, reasoning)


def test_inspect_says_why_a_model_would_not_run(demo_model: Path, tmp_path: Path) -> None:
    """Everything that is wrong at once, not the first of it."""
    config = json.loads((demo_model / "config.json").read_text()) | {
        "architectures": ["MambaForCausalLM"],
        "auto_map": {},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, text = run("inspect", str(tmp_path))
    assert code == 1
    problems = [line for line in text.splitlines() if line.startswith("would not run: ")]
    assert len(problems) == 3
    assert "MambaForCausalLM brings code of its own (auto_map)" in problems[0]
    assert "holds neither model.safetensors" in problems[1]
    assert "tokenizer.json" in problems[2]


def test_inspect_says_where_transformers_would_be_tried(demo_model: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(demo_model / name)
    (tmp_path / "config.json").write_text('{"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"}')
    code, text = run("inspect", str(tmp_path))
    assert code == 0
    assert row_of(text, "architecture") == "Olmo2ForCausalLM"
    assert text.splitlines()[-1].startswith("transformers would be tried: Olmo2ForCausalLM is not described here")


def test_list_shows_what_was_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path))
    assert run("list") == (0, f"{tmp_path}/models holds no model; 'octavo models fetch demo' fetches one\n")
    for name, config in (("owner--model", '{"architectures": ["SomeModel"]}'), ("broken", "{"), (".owner.partial", "")):
        (tmp_path / "models" / name).mkdir(parents=True)
        (tmp_path / "models" / name / "config.json").write_text(config)
    code, text = run("list")
    assert code == 0
    rows = [line.split()[:2] for line in text.splitlines()[1:-1]]
    assert rows == [["broken", "unknown"], ["owner/model", "SomeModel"]]


def test_a_folder_needs_no_fetching(tmp_path: Path) -> None:
    """So that a container's first step may name one as well."""
    (tmp_path / "config.json").write_text("{}")
    assert run("fetch", str(tmp_path)) == (0, f"{tmp_path}\n")

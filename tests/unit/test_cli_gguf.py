"""A GGUF file as a model: the folder that is made beside it, its tokenizer, and what is refused."""

import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from typer.testing import CliRunner

from octavo.cli.errors import ConfigurationError
from octavo.cli.main import build
from octavo.cli.model_check import require_servable
from octavo.cli.model_store import locate, resolve
from octavo.frontend.generation_config import SamplingDefaults
from octavo.frontend.model import load_model_files
from octavo.worker.models.config import load_model_config
from tests.support.gguf_files import TINY, write_gguf
from tests.support.tiny_models import load_worker, random_tensors, write_model
from tests.support.tiny_tokenizers import llama_like

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,!?Ġ"
TOKENS = ["<unk>", "<|im_start|>", "<|im_end|>", "<think>", *LETTERS, "he", "ll", "hell", "Ġw", "12"]
BYTE_LEVEL: dict[str, Any] = {
    "ggml.model": "gpt2",
    "ggml.pre": "smollm",
    "ggml.tokens": [*TOKENS, *(f"[PAD{i}]" for i in range(len(TOKENS), 97))],
    "ggml.token_type": [2, 3, 3, 4, *([1] * (len(TOKENS) - 4)), *([5] * (97 - len(TOKENS)))],
    "ggml.merges": ["h e", "l l", "he ll", "Ġ w", "1 2"],
    "ggml.bos_token_id": 1,
    "ggml.eos_token_id": 0,
    "chat_template": "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}",
}
BLANK = "\u2581"
PIECES = ["<unk>", "<s>", "</s>", "<0x0A>", "<0xC3>", "<0xBC>", *"abcdefghijklmnopqrstuvwxyz", BLANK]
MERGED = [f"{BLANK}w", "he", "ll", "hell", "hello", f"{BLANK}hello"]
SENTENCE_PIECE: dict[str, Any] = {
    "ggml.model": "llama",
    "ggml.tokens": [*PIECES, *MERGED, *(f"[{i}]" for i in range(len(PIECES) + len(MERGED), 97))],
    "ggml.token_type": [
        2,
        3,
        3,
        6,
        6,
        6,
        *([1] * (len(PIECES) + len(MERGED) - 6)),
        *([5] * (91 - len(PIECES) - len(MERGED) + 6)),
    ],
    "ggml.scores": [*([0.0] * len(PIECES)), *(float(-i) for i in range(97 - len(PIECES)))],
    "ggml.bos_token_id": 1,
    "ggml.eos_token_id": 2,
    "ggml.unknown_token_id": 0,
}


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "models"


def write(path: Path, changes: Mapping[str, Any] | None = None, tokenizer: Mapping[str, Any] = BYTE_LEVEL) -> Path:
    path.parent.mkdir(exist_ok=True)
    values = {name: value for name, value in ({**tokenizer, **(changes or {})}).items() if value is not None}
    return write_gguf(path, TINY, random_tensors(TINY), tokenizer=values)


def made(store: Path) -> list[str]:
    return sorted(path.name for path in (store / ".gguf").iterdir() if not path.name.startswith("."))


def test_a_file_is_a_model(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf")
    model = resolve(str(path))
    assert (model.names, model.source, model.gguf) == (("tiny",), path, path)
    assert load_model_config(model.folder).vocab_size == 97
    files = load_model_files(model.folder)
    assert files.tokenizer.num_ids == len(TOKENS)  # what fills the embedding up is no token
    assert files.tokenizer.encode_text("hello world 12") == [
        TOKENS.index(token) for token in ("hell", "o", "Ġw", "o", "r", "l", "d", "Ġ", "1", "2")
    ]
    assert files.tokenizer.decode([TOKENS.index("hell"), TOKENS.index("Ġw")], True) == "hell w"
    assert files.chat_template is not None
    rendered = files.chat_template.render([{"role": "user", "content": "he"}], True, False, {})
    assert files.tokenizer.encode_template(rendered) == [1, TOKENS.index("he"), 2]
    assert files.eos_ids == (0, 2)  # the template ends turns with 2
    require_servable(model, "auto")
    require_servable(model, "gguf")
    with pytest.raises(
        ConfigurationError, match=r"--load-format safetensors, but the weights of .*tiny\.gguf are gguf"
    ):
        require_servable(model, "safetensors")


def test_a_worker_loads_it(tmp_path: Path) -> None:
    model = resolve(str(write(tmp_path / "tiny.gguf")))
    assert load_worker(model.folder, gguf=model.gguf).facts.vocab_size == 97


def test_a_folder_with_one_file_is_a_model(tmp_path: Path) -> None:
    path = write(tmp_path / "some" / "x.gguf")
    model = resolve(str(path.parent))
    assert (model.names, model.source, model.gguf) == (("some",), path.parent, path)
    (path.parent / "config.json").write_text("{}")
    assert resolve(str(path.parent)).gguf == path
    write(tmp_path / "some" / "y.gguf")
    with pytest.raises(ConfigurationError, match=r"holds 2 GGUF files \(x\.gguf, y\.gguf\): name one of them"):
        resolve(str(path.parent))


def test_safetensors_win_in_a_folder_with_both(tmp_path: Path) -> None:
    folder = write(tmp_path / "some" / "x.gguf").parent
    write_model(folder)
    assert (resolve(str(folder)).folder, resolve(str(folder)).gguf) == (folder, None)


def test_a_tokenizer_beside_the_file_wins(tmp_path: Path) -> None:
    path = write(tmp_path / "some" / "x.gguf", {"ggml.pre": "unheard-of"})
    with pytest.raises(ConfigurationError, match=r"pre = 'unheard-of' is not supported; supported are .*llama-bpe"):
        resolve(str(path.parent))
    llama_like().save(str(path.parent / "tokenizer.json"))
    (path.parent / "generation_config.json").write_text('{"temperature": 0.25, "eos_token_id": 7}')
    model = resolve(str(path.parent))
    files = load_model_files(model.folder)
    assert files.tokenizer.encode_text("we") == llama_like().encode("we").ids
    assert (files.defaults.temperature, 7 in files.eos_ids) == (0.25, True)


def test_the_folder_is_made_once_and_anew_when_the_file_changes(tmp_path: Path, store: Path) -> None:
    path = write(tmp_path / "tiny.gguf")
    with ThreadPoolExecutor(4) as pool:
        (folder,) = {model.folder for model in pool.map(resolve, [str(path)] * 4)}
    assert made(store) == [folder.name]
    first = (folder / "tokenizer.json").stat().st_mtime_ns
    assert resolve(str(path)).folder == folder
    assert (folder / "tokenizer.json").stat().st_mtime_ns == first
    os.utime(path, ns=(1, 1))
    other = resolve(str(path)).folder
    assert other != folder
    assert made(store) == [other.name]


def test_models_that_are_described_alike_are_told_apart(tmp_path: Path) -> None:
    """The digest of config.json is what processes know a model by."""
    one = resolve(str(write(tmp_path / "a.gguf"))).folder
    two = resolve(str(write(tmp_path / "b.gguf", {"ggml.eos_token_id": 2}))).folder
    assert load_model_files(one).digest != load_model_files(two).digest


def test_sampling_defaults_of_the_file(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "m.gguf", TINY, random_tensors(TINY), tokenizer=BYTE_LEVEL, general={"sampling.temp": 0.5}
    )
    assert load_model_files(resolve(str(path)).folder).defaults == SamplingDefaults(temperature=0.5)


def test_words_are_cut_as_the_file_says(tmp_path: Path) -> None:
    for pre, expected in (("gpt-2", ["12", "12"]), ("smollm", ["1", "2", "1", "2"]), ("llama-bpe", ["12", "1", "2"])):
        path = write(tmp_path / f"{pre}.gguf", {"ggml.pre": pre, "ggml.add_bos_token": False})
        tokenizer = Tokenizer.from_file(str(resolve(str(path)).folder / "tokenizer.json"))
        assert tokenizer.encode("1212").tokens == expected, pre


def test_byte_level_vocabularies_begin_with_bos_where_the_kind_does(tmp_path: Path) -> None:
    for pre, begins in (("smollm", False), ("llama-bpe", True)):
        path = write(tmp_path / f"{pre}.gguf", {"ggml.pre": pre})
        assert (load_model_files(resolve(str(path)).folder).tokenizer.encode_text("he")[0] == 1) == begins


def test_sentence_pieces(tmp_path: Path) -> None:
    tokenizer = load_model_files(resolve(str(write(tmp_path / "m.gguf", tokenizer=SENTENCE_PIECE))).folder).tokenizer
    ids = tokenizer.encode_text("hello w\nü")
    tokens = [SENTENCE_PIECE["ggml.tokens"][index] for index in ids]
    assert tokens == ["<s>", f"{BLANK}hello", f"{BLANK}w", "<0x0A>", "<0xC3>", "<0xBC>"]
    assert tokenizer.decode(ids, True) == "hello w\nü"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ggml.model": "rwkv"}, "tokenizer.ggml.model = 'rwkv' is not supported; supported are gpt2, llama"),
        ({"ggml.pre": None}, "tokenizer.ggml.pre = None is not supported"),
        ({"ggml.tokens": None}, "tokenizer.ggml.tokens is no list of texts"),
        ({"ggml.token_type": [1, 2]}, "token_type does not hold a number for each of 97 tokens"),
        ({"ggml.merges": None}, "tokenizer.ggml.merges is missing"),
        ({"ggml.merges": ["h e", "x y"]}, "merges holds 'x y', expected two tokens that make a third"),
        ({"ggml.eos_token_id": 97}, "eos_token_id = 97, expected one of 97 ids"),
        ({"ggml.add_bos_token": 1}, "add_bos_token = 1, expected true or false"),
    ],
)
def test_tokenizers_that_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = write(tmp_path / "m.gguf", changes)
    with pytest.raises(ConfigurationError, match=message) as caught:
        resolve(str(path))
    assert str(path) in str(caught.value)


def test_what_is_no_such_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=f"there is no file {tmp_path}/absent.gguf"):
        resolve(str(tmp_path / "absent.gguf"))
    (tmp_path / "m.gguf").write_bytes(b"no model")
    for look in (resolve, locate):
        with pytest.raises(
            ConfigurationError, match=r"m\.gguf is no GGUF file: it begins with b'no m', expected b'GGUF'"
        ):
            look(str(tmp_path / "m.gguf"))


def test_inspect_describes_it(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf")
    result = CliRunner().invoke(build("models"), ["models", "inspect", str(path)], env={"COLUMNS": "300"})
    assert result.exit_code == 0, result.output
    assert str(path) in result.output
    assert "as F32 in 20 tensors" in result.output
    assert result.output.splitlines()[-1] == "would run"


def test_nothing_of_torch_is_needed(tmp_path: Path) -> None:
    import subprocess
    import sys

    path = write(tmp_path / "tiny.gguf")
    code = (
        "import sys\nfrom octavo.cli.model_store import resolve\nfrom octavo.cli.model_check import require_servable\n"
        f"require_servable(resolve({str(path)!r}), 'auto')\n"
        "sys.exit(', '.join({'torch', 'transformers'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads((resolve(str(path)).folder / "config.json").read_text())["model_type"] == "llama"

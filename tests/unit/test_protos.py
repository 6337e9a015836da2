"""What the check of the protos against their baseline lets through, and what it does not."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUF = shutil.which("buf", path=str(Path(sys.executable).parent))


def breaks(tmp_path: Path, old: str, new: str) -> str:
    """Return what the check says of generation.proto with a change."""
    if BUF is None:
        pytest.skip("buf is not installed beside this Python")
    shutil.copytree(ROOT / "protos", tmp_path / "protos")
    shutil.copy(ROOT / "buf.yaml", tmp_path)
    proto = tmp_path / "protos/octavo/v1/generation.proto"
    text = proto.read_text()
    assert text.count(old) >= 1
    proto.write_text(text.replace(old, new, 1))
    done = subprocess.run(
        [BUF, "breaking", "--against", "protos/baseline.binpb"],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert not done.stderr, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("old", "new", "rule"),
    [
        ("int32 priority = 9;", "int32 priority = 99;", "priority"),
        ("int32 priority = 9;", "int64 priority = 9;", "priority"),
        ("int32 priority = 9;", "int32 rank = 9;", "priority"),
        ("int32 priority = 9;", "reserved 9;", "priority"),
        ("FINISH_REASON_LENGTH = 2;", "FINISH_REASON_LONG = 2;", "FINISH_REASON_LENGTH"),
        ("rpc Generate(", "rpc Complete(", "Generate"),
    ],
)
def test_what_breaks_clients_is_found(tmp_path: Path, old: str, new: str, rule: str) -> None:
    assert rule in breaks(tmp_path, old, new)


def test_what_is_reserved_may_be_put_to_use_and_fields_may_be_added(tmp_path: Path) -> None:
    assert breaks(tmp_path, "reserved 11;", "string adapter = 11;\n  string added = 1000;") == ""

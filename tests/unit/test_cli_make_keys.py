"""octavo keys: what it writes, and what it never does."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from octavo.cli.errors import ConfigurationError
from octavo.cli.keys import check_curve, load_auth
from octavo.cli.main import build
from octavo.wire.curve import load_peer_keys, load_scheduler_keys


def make(folder: Path, *arguments: str) -> str:
    result = CliRunner().invoke(build("keys"), ["keys", str(folder), *arguments], env={"COLUMNS": "300"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output


def test_a_folder_of_keys_is_its_owners_alone(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "keys"
    said = make(folder, "--api-keys", "2")
    files = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}
    names = [f"{name}{end}" for name in ("scheduler", "frontend", "worker") for end in (".key", ".key_secret")]
    assert files == dict.fromkeys([*names, "api_keys"], 0o600)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert set(said.split()) == {str(folder / name) for name in files}
    api_keys = (folder / "api_keys").read_text().split()
    assert len(set(api_keys)) == 2
    assert load_auth(None, folder / "api_keys", None).check(f"Bearer {api_keys[1]}")
    keys = load_scheduler_keys(folder)
    assert keys is not None
    assert {peer.public for name in ("frontend", "worker") if (peer := load_peer_keys(folder, name))} == keys.allowed


def test_nothing_is_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    make(folder)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    for arguments in ((), ("--peer", "worker")):
        with pytest.raises(ConfigurationError, match="never replaced"):
            make(folder, *arguments)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_more_peers(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    with pytest.raises(ConfigurationError, match="has no keys yet"):
        make(folder, "--peer", "worker-2")
    make(folder)
    make(folder, "--peer", "worker-2", "--peer", "worker-3")
    keys = load_scheduler_keys(folder)
    assert keys is not None
    assert len(keys.allowed) == 4


@pytest.mark.parametrize("name", ["scheduler", "../x", "", "A", "x" * 65, ".x", "a/b"])
def test_names_that_are_none(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigurationError, match="no name of a peer"):
        make(tmp_path / "keys", "--peer", name)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigurationError, match="chmod 700"):
        make(tmp_path)
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="cannot be written"):
        make(tmp_path / "file" / "keys")


def test_serve_checks_address_and_keys_of_all_processes(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    make(folder)
    check_curve("tcp://10.0.0.1:5", folder)
    check_curve("ipc:///tmp/x", None)
    with pytest.raises(ConfigurationError, match="tcp needs CURVE keys"):
        check_curve("tcp://127.0.0.1:5", None)
    (folder / "worker.key_secret").unlink()
    with pytest.raises(ConfigurationError, match=r"worker\.key_secret is missing"):
        check_curve("tcp://10.0.0.1:5", folder)

"""Where models and sockets live, and what is refused there."""

from pathlib import Path

import pytest

from octavo.cli.errors import ConfigurationError
from octavo.cli.places import default_scheduler_address, models_folder, runtime_folder
from octavo.wire.channel import MAX_IPC_PATH_BYTES, check_address


def test_octavo_home_holds_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_HOME", "/somewhere")
    assert models_folder() == Path("/somewhere/models")


def test_the_cache_folder_holds_them_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OCTAVO_HOME", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert models_folder() == Path("/cache/octavo/models")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert models_folder() == Path("/home/somebody/.cache/octavo/models")


def test_the_runtime_folder_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OCTAVO_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = runtime_folder()
    assert folder == tmp_path / "octavo"
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o750, 0o701, 0o777])
def test_a_folder_that_others_can_enter_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(mode)
    monkeypatch.setenv("OCTAVO_RUNTIME_DIR", str(folder))
    with pytest.raises(ConfigurationError, match=f"mode {mode:04o}.*chmod 700"):
        runtime_folder()


def test_a_link_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its target could be anybody's."""
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    monkeypatch.setenv("OCTAVO_RUNTIME_DIR", str(tmp_path / "link"))
    with pytest.raises(ConfigurationError, match="no folder of this user"):
        runtime_folder()


def test_a_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("OCTAVO_RUNTIME_DIR", str(tmp_path / "file"))
    with pytest.raises(ConfigurationError, match="cannot be made"):
        runtime_folder()


def test_a_path_too_long_for_a_socket_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    longest = MAX_IPC_PATH_BYTES - len("/scheduler-65535")
    folder = tmp_path / ("x" * (longest - len(str(tmp_path)) - 1))
    monkeypatch.setenv("OCTAVO_RUNTIME_DIR", str(folder))
    check_address(default_scheduler_address("scheduler-65535"))
    monkeypatch.setenv("OCTAVO_RUNTIME_DIR", str(folder) + "x")
    with pytest.raises(ConfigurationError, match="108 bytes, limit 107"):
        default_scheduler_address()

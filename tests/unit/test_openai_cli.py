"""From the command line to the HTTP door."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from octavo.cli import logs, serve, summary
from octavo.cli.errors import ConfigurationError
from octavo.cli.keys import Access
from octavo.cli.main import build
from octavo.frontend.config import FrontendConfig
from octavo.frontend.tls import TlsFiles


@pytest.mark.parametrize(
    ("arguments", "port"), [((), 8000), (("--http-port", "0"), 0), (("--http-port", "8123"), 8123)]
)
def test_the_port_reaches_the_frontend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], port: int
) -> None:
    (tmp_path / "config.json").write_text("{}")
    seen: list[Any] = []
    monkeypatch.setenv("OCTAVO_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setattr(logs, "configure", lambda *_: None)
    monkeypatch.setattr("octavo.frontend.main.run", seen.append)
    result = CliRunner().invoke(build("frontend"), ["frontend", str(tmp_path), *arguments])
    assert result.exit_code == 0, result.output
    assert [config.http_port for config in seen] == [port]


@pytest.mark.parametrize("port", [-1, 65536])
def test_ports_that_are_none_are_refused(port: int) -> None:
    with pytest.raises(ValueError, match=f"http_port is {port}: it must be from 0 to 65535"):
        FrontendConfig(Path("model"), ("tiny",), "ipc:///nowhere/s", http_port=port)


def test_serve_names_the_address() -> None:
    access = Access("here:7")
    assert summary.http_address("here", 8000, access) == "http://here:8000/v1"
    secure = Access("here:7", tls=TlsFiles(Path("c"), Path("k")))
    assert summary.http_address("[::1]", 8000, secure) == "https://[::1]:8000/v1"
    assert "log" in summary.http_address("here", 0, access)


def test_serve_refuses_a_taken_port_before_it_starts_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(host: str, port: int) -> None:
        if port == 8123:
            raise ConfigurationError("cannot listen on 8123")

    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(logs, "configure", lambda *_: None)
    monkeypatch.setattr(serve, "check_port", check)
    result = CliRunner().invoke(build("serve"), ["serve", str(tmp_path), "--grpc-port", "0", "--http-port", "8123"])
    assert result.exit_code != 0
    assert "8123" in (result.output + str(result.exception))

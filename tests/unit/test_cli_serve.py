"""octavo serve against the three roles that it starts."""

import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main

from octavo.cli import logs, serve
from octavo.cli.errors import ConfigurationError
from octavo.cli.keys import Access
from octavo.cli.main import build
from octavo.cli.model_store import Model
from octavo.cli.supervisor import ChildSpec

ROLES = ("frontend", "scheduler", "worker")
OF_ROLES_ALONE = {"exit_with_parent", "local_socket"}


def parameters(command: str) -> dict[str, Any]:
    """Return the defaults of a command's parameters by name."""
    group = typer.main.get_command(build(command))
    found = group.get_command(typer.Context(group), command)  # type: ignore[attr-defined]
    return {parameter.name: parameter.default for parameter in found.params}


def test_serve_offers_every_flag_of_the_roles_with_the_same_default() -> None:
    of_roles: dict[str, Any] = {}
    for role in ROLES:
        for name, default in parameters(role).items():
            assert of_roles.setdefault(name, default) == default, name
    of_serve = parameters("serve")
    assert set(of_serve) == set(of_roles) - OF_ROLES_ALONE
    for name, default in of_serve.items():
        assert of_roles[name] == default, name


def test_every_flag_of_serve_reaches_a_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No flag is taken and then forgotten."""
    started: list[ChildSpec] = []

    class Stop(Exception):
        pass

    def supervisor(children: list[ChildSpec], grace_s: float) -> None:
        started.extend(children)
        raise Stop

    monkeypatch.setattr(serve, "Supervisor", supervisor)
    monkeypatch.setattr(logs, "configure", lambda role, level: None)
    monkeypatch.setattr(serve, "resolve", lambda name: Model(tmp_path, ("a", "b")))
    monkeypatch.setattr(serve, "_check_port", lambda host, port: None)
    monkeypatch.setattr(serve, "_access", lambda keys, tls, host, port: Access("here:1"))
    monkeypatch.setattr(serve, "require_servable", lambda folder, with_weights: None)
    switches = {name for name, default in parameters("serve").items() if isinstance(default, bool)}
    secrets = {"api_key": ["key-of-a-client-1", "key-of-a-client-2"], "admin_api_key": ["key-of-an-operator"]}
    apart = ("config", "grace", *secrets, *switches)
    values = {name: f"value-of-{name}" for name in parameters("serve") if name not in apart}
    others = {"served_model_name": ["x", "y"], "grace": 3.0} | secrets | dict.fromkeys(switches, False)
    with pytest.raises(Stop):
        serve.serve(**values | others)  # type: ignore[arg-type]
    words = [word for child in started for word in child.arguments]
    assert switches == {"enable_prefix_caching", "enforce_eager", "batch_invariant", "share_prefix_cache"}
    for switch in switches:
        flag = switch.replace("_", "-")
        assert f"--no-{flag}" in words
        assert f"--{flag}" not in words
    for name, value in values.items():
        if name not in ("model", "served_model_name"):
            flag = "--" + name.replace("_", "-")
            assert words[words.index(flag) + 1] == value
    assert [words[i + 1] for i, word in enumerate(words) if word == "--served-model-name"] == ["x", "y"]
    assert [words[i + 1] for i, word in enumerate(words) if word == "--grace"] == ["3.0"]
    assert [child.arguments[0] for child in started] == [str(tmp_path)] * 3
    assert not [word for word in words if word.startswith("key-of")]
    in_environments = {child.role: dict(child.environment) for child in started}
    assert in_environments == {
        "scheduler": {},
        "worker": {},
        "frontend": {
            "OCTAVO_API_KEY": "key-of-a-client-1 key-of-a-client-2",
            "OCTAVO_ADMIN_API_KEY": "key-of-an-operator",
        },
    }


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("0.0.0.0", "127.0.0.1"),
        ("::", "[::1]"),
        ("[::1]", "[::1]"),
        ("some.host", "some.host"),
    ],
)
def test_a_client_on_this_machine_can_reach_it(host: str, address: str) -> None:
    assert serve._reachable(host) == address


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"cannot listen on 192\.0\.2\.1:50051"):
        serve._check_port("192.0.2.1", 50051)


def test_the_summary_calls_octavo_as_it_was_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bin" / "octavo"
    program.parent.mkdir()
    program.touch(mode=0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(program)])
    monkeypatch.setenv("PATH", "/nowhere")
    assert serve._program() == "bin/octavo"
    monkeypatch.setenv("PATH", str(program.parent))
    assert serve._program() == "octavo"
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "main.py")])
    assert serve._program() == "octavo"

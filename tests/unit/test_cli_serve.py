"""octavo serve against the three roles that it starts."""

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import typer.main

from octavo.cli import keys, logs, ports, serve, summary
from octavo.cli.errors import ConfigurationError
from octavo.cli.keys import Access
from octavo.cli.main import build
from octavo.cli.model_store import Model
from octavo.cli.supervisor import ChildSpec
from octavo.frontend.listeners import CannotListen, listen_tcp

ROLES = ("frontend", "scheduler", "worker")
OF_ROLES_ALONE = {
    "exit_with_parent",
    "local_socket",
    "live_socket",
    "metrics_file",
    "reuse_port",
    "health_port",
    "metrics_host",
    "metrics_port",
}
OF_SERVE_ALONE = {"num_frontends", "stall_timeout"}


class Stop(Exception):
    """Nothing is started."""


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
    assert set(of_serve) - OF_SERVE_ALONE == set(of_roles) - OF_ROLES_ALONE
    for name in set(of_serve) - OF_SERVE_ALONE:
        default = of_serve[name]
        assert of_roles[name] == default, name


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[ChildSpec]:
    """Return the children that serve would start; instead of that it raises Stop."""
    children: list[ChildSpec] = []

    def supervisor(specs: list[ChildSpec], **settings: float) -> None:
        assert settings == {"grace_s": 3.0, "stall_timeout_s": 4.0, "ends_on_hangup": True}
        children.extend(specs)
        raise Stop

    monkeypatch.setenv("OCTAVO_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setattr(serve, "Supervisor", supervisor)
    monkeypatch.setattr(serve, "has_controlling_terminal", lambda: True)
    monkeypatch.setattr(logs, "configure", lambda *_: None)
    monkeypatch.setattr(serve, "resolve", lambda name: Model(tmp_path, ("a", "b"), tmp_path))
    monkeypatch.setattr(serve, "check_port", lambda host, port: None)
    monkeypatch.setattr(serve, "_access", lambda keys, tls, host, port: Access("here:1"))
    monkeypatch.setattr(serve, "require_servable", lambda *_: None)
    monkeypatch.setattr(keys, "check_curve", lambda address, folder: None)
    return children


def test_every_flag_of_serve_reaches_a_child(tmp_path: Path, started: list[ChildSpec]) -> None:
    """No flag is taken and then forgotten."""
    switches = {name for name, default in parameters("serve").items() if isinstance(default, bool)}
    secrets = {"api_key": ["key-of-a-client-1", "key-of-a-client-2"], "admin_api_key": ["key-of-an-operator"]}
    apart = ("config", "grace", *OF_SERVE_ALONE, *secrets, *switches)
    values = {name: f"value-of-{name}" for name in parameters("serve") if name not in apart}
    numbers = {"grace": 3.0, "num_frontends": 1, "stall_timeout": 4.0}
    others = {"served_model_name": ["x", "y"]} | numbers | secrets | dict.fromkeys(switches, False)
    with pytest.raises(Stop):
        serve.serve(**values | others)  # type: ignore[arg-type]
    words = [word for child in started for word in child.arguments]
    assert switches == {
        "enable_prefix_caching",
        "enforce_eager",
        "batch_invariant",
        "share_prefix_cache",
        "enable_auto_tool_choice",
        "vllm_metric_names",
        "access_log",
    }
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


def test_several_frontends_share_the_ports_and_nothing_else(
    started: list[ChildSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as held, pytest.raises(Stop):
        monkeypatch.setattr(serve, "hold_port", lambda *place: held.enter_context(ports.hold_port(*place)))
        # Ports that the system chooses: all frontends must get the same ones.
        serve.serve("demo", grpc_port=0, http_port=0, num_frontends=3, grace=3.0, stall_timeout=4.0)
    frontends = [dict(zip(child.arguments[1:], child.arguments[2:])) for child in started if child.role == "frontend"]
    assert [child.name for child in started] == ["scheduler", "worker", "frontend-0", "frontend-1", "frontend-2"]
    for flag in ("--grpc-port", "--http-port"):
        (port,) = {arguments[flag] for arguments in frontends}
        assert int(port) > 0
    assert all("--reuse-port" in arguments for arguments in frontends)
    sockets = [arguments["--live-socket"] for arguments in frontends]
    assert len(set(sockets)) == 3
    files = [Path(arguments["--metrics-file"]) for arguments in frontends]
    assert len(set(files)) == 3
    assert len({file.parent for file in files}) == 1
    of_all = [child.live_socket for child in started]
    assert of_all[2:] == sockets
    assert len(set(of_all)) == 5


def test_a_port_is_held_for_those_who_share_it() -> None:
    with ports.hold_port("127.0.0.1", 0) as holder:
        port = holder.getsockname()[1]
        for other in (ports.check_port, ports.hold_port):  # another service that begins just now
            with pytest.raises(ConfigurationError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use"):
                other("127.0.0.1", port)
        with listen_tcp("127.0.0.1", port, reuse_port=True), listen_tcp("127.0.0.1", port, reuse_port=True) as second:
            with pytest.raises(CannotListen, match=str(port)):
                listen_tcp("127.0.0.1", port)
            with pytest.raises(ConfigurationError, match="Address already in use"):
                ports.hold_port("127.0.0.1", port)
            assert second.getsockname()[1] == port


def test_a_port_that_another_shares_with_nobody_of_ours_is_refused(free_port: int) -> None:
    """SO_REUSEPORT alone would let us in beside it."""
    with listen_tcp("127.0.0.1", free_port, reuse_port=True), pytest.raises(ConfigurationError, match="already in use"):
        ports.hold_port("127.0.0.1", free_port)


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
        ports.check_port("192.0.2.1", 50051)


def test_the_summary_calls_octavo_as_it_was_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bin" / "octavo"
    program.parent.mkdir()
    program.touch(mode=0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(program)])
    monkeypatch.setenv("PATH", "/nowhere")
    assert summary.program() == "bin/octavo"
    monkeypatch.setenv("PATH", str(program.parent))
    assert summary.program() == "octavo"
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "main.py")])
    assert summary.program() == "octavo"

"""compose.yaml and its overrides: what every container is held to, and that its commands are commands."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer.main

from octavo.cli.main import build

ROOT = Path(__file__).parents[2]
FILES = (ROOT / "compose.yaml", *sorted((ROOT / "deploy").glob("compose.*.yaml")))
ROLES = ("frontend", "scheduler", "worker", "worker-gpu")
NOT_OPTIONS = {"OCTAVO_MODEL"}
ALL_OVERRIDES = ("tcp", "keys", "tls")
ALL_PROFILES = ("cpu", "gpu", "monitoring")
PROJECTS = [
    pytest.param(profiles, overrides, id="-".join((*profiles, *overrides)))
    for profiles, overrides in (
        *(((name,), ()) for name in ("cpu", "gpu")),
        *((ALL_PROFILES, (name,)) for name in ALL_OVERRIDES),
        (ALL_PROFILES, ALL_OVERRIDES),
    )
]

Compose = Callable[..., dict[str, Any]]


def seconds(duration: str) -> float:
    """Return the seconds of a duration as Compose writes it."""
    units = {"h": 3600.0, "m": 60.0, "s": 1.0}
    return sum(float(number) * units[unit] for number, unit in re.findall(r"([\d.]+)([hms])", duration))


def ours(service: dict[str, Any]) -> bool:
    return "build" in service


def parse(monkeypatch: pytest.MonkeyPatch, words: list[str], environment: dict[str, str]) -> dict[str, Any]:
    """Return the options that a command line of `octavo` gives; whatever it does not have is an error."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    command: Any = typer.main.get_command(build(words[0]))
    while hasattr(command, "commands"):
        command, words = command.commands[words[0]], words[1:]
    context = command.make_context(words[0] if words else "", list(words))
    variables = {parameter.envvar for parameter in command.params}
    unknown = {name for name in environment if name.startswith("OCTAVO_")} - variables - NOT_OPTIONS
    assert not unknown
    return dict(context.params)


@pytest.mark.parametrize(("profiles", "overrides"), PROJECTS)
def test_each_container_has_its_bounds(compose: Compose, profiles: tuple[str, ...], overrides: tuple[str, ...]) -> None:
    for name, service in compose(profiles, overrides)["services"].items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["pids_limit"] > 0, name
        assert int(service["mem_limit"]) > 0, name
        assert {"max-size", "max-file"} <= set(service["logging"]["options"]), name
        assert not service.get("privileged"), name
        assert re.search(r":v?\d+\.\d+\.\d+$", service["image"]), name
        for port in service.get("ports", ()):
            assert port["host_ip"] == "127.0.0.1", name
        if ours(service):
            assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", service["user"]), name
            assert service["init"] is True, name
        for volume in service.get("volumes", ()):
            if volume["target"] == "/var/lib/octavo":
                assert volume.get("read_only", False) is not name.startswith("init"), name


@pytest.mark.parametrize(("profiles", "overrides"), PROJECTS)
def test_each_role_is_watched_and_restarted(
    compose: Compose, profiles: tuple[str, ...], overrides: tuple[str, ...]
) -> None:
    services = compose(profiles, overrides)["services"]
    for name in ROLES:
        if (service := services.get(name)) is None:
            continue
        assert service["restart"] == "unless-stopped"
        check = service["healthcheck"]
        assert seconds(check["start_period"]) >= 60
        assert seconds(check["timeout"]) <= seconds(check["interval"])
        # A peer that dies must not take others with it, nor keep them from starting.
        for other, how in service["depends_on"].items():
            wanted = "service_completed_successfully" if other.startswith("init") else "service_started"
            assert (how["condition"], how.get("restart", False)) == (wanted, False)
    # Frontends end first: their streams need the others.
    assert {"scheduler"} | {name for name in ("worker", "worker-gpu") if name in services} <= set(
        services["frontend"]["depends_on"]
    )


def test_the_frontend_gets_more_time_than_its_streams(compose: Compose) -> None:
    frontend = compose()["services"]["frontend"]
    assert seconds(frontend["stop_grace_period"]) >= float(frontend["environment"]["OCTAVO_GRACE"]) + 15


@pytest.mark.parametrize(("profiles", "overrides"), PROJECTS)
def test_commands_and_variables_are_those_of_the_command_line(
    compose: Compose, profiles: tuple[str, ...], overrides: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, service in compose(profiles, overrides)["services"].items():
        if not ours(service):
            continue
        given = parse(monkeypatch, service["command"], service.get("environment", {}))
        if name in ROLES:
            # The health check asks where the process answers.
            kind, program, *words = service["healthcheck"]["test"]
            assert (kind, program) == ("CMD", "octavo")
            asked = parse(monkeypatch, words, {})
            assert (asked["live_socket"], asked["ready"]) == (given["live_socket"], True)
            assert asked["timeout_s"] < seconds(service["healthcheck"]["timeout"])


@pytest.mark.parametrize("overrides", [(), ("tcp",)])
def test_the_processes_meet_at_one_address(compose: Compose, overrides: tuple[str, ...]) -> None:
    services = compose(("cpu", "gpu"), overrides)["services"]
    address = {name: services[name]["environment"]["OCTAVO_SCHEDULER_ADDRESS"] for name in ROLES}
    if not overrides:
        assert set(address.values()) == {"ipc:///run/octavo/scheduler"}
        assert [name for name in ROLES if services[name].get("network_mode") != "none"] == ["frontend"]
        return
    assert address.pop("scheduler") == "tcp://0.0.0.0:5555"
    assert set(address.values()) == {"tcp://scheduler:5555"}
    networks = {name: set(services[name]["networks"]) for name in ROLES}
    assert networks["worker"] == networks["worker-gpu"]
    assert not networks["frontend"] & networks["worker"]
    assert all(networks[name] & networks["scheduler"] for name in ROLES)


def test_each_process_holds_its_own_secret_key_alone(compose: Compose) -> None:
    services = compose(("cpu", "gpu"), ("tcp",))["services"]
    files = {name: {secret["target"] for secret in services[name]["secrets"]} for name in ROLES}
    assert files == {
        "frontend": {"scheduler.key", "frontend.key_secret"},
        "scheduler": {"scheduler.key_secret", "frontend.key", "worker.key"},
        "worker": {"scheduler.key", "worker.key_secret"},
        "worker-gpu": {"scheduler.key", "worker.key_secret"},
    }


def test_no_secret_is_a_variable() -> None:
    for path in (*FILES, ROOT / ".env"):
        assert not re.search(r"(API_KEY|PASSWORD|TOKEN|SECRET_KEY)\b *[:=] *\S", path.read_text()), path


def test_a_gpu_is_reserved(compose: Compose) -> None:
    services = compose(("cpu", "gpu"))["services"]
    (device,) = services["worker-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["count"], device["capabilities"]) == ("nvidia", 1, ["gpu"])
    assert "deploy" not in services["worker"]


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_a_profile_needs_no_image_of_the_other(compose: Compose, profile: str) -> None:
    targets = {service["build"]["target"] for service in compose((profile,))["services"].values()}
    assert targets == {"frontend", f"worker-{profile}"}


def test_plain_up_serves_on_the_cpu(compose: Compose) -> None:
    assert set(compose()["services"]) == {"init", "frontend", "scheduler", "worker"}


def test_defaults_are_those_of_the_env_file() -> None:
    lines = re.findall(r"^([A-Z_]+)=(.*)$", (ROOT / ".env").read_text(), re.MULTILINE)
    defaults = dict(lines)
    assert len(defaults) == len(lines)
    used = {(name, value) for path in FILES for name, value in re.findall(r"\$\{(\w+):-(.*?)\}", path.read_text())}
    # Told by whoever builds, or only of meaning with an override.
    apart = {"OCTAVO_REVISION", "OCTAVO_SCHEDULER_HOST", "OCTAVO_SCHEDULER_PORT", "OCTAVO_SCHEDULER_PUBLISH"}
    assert {(name, value) for name, value in used if name not in apart} == {
        (name, value) for name, value in defaults.items() if name != "COMPOSE_PROFILES"
    }
    for path in FILES:
        text = re.sub(r"(?m)#.*$", "", path.read_text())
        assert len(re.findall(r"\$\{", text)) == len(re.findall(r"\$\{\w+:-[^}]*\}", text)), path

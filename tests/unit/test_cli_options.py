"""Flags, OCTAVO_ variables and the configuration file, down to the configuration of each process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
from typer.testing import CliRunner

from octavo.cli import logs, options
from octavo.cli.main import build
from octavo.scheduler.policy import POLICIES

Run = Callable[..., Any]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "a-model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def configure(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that runs a role and returns the configuration that the process would start with."""
    monkeypatch.setenv("OCTAVO_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setattr(logs, "configure", lambda role, level: None)

    def run(role: str, *arguments: str, environment: dict[str, str] | None = None) -> Any:
        seen: list[Any] = []

        def start(config: Any) -> int:
            seen.append(config)
            return 0

        monkeypatch.setattr(f"octavo.{role}.main.run", start)
        result = CliRunner().invoke(build(role), [role, str(model), *arguments], env=environment)
        assert result.exit_code == 0, result.output
        return seen[0]

    return run


def refused(role: str, *arguments: str, environment: dict[str, str] | None = None) -> str:
    """Return what is said about options that are refused, on one line."""
    result = CliRunner().invoke(build(role), [role, *arguments], env={"COLUMNS": "400"} | (environment or {}))
    assert result.exit_code == 2
    return result.output


def test_flag_wins_over_environment_over_file_over_default(configure: Run, tmp_path: Path) -> None:
    file = tmp_path / "octavo.yaml"
    file.write_text("step-timeout: 7\nmax_waiting_requests: 9\nrecovery-timeout: 11\n")
    config = configure(
        "scheduler",
        *("--config", str(file), "--recovery-timeout", "30"),
        environment={"OCTAVO_MAX_WAITING_REQUESTS": "20", "OCTAVO_RECOVERY_TIMEOUT": "25"},
    )
    assert config.recovery_timeout_s == 30
    assert config.max_waiting_requests == 20
    assert config.step_timeout_s == 7
    assert config.long_prefill_token_threshold == 0


@pytest.mark.parametrize("written", ["served-model-name: one", "served-model-name: [one]"])
def test_a_single_name_in_a_file_is_a_list_of_one(configure: Run, tmp_path: Path, written: str) -> None:
    file = tmp_path / "octavo.yaml"
    file.write_text(written)
    assert configure("frontend", "--config", str(file)).served_model_names == ("one",)


def test_the_folder_names_the_model(configure: Run, model: Path) -> None:
    config = configure("frontend")
    assert config.served_model_names == ("a-model",)
    assert config.model_path == model


def test_roles_agree_on_the_address(configure: Run, tmp_path: Path) -> None:
    addresses = {configure(role).address for role in ("frontend", "scheduler", "worker")}
    assert addresses == {f"ipc://{tmp_path}/run/scheduler"}


def test_every_flag_of_the_worker_reaches_it(configure: Run) -> None:
    flags = {
        "--device": "cpu",
        "--backend": "reference",
        "--dtype": "bfloat16",
        "--load-format": "dummy",
        "--max-model-len": "100",
        "--max-num-seqs": "3",
        "--max-num-batched-tokens": "33",
        "--block-size": "8",
        "--num-gpu-blocks-override": "44",
        "--kv-cache-memory-bytes": "1000",
        "--num-threads": "1",
        "--seed": "5",
    }
    config = configure("worker", *(word for pair in flags.items() for word in pair))
    for flag, value in flags.items():
        assert str(getattr(config, flag.removeprefix("--").replace("-", "_"))) == value


def test_every_flag_of_the_queue_reaches_the_scheduler(configure: Run) -> None:
    flags = {
        "--scheduling-policy": "fair",
        "--max-waiting-requests": "11",
        "--max-waiting-tokens": "12",
        "--max-requests-per-caller": "13",
        "--max-waiting-tokens-per-caller": "14",
        "--max-preemptions": "0",
    }
    config = configure("scheduler", *(word for pair in flags.items() for word in pair))
    for flag, value in flags.items():
        assert str(getattr(config, flag.removeprefix("--").replace("-", "_"))) == value


def test_the_policies_are_those_of_the_scheduler() -> None:
    assert set(get_args(options.PolicyName)) == set(POLICIES)


def test_prefixes_are_cached_unless_told_otherwise(configure: Run, tmp_path: Path) -> None:
    file = tmp_path / "octavo.yaml"
    file.write_text("enable-prefix-caching: false")
    off = {"OCTAVO_ENABLE_PREFIX_CACHING": "false"}
    assert configure("scheduler").enable_prefix_caching is True
    assert configure("scheduler", "--no-enable-prefix-caching").enable_prefix_caching is False
    assert configure("scheduler", environment=off).enable_prefix_caching is False
    assert configure("scheduler", "--config", str(file)).enable_prefix_caching is False
    assert configure("scheduler", "--enable-prefix-caching", environment=off).enable_prefix_caching is True


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("step-timeout: 5\nbogus: 1", "names 'bogus', which scheduler does not have"),
        ("max-num-seqs: 5", "names 'max-num-seqs', which scheduler does not have"),
        ("config: other.yaml", "names 'config'"),
        ("exit-with-parent: 1", "names 'exit-with-parent'"),
        ("- a list", "holds no mapping"),
        ("a: [", "cannot be read"),
        ("step-timeout: soon", "--step-timeout"),
        ("step-timeout: -1", "must be above 0"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    file = tmp_path / "octavo.yaml"
    file.write_text(text)
    assert reason in refused("scheduler", "demo", "--config", str(file))


@pytest.mark.parametrize(
    ("role", "arguments", "reason"),
    [
        ("serve", ["--max-num-seqs", "0"], "greater than or equal to 1"),
        ("serve", ["--backend", "fast"], "'fast' is not one of 'auto', 'cpu', 'reference'"),
        ("serve", ["--log-level", "loud"], "'loud' is not one of"),
        ("serve", ["--scheduling-policy", "lifo"], "'lifo' is not one of 'fcfs', 'priority', 'fair'"),
        ("scheduler", ["--max-requests-per-caller", "-1"], "greater than or equal to 0"),
        ("serve", ["--grpc-port", "65536"], "less than or equal to 65535"),
        ("serve", ["--grace", "nan"], "must be above 0"),
        ("worker", ["--block-size", "x"], "valid integer"),
        ("frontend", ["--no-such-flag"], "--no-such-flag"),
    ],
)
def test_a_wrong_flag_is_refused(role: str, arguments: list[str], reason: str) -> None:
    assert reason in refused(role, "demo", *arguments)


def test_a_wrong_variable_is_refused_by_name() -> None:
    assert "OCTAVO_MAX_NUM_SEQS" in refused("worker", "demo", environment={"OCTAVO_MAX_NUM_SEQS": "many"})


def test_help_groups_the_flags_of_serve() -> None:
    result = CliRunner().invoke(build("serve"), ["serve", "--help"])
    assert result.exit_code == 0
    positions = [result.output.index(f"─ {panel} ─") for panel in ("Listening", "Model", "Scheduling", "Memory")]
    assert positions == sorted(positions)
    assert "exit-with-parent" not in result.output

"""Flags, OCTAVO_ variables and the configuration file, down to the configuration of each process."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import typer.main
from typer.testing import CliRunner

from octavo.cli import logs, options
from octavo.cli.main import build
from octavo.scheduler.policy import POLICIES
from octavo.wire.live import Progress

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
    monkeypatch.setattr(logs, "configure", lambda *_: None)

    def run(role: str, *arguments: str, environment: dict[str, str] | None = None) -> Any:
        seen: list[Any] = []

        def start(config: Any, progress: Progress | None = None) -> int:
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
        "--quantization": "fp8",
        "--model-impl": "transformers",
        "--load-format": "dummy",
        "--max-model-len": "100",
        "--max-num-seqs": "3",
        "--max-num-batched-tokens": "33",
        "--block-size": "8",
        "--num-gpu-blocks-override": "44",
        "--gpu-memory-utilization": "0.45",
        "--kv-cache-memory-bytes": "1000",
        "--kv-cache-dtype": "fp8",
        "--num-threads": "1",
        "--seed": "5",
    }
    config = configure("worker", *(word for pair in flags.items() for word in pair))
    for flag, value in flags.items():
        assert str(getattr(config, flag.removeprefix("--").replace("-", "_"))) == value


def test_switches_of_the_worker(configure: Run) -> None:
    config = configure("worker")
    assert (config.enforce_eager, config.batch_invariant) == (False, False)
    config = configure("worker", "--enforce-eager", environment={"OCTAVO_BATCH_INVARIANT": "true"})
    assert (config.enforce_eager, config.batch_invariant) == (True, True)


def test_what_the_device_decides_is_left_open(configure: Run) -> None:
    config = configure("worker")
    assert (config.max_num_seqs, config.max_num_batched_tokens, config.kv_cache_memory_bytes) == (None, None, None)
    assert (config.gpu_memory_utilization, config.kv_cache_dtype) == (0.9, "auto")


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
    assert get_args(options.PolicyName) == tuple(POLICIES)


WITH_A_POLICY_OF_ONES_OWN = """
from octavo.scheduler.policy import POLICIES, Policy

class Backwards(Policy):
    \"\"\"The latest request runs first; a bound there is not.\"\"\"

POLICIES["backwards"] = Backwards
import sys
from octavo.cli.main import main
sys.argv[1:] = ["scheduler", *{arguments}]
main()
"""


def test_a_policy_that_is_named_in_the_table_can_be_chosen() -> None:
    def run(*arguments: str) -> str:
        program = WITH_A_POLICY_OF_ONES_OWN.format(arguments=arguments)
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        return " ".join((done.stdout + done.stderr).split())

    assert "backwards: The latest request runs first. " in run("--help")
    assert "'lifo' is not one of 'fcfs', 'priority', 'fair', 'backwards'" in run("demo", "--scheduling-policy", "lifo")
    assert "no-such-model" in run("no-such-model", "--scheduling-policy", "backwards")


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
        ("no-enable-prefix-caching: true", "does not have; write 'enable-prefix-caching: false'"),
        ("no-max-preemptions: true", "names 'no-max-preemptions', which scheduler does not have\n"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    file = tmp_path / "octavo.yaml"
    file.write_text(text)
    said = refused("scheduler", "demo", "--config", str(file))
    assert reason in said
    assert said.count(str(file)) == 1


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("step-timeout", "soon", "'soon': Input should be a valid number"),
        ("step_timeout", "-1", "-1.0 must be above 0"),
        ("max-waiting-requests", "0", "0: Input should be greater than or equal to 1"),
        ("scheduling-policy", "lifo", "'lifo' is not one of 'fcfs'"),
        ("enable-prefix-caching", "maybe", "'maybe': Input should be a valid boolean"),
    ],
)
def test_a_wrong_value_in_a_file_is_refused_by_file_key_and_value(
    tmp_path: Path, key: str, value: str, reason: str
) -> None:
    file = tmp_path / "octavo.yaml"
    file.write_text(f"{key}: {value}")
    said = refused("scheduler", "demo", "--config", str(file))
    assert f"Invalid value for '{key}' in {file}: {reason}" in said
    assert "OCTAVO_" not in said
    assert "Value error" not in said


def test_a_file_that_is_not_there_is_named_once(tmp_path: Path) -> None:
    said = refused("scheduler", "demo", "--config", str(tmp_path / "none.yaml"))
    assert f"{tmp_path}/none.yaml cannot be read: No such file or directory" in said
    assert said.count("none.yaml") == 1


def test_a_wrong_value_is_that_of_its_source(tmp_path: Path) -> None:
    """A flag hides the variable and the file, a variable hides the file."""
    file = tmp_path / "octavo.yaml"
    file.write_text("step-timeout: soon")
    wrong = {"OCTAVO_STEP_TIMEOUT": "later"}
    of_variable = refused("scheduler", "demo", "--config", str(file), environment=wrong)
    assert "environment variable OCTAVO_STEP_TIMEOUT: 'later': Input" in of_variable
    assert str(file) not in of_variable
    of_flag = refused("scheduler", "demo", "--config", str(file), "--step-timeout", "-2", environment=wrong)
    assert "Invalid value for '--step-timeout': -2.0 must be above 0" in of_flag


@pytest.mark.parametrize(
    ("role", "arguments", "reason"),
    [
        ("serve", ["--max-num-seqs", "0"], "greater than or equal to 1"),
        ("serve", ["--backend", "fast"], "'fast' is not one of 'auto', 'cpu', 'reference', 'triton'"),
        ("serve", ["--gpu-memory-utilization", "0"], "0.0 must be above 0 and at most 1"),
        ("worker", ["--gpu-memory-utilization", "1.5"], "1.5 must be above 0 and at most 1"),
        ("worker", ["--gpu-memory-utilization", "nan"], "nan must be above 0 and at most 1"),
        ("worker", ["--kv-cache-dtype", "int4"], "'int4' is not one of 'auto', 'fp8'"),
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
    panels = ("Arguments", "Options", "Listening", "Model", "Scheduling", "Memory", "Process")
    positions = [result.output.index(f"\n{panel}:\n") for panel in panels]
    assert positions == sorted(positions)
    assert "exit-with-parent" not in result.output


@pytest.mark.parametrize(
    "command", ["serve", "frontend", "scheduler", "worker", "generate", "chat", "status", "doctor"]
)
def test_help_shows_every_flag_and_variable_whole_at_80_columns(command: str) -> None:
    result = CliRunner().invoke(build(command), [command, "--help"], env={"COLUMNS": "80"})
    group = typer.main.get_command(build(command))
    found = group.get_command(typer.Context(group), command)  # type: ignore[attr-defined]
    assert max(map(len, result.output.splitlines())) <= 80
    assert "…" not in result.output
    words = set(result.output.replace(";", " ").replace("]", " ").replace(",", " ").split())
    shown = [parameter for parameter in found.params if not getattr(parameter, "hidden", False)]
    names = {name for parameter in shown for name in (*parameter.opts, *parameter.secondary_opts) if name[0] == "-"}
    variables = {parameter.envvar for parameter in shown if parameter.envvar}
    assert names
    assert names | variables <= words

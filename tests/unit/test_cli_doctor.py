"""octavo doctor finds what is wrong and names the remedy."""

import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from octavo.cli import doctor
from octavo.cli.main import build
from tests.support import service


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, free_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which all is well."""
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("OCTAVO_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setattr("octavo.cli.doctor.shutil.which", lambda _: None)
    monkeypatch.setattr("octavo.cli.doctor.os.sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr("octavo.cli.doctor.psutil.virtual_memory", lambda: SimpleNamespace(available=8 * 2**30))
    monkeypatch.setattr("octavo.cli.doctor.shutil.disk_usage", lambda _: SimpleNamespace(free=9 * 2**30))
    monkeypatch.setattr("octavo.cli.doctor.resource.getrlimit", lambda _: (1024, 4096))
    monkeypatch.setenv("OCTAVO_GRPC_PORT", str(free_port))
    monkeypatch.setenv("OCTAVO_HTTP_PORT", str(service.free_port()))


def examine() -> tuple[int, dict[str, tuple[str, str]]]:
    """Return the exit code and, by subject, level and words."""
    result = CliRunner().invoke(build("doctor"), ["doctor"], env={"COLUMNS": "500"})
    findings = {}
    for line in result.output.splitlines():
        level, rest = line.split(maxsplit=1)
        subject, words = rest.split("  ", maxsplit=1)
        findings[subject] = (level, words.strip())
    return result.exit_code, findings


def test_all_is_well() -> None:
    code, findings = examine()
    assert code == 0
    assert {level for level, _ in findings.values()} == {"OK"}
    assert list(findings) == [
        "Python",
        "packages",
        "cores",
        "memory",
        "GPU",
        "models",
        "sockets",
        "gRPC port",
        "HTTP port",
        "open files",
    ]


@pytest.mark.parametrize("door", ["gRPC", "HTTP"])
def test_a_port_in_use_is_a_warning(free_port: int, door: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"OCTAVO_{door.upper()}_PORT", str(free_port))
    monkeypatch.setenv("OCTAVO_GRPC_PORT" if door == "HTTP" else "OCTAVO_HTTP_PORT", str(service.free_port()))
    with socket.create_server(("127.0.0.1", free_port)):
        code, findings = examine()
    assert code == 0
    assert findings[f"{door} port"][0] == "WARN"
    assert findings[f"{door} port"][1].endswith(f"Address already in use; choose another with --{door.lower()}-port")


def test_an_open_runtime_folder_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(0o755)
    code, findings = examine()
    assert code == 1
    assert findings["sockets"][0] == "FAIL"
    assert "chmod 700" in findings["sockets"][1]


@pytest.mark.parametrize(
    ("target", "value", "subject", "remedy"),
    [
        ("os.sched_getaffinity", {0}, "cores", "two or more"),
        ("psutil.virtual_memory", SimpleNamespace(available=2**30), "memory", "--kv-cache-memory-bytes"),
        ("shutil.disk_usage", SimpleNamespace(free=2**20), "models", "OCTAVO_HOME"),
        ("resource.getrlimit", (256, 256), "open files", "ulimit -n 1024"),
        ("shutil.which", "/nowhere/nvidia-smi", "GPU", "check the driver"),
    ],
)
def test_a_poor_machine_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, target: str, value: object, subject: str, remedy: str
) -> None:
    monkeypatch.setattr(f"octavo.cli.doctor.{target}", lambda *_: value)
    code, findings = examine()
    assert code == 0
    assert findings[subject][0] == "WARN"
    assert remedy in findings[subject][1]


@pytest.mark.parametrize(
    ("listed", "level", "words"),
    [
        ("Some GPU, 9.0, 143771 MiB, 143000 MiB", "OK", "Some GPU, 9.0, 143771 MiB, 143000 MiB"),
        ("Some GPU, 7.5, 16000 MiB, 16000 MiB", "WARN", "use --backend reference, since backend triton needs compute"),
        ("Some GPU, 9.0, 1000 MiB, 500 MiB", "WARN", "use --gpu-memory-utilization 0.45, since others use the memory"),
        ("Some GPU, [N/A], [N/A], [N/A]", "OK", "Some GPU, [N/A]"),
        ("an answer of another kind", "OK", "an answer of another kind"),
        ("", "OK", "none; the CPU will be used"),
    ],
)
def test_what_the_driver_says_of_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: str, level: str, words: str
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\necho '{listed}'\n")
    tool.chmod(0o755)
    monkeypatch.setattr("octavo.cli.doctor.shutil.which", lambda _: str(tool))
    code, findings = examine()
    assert code == 0
    assert findings["GPU"][0] == level
    assert words in findings["GPU"][1]


def test_triton_that_is_absent_matters_where_there_is_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'Some GPU, 9.0, 1000 MiB, 1000 MiB'\n")
    tool.chmod(0o755)
    monkeypatch.setattr("octavo.cli.doctor.shutil.which", lambda _: str(tool))
    monkeypatch.setattr("octavo.cli.doctor.importlib.util.find_spec", lambda name: None)
    assert "use --backend reference, since triton is absent" in examine()[1]["GPU"][1]


def test_an_absent_package_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_PACKAGES", ("grpcio", "no-such-package-of-ours"))
    code, findings = examine()
    assert code == 1
    assert findings["packages"] == (
        "FAIL",
        "no-such-package-of-ours absent: run 'make install', or pip install octavo",
    )

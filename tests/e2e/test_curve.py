"""The processes of a service over tcp: with keys they find each other, without the right one nobody comes in."""

from collections.abc import Callable
from pathlib import Path

from tests.support.service import END_TIMEOUT_S, Service, free_port, request


def test_processes_meet_over_tcp_and_a_stranger_does_not_come_in(
    make_service: Callable[[], Service], demo_model: Path, tmp_path: Path
) -> None:
    service = make_service()
    for name in ("keys", "other"):
        assert service.run("keys", str(tmp_path / name)).returncode == 0
    address, port = f"tcp://127.0.0.1:{free_port()}", service.address.rpartition(":")[2]
    common = (str(demo_model), "--scheduler-address", address, "--curve-keys")
    known, unknown = (*common, str(tmp_path / "keys")), (*common, str(tmp_path / "other"))
    (tmp_path / "other" / "scheduler.key").write_bytes((tmp_path / "keys" / "scheduler.key").read_bytes())

    service.start("scheduler", *known)
    service.start("worker", *known, "--load-format", "dummy")
    service.start("frontend", *known, "--grpc-port", port, "--http-port", "0")
    service.wait_until_ready()
    epochs = {process.role: process.epoch for process in service.status().processes}
    stranger = service.start("frontend", *unknown, "--grpc-port", "0", "--http-port", "0").processes.pop()
    assert stranger.wait(END_TIMEOUT_S) == 2
    assert "its CURVE key is not known there" in service.output
    assert list(service.generation.GenerateStream(request([1], max_tokens=4), timeout=60))
    assert {process.role: process.epoch for process in service.status().processes} == epochs

    for refused in (common[:-1], (*common[:-1], "--curve-keys", str(tmp_path))):
        without = service.start("worker", *refused, "--load-format", "dummy").processes.pop()
        assert without.wait(END_TIMEOUT_S) == 2
    assert "tcp needs CURVE keys" in service.output
    assert "worker.key_secret is missing" in service.output
    assert "Traceback" not in service.output
    assert service.stop() == [0, 0, 0]
    secrets = [line for path in tmp_path.glob("*/*.key_secret") for line in path.read_text().split('"')[1::2]]
    assert len(secrets) == 12
    assert not [secret for secret in secrets if secret in service.output]

"""A service with keys and mutual TLS: it comes up by itself, and keys stay where they belong."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from octavo.v1 import generation_pb2_grpc as rpc
from tests.support.certificates import Authority, make_authority
from tests.support.service import Service, request

CLIENT, OTHER, ADMIN = "key-of-a-client-1", "key-of-a-client-2", "key-of-an-operator"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return make_authority(tmp_path, "authority")


def wait_until_announced(service: Service, log: Path) -> None:
    """Wait until `octavo serve` has seen its own service serve."""
    command = ["tail", "-n", "+1", "-f", f"--pid={service.process.pid}", str(log)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as tail:
        assert tail.stdout is not None
        seen = any("Octavo is ready" in line for line in tail.stdout)
        tail.terminate()
    assert seen, service.output


def test_keys_and_mutual_tls_of_a_whole_service(
    make_service: Callable[[], Service], demo_model: Path, authority: Authority, tmp_path: Path
) -> None:
    certificate, key = authority.issue("server")
    client_certificate, client_key = authority.issue("client")
    file = tmp_path / "keys"
    file.touch(0o600)
    file.write_text(f"{OTHER}\n")
    service = make_service()
    service.environment |= {"OCTAVO_API_KEY": CLIENT, "OCTAVO_ADMIN_API_KEY": ADMIN}
    tls = ("--ssl-certfile", certificate, "--ssl-keyfile", key, "--ssl-ca-certs", authority.certificate)
    service.serve(str(demo_model), "--load-format", "dummy", "--api-key-file", str(file), *map(str, tls))
    wait_until_announced(service, tmp_path / f"service-{service.address.rpartition(':')[2]}.log")

    roots = authority.certificate.read_bytes()
    credentials = grpc.ssl_channel_credentials(roots, client_key.read_bytes(), client_certificate.read_bytes())
    with grpc.secure_channel(service.address, credentials) as channel:
        stub = rpc.GenerationServiceStub(channel)
        for right in (CLIENT, OTHER, ADMIN):
            metadata = (("authorization", f"Bearer {right}"),)
            assert list(stub.GenerateStream(request([1], max_tokens=2), timeout=60, metadata=metadata))
        with pytest.raises(grpc.RpcError) as refused:
            list(stub.GenerateStream(request([1], max_tokens=2), timeout=60))
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED

    flags = ("--tls-ca", authority.certificate, "--tls-cert", client_certificate, "--tls-key", client_key)
    assert "UNAUTHENTICATED" in service.run("status", *map(str, flags)).stderr
    answer = service.run("generate", "x", "--max-tokens", "2", *map(str, flags))
    assert answer.returncode == 0, answer.stderr
    status = service.run("status", "--api-key", ADMIN, *map(str, flags))
    assert status.returncode == 0, status.stderr

    family = service.family()
    assert len(family) == 4
    for process in family:
        assert not [secret for secret in (CLIENT, OTHER, ADMIN) if secret in " ".join(process.cmdline())]
        holds_keys = process.pid == service.process.pid or "frontend" in process.cmdline()
        assert ("OCTAVO_API_KEY" in process.environ()) == holds_keys
        assert ("OCTAVO_ADMIN_API_KEY" in process.environ()) == holds_keys
    assert service.stop() == [0]
    assert not [secret for secret in (CLIENT, OTHER, ADMIN) if secret in service.output]

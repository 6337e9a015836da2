"""What a frontend answers for itself alone: at a Unix socket for its supervisor, at a port for other keepers."""

import socket
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2
import pytest

from octavo.frontend.auth import Authenticator
from octavo.frontend.listeners import CannotListen
from octavo.frontend.tls import TlsFiles
from tests.support.certificates import make_authority
from tests.support.frontend_client import WAIT_S, Service, running_frontend
from tests.support.scripted_scheduler import ScriptedScheduler


def file_at(path: str) -> Path:
    return Path(path)


@pytest.fixture
def path(address: str) -> str:
    return address.removeprefix("ipc://") + "-live"


@asynccontextmanager
async def asked_at(path: str) -> AsyncIterator[httpx2.AsyncClient]:
    transport = httpx2.AsyncHTTPTransport(uds=path)
    async with httpx2.AsyncClient(transport=transport, base_url="http://frontend", timeout=WAIT_S) as client:
        yield client


async def test_a_frontend_says_of_itself_that_it_lives_and_is_ready(
    tiny_model: Path, scheduler: ScriptedScheduler, address: str, path: str
) -> None:
    auth = Authenticator(["a-key-of-this-service"])
    async with running_frontend(tiny_model, address, private_socket=path, health_port=0, auth=auth) as service:
        await scheduler.session_begun()
        await service.until_health(serving=True)
        assert stat.S_IMODE(file_at(path).stat().st_mode) == 0o600
        base = f"http://127.0.0.1:{service.frontend.health_port}"
        async with asked_at(path) as at_socket, httpx2.AsyncClient(base_url=base, timeout=WAIT_S) as at_port:
            for client in (at_socket, at_port):
                assert (await client.get("/health")).status_code == 200
                assert (await client.get("/ready")).status_code == 200
                assert (await client.get("/v1/models")).status_code == 404
            await service.frontend.begin_drain()
            for client in (at_socket, at_port):
                assert (await client.get("/health")).status_code == 200
                assert (await client.get("/ready")).status_code == 503
    assert not file_at(path).exists()


async def test_it_speaks_no_tls_where_the_service_does(
    tiny_model: Path, address: str, path: str, tmp_path: Path
) -> None:
    """A supervisor has no certificate of its own, and the service's may be for another name."""
    tls = TlsFiles(*make_authority(tmp_path, "authority").issue("server"))
    async with (
        running_frontend(tiny_model, address, private_socket=path, http_port=0, tls=tls),
        asked_at(path) as client,
    ):
        assert (await client.get("/health")).status_code == 200


async def test_what_an_earlier_life_left_is_replaced(tiny_model: Path, address: str, path: str) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(path)
    async with running_frontend(tiny_model, address, private_socket=path), asked_at(path) as client:
        assert (await client.get("/health")).status_code == 200


async def test_what_is_no_socket_stays(tiny_model: Path, address: str, path: str) -> None:
    file_at(path).write_text("mine")
    with pytest.raises(CannotListen, match=f"cannot listen at {path}: Address already in use"):
        async with running_frontend(tiny_model, address, private_socket=path):
            pass
    assert file_at(path).read_text() == "mine"


async def test_a_private_port_that_is_taken(tiny_model: Path, address: str, service: Service) -> None:
    with pytest.raises(CannotListen, match=str(service.frontend.port)):
        async with running_frontend(tiny_model, address, health_port=service.frontend.port):
            pass

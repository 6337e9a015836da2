"""Keys and TLS at the gRPC door, through real sockets."""

import pkgutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

import octavo.v1
from octavo.frontend import main, server
from octavo.frontend.auth import Authenticator
from octavo.frontend.config import FrontendConfig
from octavo.frontend.server import Frontend
from octavo.frontend.tls import TlsFiles
from octavo.frontend.tokenizer import ModelFilesError
from octavo.v1 import admin_pb2
from octavo.wire.prefix import root_key
from octavo.wire.requests import CancelRequest
from tests.support.certificates import Authority, make_authority
from tests.support.frontend_client import EOF, WAIT_S, Service, read, refusal, running_frontend
from tests.support.scripted_scheduler import FACTS, ScriptedScheduler

ALICE, BOB, ADMIN = "key-of-alice-0123", "key-of-bob-4567890", "key-of-an-operator"
WRONG = "key-of-nobody-0123"
AUTH = Authenticator.from_sources([ALICE, BOB])
HEALTH = "grpc.health.v1.Health"


def methods() -> list[str]:
    """Return the full names of all methods of all services of the contract, and one that does not exist."""
    modules = [import_module(f"octavo.v1.{found.name}") for found in pkgutil.iter_modules(octavo.v1.__path__)]
    services = [
        service
        for module in modules
        if hasattr(module, "DESCRIPTOR")
        for service in module.DESCRIPTOR.services_by_name.values()
    ]
    return sorted(
        {f"/{service.full_name}/{method.name}" for service in services for method in service.methods}
        | {f"/{reflection.SERVICE_NAME}/ServerReflectionInfo", "/octavo.v1.GenerationService/Absent"}
    )


def bearer(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),)


def call(channel: grpc.aio.Channel, method: str, metadata: Any = None) -> Any:
    """Begin a call with an empty message; on the wire one kind of method looks like the others."""
    anything: Any = channel
    return anything.unary_stream(method)(b"", metadata=metadata, timeout=WAIT_S)


async def is_refused(begun: Any) -> bool:
    """Whether a call is UNAUTHENTICATED rather than anything else."""
    try:
        await read(begun)
    except grpc.aio.AioRpcError as error:
        return error.code() is grpc.StatusCode.UNAUTHENTICATED
    finally:
        begun.cancel()
    return False


@asynccontextmanager
async def serving(model: Path, scheduler: ScriptedScheduler, address: str, **settings: Any) -> AsyncIterator[Service]:
    async with running_frontend(model, address, **{"auth": AUTH} | settings) as running:
        await scheduler.session_begun()
        await running.until_health(serving=True)
        yield running


@pytest.fixture
async def service(tiny_model: Path, scheduler: ScriptedScheduler, address: str) -> AsyncIterator[Service]:
    async with serving(tiny_model, scheduler, address) as running:
        yield running


def test_methods_are_found() -> None:
    assert "/octavo.v1.GenerationService/GenerateStream" in methods()
    assert "/octavo.v1.AdminService/GetStatus" in methods()


WITHOUT_A_KEY = {
    "none": (),
    "wrong": bearer(WRONG),
    "cut": bearer(ALICE[:-1]),
    "basic": (("authorization", f"Basic {ALICE}"),),
    "bare": (("authorization", ALICE),),
    "empty": (("authorization", ""),),
    "twice": bearer(ALICE) + bearer(ALICE),
    "elsewhere": (("x-api-key", ALICE), ("x-request-id", ALICE)),
}


@pytest.mark.parametrize("metadata", WITHOUT_A_KEY.values(), ids=WITHOUT_A_KEY.keys())
async def test_no_method_answers_without_a_right_key(
    service: Service, scheduler: ScriptedScheduler, metadata: tuple[tuple[str, str], ...]
) -> None:
    for method in methods():
        refused = await refusal(call(service.channel, method, metadata))
        assert (refused.code, refused.reason) == (grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED"), method
        assert set(refused.details) == {"ErrorInfo"}
        assert ALICE[:-1] not in refused.message
        assert WRONG not in refused.message
    assert scheduler.nothing_came()


@pytest.mark.parametrize("method", methods())
async def test_every_method_answers_to_a_right_key(service: Service, method: str) -> None:
    assert not await is_refused(call(service.channel, method, bearer(BOB)))


async def test_both_ways_of_generating_need_a_key(service: Service, scheduler: ScriptedScheduler) -> None:
    for begun in (service.ask(text="x", metadata=bearer(WRONG)), service.stream(text="x", metadata=bearer(WRONG))):
        assert (await refusal(begun)).code is grpc.StatusCode.UNAUTHENTICATED
    assert scheduler.nothing_came()
    begun = service.ask(text="x", metadata=bearer(ALICE))
    scheduler.start_request(await scheduler.next_submit())
    begun.cancel()


async def test_a_refusal_echoes_the_request_id(service: Service) -> None:
    begun = service.ask(text="x", metadata=(("x-request-id", "mine"),))
    assert ("x-request-id", "mine") in tuple(await begun.initial_metadata())
    assert (await refusal(begun)).code is grpc.StatusCode.UNAUTHENTICATED


async def test_health_needs_no_key(service: Service) -> None:
    answer = await service.health.Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_key_of_the_administration_is_asked_for(
    tiny_model: Path, scheduler: ScriptedScheduler, address: str
) -> None:
    auth = Authenticator.from_sources([ALICE], None, [ADMIN])
    async with serving(tiny_model, scheduler, address, auth=auth) as service:
        for method in methods():
            is_admin = method.startswith("/octavo.v1.AdminService/")
            assert await is_refused(call(service.channel, method, bearer(ALICE))) == is_admin, method
            assert await is_refused(call(service.channel, method)), method
        request = admin_pb2.GetStatusRequest()
        answer = await service.admin.GetStatus(request, metadata=bearer(ADMIN), timeout=WAIT_S)
        assert list(answer.models) == ["tiny", "alias"]


async def identities(service: Service, scheduler: ScriptedScheduler, *keys: str) -> tuple[list[str], list[bytes]]:
    """Return callers and roots of the prefix cache of one request with each key."""
    callers, roots = [], []
    for key in keys:
        begun = service.ask(text="x", metadata=bearer(key) if key else None)
        submit = await scheduler.next_submit()
        callers.append(submit.caller)
        roots.append(submit.prefix_root)
        begun.cancel()
        await scheduler.next(CancelRequest)
    return callers, roots


@pytest.fixture
async def caching(address: str) -> AsyncIterator[ScriptedScheduler]:
    with ScriptedScheduler(address, msgspec.structs.replace(FACTS, prefix_caching=True)) as running:
        yield running


async def test_callers_are_told_apart_by_their_keys(tiny_model: Path, caching: ScriptedScheduler, address: str) -> None:
    async with serving(tiny_model, caching, address) as service:
        callers, roots = await identities(service, caching, ALICE, BOB, ALICE)
    assert callers == [AUTH.check(f"Bearer {key}") for key in (ALICE, BOB, ALICE)]
    assert callers[0] != callers[1]
    assert roots[0] == roots[2] != roots[1]
    assert b"" not in roots


async def test_a_cache_can_be_shared_by_all_keys(tiny_model: Path, caching: ScriptedScheduler, address: str) -> None:
    async with serving(tiny_model, caching, address, share_prefix_cache=True) as service:
        callers, roots = await identities(service, caching, ALICE, BOB)
        assert callers[0] != callers[1]
        assert roots[0] == roots[1] != b""


async def test_without_keys_all_is_as_it_was(tiny_model: Path, caching: ScriptedScheduler, address: str) -> None:
    async with serving(tiny_model, caching, address, auth=Authenticator()) as service:
        callers, roots = await identities(service, caching, "", WRONG)
        assert callers == ["ipv4:127.0.0.1"] * 2
        assert roots == [root_key(caching.hellos[0].config_digest)] * 2


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return make_authority(tmp_path_factory.mktemp("certificates"), "authority")


@pytest.fixture(scope="module")
def server_files(authority: Authority) -> TlsFiles:
    return TlsFiles(*authority.issue("server"))


@asynccontextmanager
async def listening(model: Path, address: str, **settings: Any) -> AsyncIterator[Frontend]:
    frontend = Frontend(FrontendConfig(model, ("tiny",), address, grpc_port=0, **settings))
    await frontend.start()
    try:
        yield frontend
    finally:
        await frontend.stop()


async def health_code(channel: grpc.aio.Channel) -> grpc.StatusCode:
    """Return the status of a call that needs no key."""
    async with channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        begun = stub.Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
        code: grpc.StatusCode = await begun.code()
        return code


def secure(frontend: Frontend, roots: Path | None, pair: tuple[Path, Path] | None = None) -> grpc.aio.Channel:
    certificate, key = (path.read_bytes() for path in pair) if pair is not None else (None, None)
    credentials = grpc.ssl_channel_credentials(roots.read_bytes() if roots else None, key, certificate)
    return grpc.aio.secure_channel(f"127.0.0.1:{frontend.port}", credentials)


async def test_tls_is_spoken_with_those_who_trust_the_certificate(
    tiny_model: Path, address: str, authority: Authority, server_files: TlsFiles
) -> None:
    async with listening(tiny_model, address, tls=server_files, auth=AUTH) as frontend:
        assert await health_code(secure(frontend, authority.certificate)) is grpc.StatusCode.OK
        assert await health_code(secure(frontend, None)) is grpc.StatusCode.UNAVAILABLE
        plain = grpc.aio.insecure_channel(f"127.0.0.1:{frontend.port}")
        assert await health_code(plain) is grpc.StatusCode.UNAVAILABLE
        async with secure(frontend, authority.certificate) as channel:
            for method in methods():
                assert await is_refused(call(channel, method)), method


async def test_mutual_tls_lets_in_certificates_of_the_authority_alone(
    tiny_model: Path, address: str, authority: Authority, server_files: TlsFiles, tmp_path: Path
) -> None:
    files = TlsFiles(server_files.certfile, server_files.keyfile, authority.certificate)
    stranger = make_authority(tmp_path, "stranger").issue("client")
    async with listening(tiny_model, address, tls=files) as frontend:
        roots = authority.certificate
        assert await health_code(secure(frontend, roots, authority.issue("client"))) is grpc.StatusCode.OK
        assert await health_code(secure(frontend, roots)) is grpc.StatusCode.UNAVAILABLE
        assert await health_code(secure(frontend, roots, stranger)) is grpc.StatusCode.UNAVAILABLE


async def test_the_socket_of_the_supervisor_needs_keys_but_no_certificate(
    tiny_model: Path, address: str, authority: Authority, server_files: TlsFiles
) -> None:
    files = TlsFiles(server_files.certfile, server_files.keyfile, authority.certificate)
    path = address.removeprefix("ipc://").removesuffix("s") + "f"
    async with listening(tiny_model, address, tls=files, auth=AUTH, local_socket=path):
        assert await health_code(grpc.aio.insecure_channel(f"unix:{path}")) is grpc.StatusCode.OK
        async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
            begun = call(channel, "/octavo.v1.AdminService/GetStatus", bearer(ALICE))
            assert b"tiny" in await read(begun)
            assert await read(begun) is EOF
            assert await is_refused(call(channel, "/octavo.v1.AdminService/GetStatus"))


def test_a_certificate_that_vanished_ends_the_frontend(
    tiny_model: Path, address: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(main, "SWITCH_INTERVAL_S", sys.getswitchinterval())
    files = TlsFiles(tmp_path / "absent.pem", tmp_path / "absent.key")
    assert main.run(FrontendConfig(tiny_model, ("tiny",), address, grpc_port=0, tls=files)) == main.EXIT_CONFIGURATION
    assert "absent.pem cannot be read: No such file" in caplog.text


def test_an_operator_is_told_of_a_service_that_anybody_may_call(
    tiny_model: Path, address: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "SWITCH_INTERVAL_S", sys.getswitchinterval())

    def refuse(*_: object) -> None:
        raise ModelFilesError("this is enough")

    monkeypatch.setattr(server, "load_model_files", refuse)
    config = FrontendConfig(tiny_model, ("tiny",), address, host="0.0.0.0", grpc_port=0)
    assert main.run(config) == main.EXIT_CONFIGURATION
    assert "everybody who reaches 0.0.0.0 may call" in caplog.text


async def test_a_large_request_without_a_key_is_refused_as_a_small_one(service: Service) -> None:
    for begun in (service.ask(text="x" * 8_000_000), service.stream(text="x" * 8_000_000)):
        assert (await refusal(begun)).code is grpc.StatusCode.UNAUTHENTICATED
    assert not await is_refused(call(service.channel, "/octavo.v1.AdminService/GetStatus", bearer(ALICE)))

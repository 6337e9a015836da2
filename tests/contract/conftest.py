"""A frontend over real sockets, between a real gRPC client and a scheduler that does what the test says."""

import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest

from tests.support.frontend_client import Service, running_frontend
from tests.support.http_client import Doors, running_doors
from tests.support.scripted_scheduler import ScriptedScheduler
from tests.support.tiny_tokenizers import write_model_folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def address() -> Iterator[str]:
    # pytest's own folders are too deep for the 107 bytes of a Unix socket's path.
    with tempfile.TemporaryDirectory(prefix="octavo-") as folder:
        yield f"ipc://{folder}/s"


@pytest.fixture
async def scheduler(address: str) -> AsyncIterator[ScriptedScheduler]:
    with ScriptedScheduler(address) as running:
        yield running


@pytest.fixture
async def service(tiny_model: Path, scheduler: ScriptedScheduler, address: str) -> AsyncIterator[Service]:
    async with running_frontend(tiny_model, address) as running:
        await scheduler.session_begun()
        await running.until_health(serving=True)
        yield running


@pytest.fixture
async def doors(tiny_model: Path, scheduler: ScriptedScheduler, address: str) -> AsyncIterator[Doors]:
    async with running_doors(tiny_model, address) as running:
        await scheduler.session_begun()
        await running.grpc.until_health(serving=True)
        yield running


@pytest.fixture
def invalid() -> grpc.StatusCode:
    return grpc.StatusCode.INVALID_ARGUMENT

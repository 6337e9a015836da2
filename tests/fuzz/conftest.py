"""A service that all examples of a module ask."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.answering import Running, answering_service
from tests.support.tiny_tokenizers import write_model_folder

MAX_GROWTH_BYTES = 400 * 2**20


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    """Run a service; in the end it must live, hold nothing, and have grown by little."""
    with tempfile.TemporaryDirectory(prefix="octavo-") as folder:
        model = write_model_folder(Path(folder) / "model")
        with answering_service(model, f"ipc://{folder}/s") as service:
            before = psutil.Process().memory_info().rss
            yield service
            doors = service.doors
            service.do(doors.until_idle())
            assert service.do(doors.http.get("/ready")).status_code == 200
            assert service.do(doors.http.post("/v1/completions", json={"prompt": "x"})).status_code == 200
            assert doors.grpc.frontend._calls.budget.used == 0
            assert psutil.Process().memory_info().rss - before < MAX_GROWTH_BYTES

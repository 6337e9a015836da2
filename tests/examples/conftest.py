"""A tiny service for the examples: random weights, bytes as tokens."""

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.service import Service, free_port
from tests.support.tiny_models import TINY_LLAMA, write_model
from tests.support.tiny_tokenizers import EOS_ID, write_model_folder


@dataclass(frozen=True)
class Served:
    """Where a service listens."""

    grpc: str
    http: str


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    """Return a ready service under the names and with the fields that the examples ask for."""
    folder = Path(tempfile.mkdtemp(prefix="octavo-test-"))
    config = TINY_LLAMA | {"vocab_size": 20_000, "eos_token_id": EOS_ID, "max_position_embeddings": 256}
    model = write_model_folder(folder / "demo")
    write_model(model, config)
    service, http_port = Service(free_port(), folder / "runtime", folder / "log"), free_port()
    service.serve(str(model), "--http-port", str(http_port), "--max-num-seqs", "64")
    try:
        service.wait_until_ready()
        yield Served(service.address, f"127.0.0.1:{http_port}")
    finally:
        codes = service.stop()
        shutil.rmtree(folder)
    assert codes == [0]

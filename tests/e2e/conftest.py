"""Services for the tests that run against real processes through real sockets."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.service import Service, free_port


@pytest.fixture(scope="session")
def short_folder() -> Iterator[Path]:
    """Return a folder for sockets: pytest's own temporary folders have names too long for them."""
    folder = Path(tempfile.mkdtemp(prefix="octavo-test-"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def make_service(short_folder: Path, tmp_path: Path) -> Iterator[Callable[[], Service]]:
    """Return a maker of services that are not started yet; they are ended after the test."""
    made: list[Service] = []

    def make() -> Service:
        port = free_port()
        runtime = short_folder / str(port)
        made.append(Service(port, runtime, tmp_path / f"service-{port}.log"))
        return made[-1]

    yield make
    for service in made:
        service.stop()


@pytest.fixture(scope="session")
def service(demo_model: Path, short_folder: Path) -> Iterator[Service]:
    """Return a ready `octavo serve` on the reference backend that many tests share; they leave it idle."""
    port = free_port()
    one = Service(port, short_folder / str(port), short_folder / "service.log")
    try:
        yield one.serve(str(demo_model), "--backend", "reference").wait_until_ready()
    finally:
        codes = one.stop()
    assert codes == [0]

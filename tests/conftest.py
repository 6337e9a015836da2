"""Fixtures that several kinds of tests share."""

from pathlib import Path

import pytest

import octavo.worker  # noqa: F401 - first of all: it sets how the threads of torch wait
from octavo.cli.model_store import DEMO, fetch
from tests.support import interpreter, service

interpreter.use_where_there_is_no_gpu()


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """Return the folder of the demo model; it is fetched into the store when absent, by one process at a time."""
    return fetch(DEMO)


@pytest.fixture
def free_port() -> int:
    """Return a TCP port of the loopback interface that nobody listened on a moment ago."""
    return service.free_port()

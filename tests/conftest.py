"""Fixtures that several kinds of tests share."""

import socket
from pathlib import Path

import pytest

from octavo.cli.model_store import DEMO, fetch


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """Return the folder of the demo model; it is fetched into the store when absent, by one process at a time."""
    return fetch(DEMO)


@pytest.fixture
def free_port() -> int:
    """Return a TCP port of the loopback interface that nobody listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port

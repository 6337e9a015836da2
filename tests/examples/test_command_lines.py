"""The curl and grpcurl lines of README.md, as they are typed, against a real service."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.examples.conftest import Served

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
NOT_RUN = ("WatchStatus", "Drain", "authorization")
"""What ends with Ctrl-C alone, ends the service, or needs one with keys."""


def lines_of(program: str) -> list[str]:
    found = re.findall(rf"^{program} (?:.*\\\n)*.*$", README, re.MULTILINE)
    return [line.replace("\\\n", " ") for line in found if not any(word in line for word in NOT_RUN)]


def call(line: str, served: Served) -> str:
    words = shlex.split(line.partition(" | ")[0], comments=True)
    program = shutil.which(words[0], path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if program is None:
        pytest.skip(f"{words[0]} is not installed")
    here = [word.replace("127.0.0.1:50051", served.grpc).replace("127.0.0.1:8000", served.http) for word in words[1:]]
    done = subprocess.run([program, *here], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def messages(output: str) -> list[Any]:
    """Return the JSON objects that stand one after the other."""
    decoder, found, at = json.JSONDecoder(), [], 0
    while output[at:].strip():
        at += len(output[at:]) - len(output[at:].lstrip())
        message, at = decoder.raw_decode(output, at)
        found.append(message)
    return found


@pytest.mark.parametrize("line", lines_of("grpcurl"))
def test_grpcurl(served: Served, line: str) -> None:
    output = call(line, served)
    if line.endswith(" list"):
        assert {f"octavo.v1.{name}Service" for name in ("Generation", "Model", "Tokenizer", "Admin")} <= set(
            output.split()
        )
        return
    answers = messages(output)
    assert answers
    if "GenerateStream" in line:
        assert "started" in answers[0]
        usage = answers[-1]["finished"]["usage"]
        assert usage.get("promptTokens", usage.get("prompt_tokens")) > 0  # older releases keep the proto's names


@pytest.mark.parametrize("line", lines_of("curl"))
def test_curl(served: Served, line: str) -> None:
    output = call(line, served)
    if '"stream": true' in line:
        assert output.rstrip().endswith("data: [DONE]")
    elif " | grep " in line:
        assert line.split()[-1] in output
    else:
        assert json.loads(output)


def test_there_are_lines_to_run() -> None:
    assert len(lines_of("grpcurl")) >= 5
    assert lines_of("curl")

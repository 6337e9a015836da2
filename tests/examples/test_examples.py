"""Each example, as its first lines say to run it, against a real service."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from octavo.wire.tracing import start_tracing
from tests.examples.conftest import Served

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
TIMEOUT_S = 120.0
QUESTION = "What is the capital of France?"


def run(*command: str, folder: Path = ROOT, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command,
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=TIMEOUT_S,
        check=False,
    )


def tool(name: str) -> str:
    """Return the path of a program, beside this Python or anywhere; skip the test where it is absent."""
    found = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def test_every_example_is_in_the_readme() -> None:
    readme = (EXAMPLES / "README.md").read_text()
    files = [
        path for folder in ("python", "node", "go", "k6") for path in (EXAMPLES / folder).iterdir() if path.is_file()
    ]
    sources = [path for path in files if path.suffix in (".py", ".mjs", ".go", ".js") and "pb" not in path.suffixes]
    assert len(sources) >= 5
    for path in sources:
        assert f"({path.relative_to(EXAMPLES)})" in readme


def test_python_grpc(served: Served) -> None:
    script = str(EXAMPLES / "python/grpc_stream.py")
    done = run(sys.executable, script, "--address", served.grpc, "--max-tokens", "20", QUESTION)
    assert done.returncode == 0, done.stderr
    assert re.search(r"\[an-example: \d+ tokens\]", done.stderr)
    assert re.search(r"\[FINISH_REASON_(LENGTH|STOP): \d+ tokens\]", done.stderr)
    assert done.stdout


def test_python_grpc_explains_a_refusal(served: Served) -> None:
    script = str(EXAMPLES / "python/grpc_stream.py")
    done = run(sys.executable, script, "--address", served.grpc, "--max-tokens", "100000", QUESTION)
    assert done.returncode == 1
    assert "INVALID_ARGUMENT" in done.stderr
    assert "input.stopping.max_tokens" in done.stderr


def test_python_grpc_takes_address_and_key_from_the_environment() -> None:
    """As the others do; the fake service keeps what it is sent, and ends the stream."""
    sent: dict[str, str | bytes] = {}

    def stream(_request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        sent.update(dict(context.invocation_metadata()))
        yield from ()

    method = grpc.unary_stream_rpc_method_handler(stream)
    service = grpc.method_handlers_generic_handler("octavo.v1.GenerationService", {"GenerateStream": method})
    server = grpc.server(ThreadPoolExecutor(1), handlers=[service])
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        script = str(EXAMPLES / "python/grpc_stream.py")
        done = run(sys.executable, script, QUESTION, OCTAVO_ADDRESS=address, OCTAVO_API_KEY="0123456789abcdef")
    finally:
        server.stop(None)
    assert done.returncode == 0, done.stderr
    assert sent["authorization"] == "Bearer 0123456789abcdef"


def test_python_openai(served: Served) -> None:
    script = str(EXAMPLES / "python/openai_client.py")
    done = run(sys.executable, script, "--base-url", f"http://{served.http}/v1", QUESTION)
    assert done.returncode == 0, done.stderr
    assert re.search(r"\[\d+ tokens in, \d+ out\]", done.stdout)
    assert len(re.findall(r"% \(others: ", done.stdout)) == 4


def test_node(served: Served) -> None:
    node = tool("node")
    if not (EXAMPLES / "node/node_modules").is_dir():
        pytest.skip("npm install has not been run in examples/node")
    done = run(node, "stream.mjs", QUESTION, served.grpc, folder=EXAMPLES / "node")
    assert done.returncode == 0, done.stderr
    assert re.search(r"\[FINISH_REASON_(LENGTH|STOP): \d+ tokens\]", done.stderr)
    refused = run(node, "stream.mjs", "", served.grpc, folder=EXAMPLES / "node", OCTAVO_API_KEY="unasked-for-key")
    assert refused.returncode == 0, refused.stderr


def test_k6(served: Served, tmp_path: Path) -> None:
    summary = tmp_path / "summary.json"
    flags = ("-e", f"ADDRESS={served.grpc}", "-e", "VUS=16", "-e", "DURATION=2s", "-e", "MAX_TOKENS=8")
    done = run(
        *(tool("k6"), "run", "--quiet", "--no-usage-report", "--summary-export", str(summary), *flags),
        str(EXAMPLES / "k6/streams.js"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    metrics = json.loads(summary.read_text())["metrics"]
    assert metrics["streams_finished"]["count"] >= 16
    assert metrics.get("streams_failed", {"count": 0})["count"] == 0


def test_go(served: Served, tmp_path: Path) -> None:
    go = tool("go")
    folder = tmp_path / "examples" / "go"
    shutil.copytree(EXAMPLES / "go", folder)
    shutil.copytree(ROOT / "protos", tmp_path / "protos")
    path = os.pathsep.join((str(Path(sys.executable).parent), str(Path(go).parent), os.environ["PATH"]))
    reachable = run(go, "mod", "download", folder=folder, PATH=path)
    if reachable.returncode != 0:
        pytest.skip(f"Go's modules cannot be fetched: {reachable.stderr.strip()[-200:]}")
    for words in (("generate",), ("mod", "tidy"), ("vet", ".")):
        done = run(go, *words, folder=folder, PATH=path)
        assert done.returncode == 0, done.stderr
    done = run(go, "run", ".", "-address", served.grpc, QUESTION, folder=folder, PATH=path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"\[FINISH_REASON_(LENGTH|STOP): \d+ tokens\]", done.stderr)


def test_python_print_spans() -> None:
    script = str(EXAMPLES / "python/print_spans.py")
    with subprocess.Popen([sys.executable, script, "0"], stdout=subprocess.PIPE, text=True) as collector:
        try:
            assert collector.stdout is not None
            tracing = start_tracing("worker", collector.stdout.readline().split()[-1], "a-life")
            assert tracing is not None
            parent = tracing.remote(f"00-{'a' * 32}-{'b' * 16}-01")
            tracing.record("octavo.worker.decode", parent, 1_000_000, 3_500_000, {}, [("octavo.end", 2_000_000, {})])
            tracing.close()
            line = collector.stdout.readline().split()
        finally:
            collector.terminate()
    assert line == ["a" * 32, "octavo-worker", "2.5", "ms", "octavo.worker.decode", "octavo.end"]

"""What the logs of a whole service say at debug level, and that text is never among it."""

import contextlib
import json
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc

from octavo.v1 import generation_pb2 as pb
from octavo.v1 import tokenizer_pb2, tokenizer_pb2_grpc
from tests.support.service import OCTAVO, Answer, Service, assert_gone, free_port, request

SECRET = "xylophonequartz"
REQUEST_ID = "a-request-of-this-test"


def post(port: int, path: str, body: object) -> str:
    """Return the answer, errors included."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json", "x-request-id": REQUEST_ID}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return str(response.read().decode())
    except urllib.error.HTTPError as error:
        return str(error.read().decode())


def call_all_doors(service: Service, port: int) -> str:
    """Bring the secret through every door, well and badly; return what came back."""
    said = []
    chat = [{"role": "user", "content": SECRET}]
    short = {"max_tokens": 12, "temperature": 0}
    for body in ({}, {"stream": True}, {"echo": True}, {"stop": [SECRET]}, {"regex": SECRET}, {SECRET: 1}, {"n": -1}):
        said.append(post(port, "/v1/completions", {"prompt": SECRET, **short, **body}))
    broken = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": SECRET}}}
    chats: list[dict[str, Any]] = [{}, {"stream": True}, {"response_format": broken}, {"user": SECRET}]
    for more in chats:
        said.append(post(port, "/v1/chat/completions", {"messages": chat, **short, **more}))
    said.append(post(port, "/v1/completions", b'{"prompt": "' + SECRET.encode()))
    said.append(post(port, f"/{SECRET}", {}))
    said.append(post(port, "/tokenize", {"prompt": SECRET}))
    stopping = pb.StoppingParams(max_tokens=8)
    form = pb.OutputConstraint(json_schema=f'{{"type": "{SECRET}"}}')
    inputs = [
        pb.GenerationInput(text=SECRET, stopping=stopping),
        pb.GenerationInput(
            chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content=SECRET)]), stopping=stopping
        ),
        pb.GenerationInput(text=SECRET, constraint=form, stopping=stopping),
        pb.GenerationInput(text=SECRET, model=SECRET),
    ]
    metadata = (("x-request-id", REQUEST_ID),)
    for one in inputs:
        with contextlib.suppress(grpc.RpcError):
            answer = service.generation.Generate(pb.GenerateRequest(input=one), timeout=60, metadata=metadata)
            said.append(answer.choices[0].text)
        with contextlib.suppress(grpc.RpcError):
            list(service.generation.GenerateStream(pb.GenerateStreamRequest(input=one), timeout=60, metadata=metadata))
    tokenizer = tokenizer_pb2_grpc.TokenizerServiceStub(service.channel)
    tokenizer.Tokenize(tokenizer_pb2.TokenizeRequest(text=SECRET), timeout=60)
    return "\n".join(said)


def test_no_line_of_any_process_holds_text(make_service: Callable[[], Service], demo_model: Path) -> None:
    service, port = make_service(), free_port()
    service.start(
        *("serve", str(demo_model), "--grpc-port", service.address.rpartition(":")[2], "--http-port", str(port)),
        *("--log-level", "debug", "--log-format", "json", "--access-log"),
    ).wait_until_ready()
    said = call_all_doors(service, port)
    assert SECRET in said
    answer = json.loads(post(port, "/v1/completions", {"prompt": "Once upon a time", "max_tokens": 24}))
    text = answer["choices"][0]["text"]
    service.stop()
    output = service.output
    assert SECRET not in output
    assert text[:24] not in output
    lines: list[dict[str, Any]] = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert {line["process"] for line in lines} == {"serve", "frontend", "scheduler", "worker"}
    assert all({"ts", "level", "process", "pid", "logger", "message"} <= line.keys() for line in lines)
    calls = [line for line in lines if line.get("request_id") == REQUEST_ID]
    ended = [line for line in calls if "door" in line]
    assert {(line["door"], line["status"]) for line in ended} >= {("http", "200"), ("http", "400"), ("grpc", "OK")}
    good = next(line for line in ended if line["method"] == "/v1/completions" and line["status"] == "200")
    assert (good["completion_tokens"], good["prompt_tokens"] > 0, good["ttft_s"] > 0) == (12, True, True)
    # From the caller's name for a request to the scheduler's, and with it to the worker's rows.
    names = {line["request"] for line in calls if line["process"] == "scheduler"}
    assert names & {line.get("request") for line in lines if line["process"] == "worker"}


def test_a_service_whose_log_cannot_be_written_serves(make_service: Callable[[], Service], demo_model: Path) -> None:
    """F57: it comes up, streams, and ends with code 0."""
    service = make_service()
    port = service.address.rpartition(":")[2]
    with Path("/dev/full").open("w") as full:
        words = (*OCTAVO, "serve", str(demo_model), "--backend", "cpu", "--grpc-port", port, "--http-port", "0")
        process = subprocess.Popen(words, stdout=full, stderr=full, env=service.environment, start_new_session=True)
    service.processes.append(process)
    service.wait_until_ready()
    answer = Answer()
    for event in service.generation.GenerateStream(request([1], max_tokens=40, ignore_eos=True), timeout=90):
        answer.add(event)
    assert len(answer.ids) == 40
    family = service.family()
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
    assert_gone(family)

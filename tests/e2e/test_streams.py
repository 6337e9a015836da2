"""Streams through frontend, scheduler and worker, over real sockets."""

import errno
import json
import os
import signal
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from octavo.v1 import generation_pb2 as pb
from tests.support.service import OCTAVO, Answer, Service, request

NUM_STREAMS = 16
TEXT = "The quick brown fox jumps over the lazy dog and runs into the forest where the old owl sleeps all day"


def read(service: Service, message: pb.GenerateStreamRequest, cancel_after: int | None = None) -> Answer:
    """Read a stream to its end, or cancel it once that many tokens have come."""
    answer = Answer()
    call = service.generation.GenerateStream(message, timeout=120)
    try:
        for event in call:
            answer.add(event)
            if cancel_after is not None and len(answer.ids) >= cancel_after:
                call.cancel()  # type: ignore[no-untyped-call]
    except grpc.RpcError as error:
        if error.code() is not grpc.StatusCode.CANCELLED or cancel_after is None:
            raise
    return answer


def mixed(number: int) -> pb.GenerateStreamRequest:
    """Return one of 16 requests that differ in the lengths of prompt and answer."""
    return request(TEXT[: 4 + 6 * number], max_tokens=length(number), ignore_eos=True)


def length(number: int) -> int:
    return 3 + number % 7


def test_a_chat_streams_sensible_text(service: Service) -> None:
    answer = read(service, request("What is the capital of France?", max_tokens=32))
    assert answer.text == "The capital of France is Paris."
    assert answer.started is not None
    assert answer.finished is not None
    assert answer.finished.finish_reason == pb.FINISH_REASON_STOP
    assert answer.finished.usage.completion_tokens == answer.finished.completion_tokens
    assert answer.finished.usage.prompt_tokens == answer.started.prompt_tokens


def test_unary_and_stream_agree(service: Service) -> None:
    message = request("Name three colours.", max_tokens=12)
    whole = service.generation.Generate(pb.GenerateRequest(input=message.input), timeout=60)
    answer = read(service, message)
    assert whole.choices[0].text == answer.text
    assert list(whole.choices[0].token_ids) == answer.ids


def test_concurrent_streams_equal_their_solo_runs(service: Service) -> None:
    """On the reference backend the ids do not depend on what else is in the batch."""
    requests = [mixed(number) for number in range(NUM_STREAMS)]
    alone = [read(service, message).ids for message in requests]
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        together = [answer.ids for answer in pool.map(lambda message: read(service, message), requests)]
    assert [len(ids) for ids in alone] == [length(number) for number in range(NUM_STREAMS)]
    assert together == alone


def test_cancelled_streams_give_everything_back(service: Service) -> None:
    def one(number: int) -> Answer:
        return read(service, mixed(number), cancel_after=2 if number % 3 == 0 else None)

    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        answers = list(pool.map(one, range(NUM_STREAMS)))
    for number, answer in enumerate(answers):
        if number % 3 == 0:
            assert len(answer.ids) >= 2
        else:
            assert answer.finished is not None
            assert answer.finished.finish_reason == pb.FINISH_REASON_LENGTH
            assert len(answer.ids) == answer.finished.completion_tokens == length(number)
    held = service.wait_until_idle()
    assert held.free_blocks == held.total_blocks


def test_a_refused_request_leaves_others_alone(service: Service) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        read(service, request([49152], max_tokens=1))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "49152" in str(caught.value.details())
    assert read(service, request([1], max_tokens=1, ignore_eos=True)).finished is not None


def test_generate_streams_in_the_terminal(service: Service) -> None:
    done = service.run("generate", "--temperature", "0", "--max-tokens", "8", "def fibonacci(n):")
    assert done.returncode == 0, done.stderr
    message = request("", max_tokens=8).input
    message.text = "def fibonacci(n):"
    assert done.stdout == service.generation.Generate(pb.GenerateRequest(input=message)).choices[0].text + "\n"


def test_generate_says_in_one_line_what_is_wrong(service: Service) -> None:
    done = service.run("generate", "--temperature", "-1", "x")
    assert done.returncode == 1
    assert done.stderr.startswith("octavo: INVALID_ARGUMENT: input.sampling.temperature")
    assert done.stderr.count("\n") == 1


def test_ctrl_c_ends_an_answer_early_and_in_good_order(service: Service) -> None:
    command = [
        *OCTAVO,
        "generate",
        "--address",
        service.address,
        "--max-tokens",
        "4000",
        "--temperature",
        "0",
        "One, two",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=service.environment) as client:
        assert client.stdout is not None
        begun = os.read(client.stdout.fileno(), 1)  # its first character: the answer is under way
        client.send_signal(signal.SIGINT)
        rest, errors = client.communicate(timeout=60)
    assert begun
    assert client.returncode == 130
    assert rest.endswith(b"\n")
    assert errors == b""
    held = service.wait_until_idle()
    assert held.free_blocks == held.total_blocks


@pytest.mark.parametrize(
    "garbage",
    [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", bytes(range(256)) * 64],
    ids=["http/1", "tls", "noise"],
)
def test_garbage_on_the_port_closes_its_connection_alone(service: Service, garbage: bytes) -> None:
    host, _, port = service.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(garbage)
        try:
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(65536):
                pass
        except OSError as error:  # closed with bytes unread, perhaps before it could be shut down
            if error.errno not in (errno.ECONNRESET, errno.ENOTCONN):
                raise
    assert read(service, request([1], max_tokens=1, ignore_eos=True)).finished is not None


def test_chat_keeps_the_conversation_until_reset(service: Service) -> None:
    lines = "My name is Zoe.\n/reset\nWhat is the capital of France?\n/exit\nnever asked\n"
    done = service.run("chat", "--temperature", "0", "--max-tokens", "16", stdin=lines)
    assert done.returncode == 0, done.stderr
    first, last = done.stdout.splitlines()[0], done.stdout.splitlines()[-1]
    assert first
    assert last == "The capital of France is Paris."


def test_chat_answers_one_message(service: Service) -> None:
    done = service.run("chat", "--temperature", "0", "What is the capital of France?")
    assert done.stdout == "The capital of France is Paris.\n", done.stderr


def test_status_as_json(service: Service) -> None:
    service.wait_until_idle()
    done = service.run("status", "--json")
    assert done.returncode == 0, done.stderr
    status = json.loads(done.stdout)
    assert status["ready"] is True
    assert {process["role"] for process in status["processes"]} == {"frontend", "scheduler", "worker"}
    assert status["scheduler"]["free_blocks"] == status["scheduler"]["total_blocks"] > 0
    assert status["scheduler"]["running_requests"] == 0


def test_status_for_people(service: Service) -> None:
    done = service.run("status")
    assert done.returncode == 0, done.stderr
    assert "SmolLM2-135M-Instruct: ready" in done.stdout
    assert "1455 of 1455 free" in done.stdout


def test_top_shows_and_tells(service: Service) -> None:
    shown = service.run("top", "--once", "--interval", "0.2")
    assert shown.returncode == 0, shown.stderr
    assert "running" in shown.stdout
    assert "scheduler" in shown.stdout
    (line,) = service.run("top", "--once", "--json", "--interval", "0.2").stdout.splitlines()
    look = json.loads(line)
    assert look["scheduler_up"] is True
    assert {process["role"] for process in look["processes"]} == {"frontend", "scheduler", "worker"}

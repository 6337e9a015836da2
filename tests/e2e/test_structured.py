"""Structured output while processes are killed: the text is what was asked for, whatever dies."""

import asyncio
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import grpc
import jsonschema
import pytest

from benchmarks.structured_output import MIN_STOPPED, SCHEMAS, ask_schemas, judge
from octavo.v1 import generation_pb2 as pb
from tests.support.service import Answer, Service, assert_gone

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 12, "maxLength": 16},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 3, "maxItems": 4},
        "age": {"type": "integer", "minimum": 100000, "maximum": 999999},
    },
    "required": ["name", "tags", "age"],
}
KILL_AFTER = 6


def request(seed: int) -> pb.GenerateStreamRequest:
    asked = pb.GenerationInput(text="Somebody:", sampling=pb.SamplingParams(seed=seed))
    asked.stopping.max_tokens = 120
    asked.constraint.json_schema = json.dumps(SCHEMA)
    asked.output.token_ids = True
    return pb.GenerateStreamRequest(input=asked)


def _slice_of_the_benchmark(running: Service, demo_model: Path) -> None:
    """Ask once by each schema of benchmarks/structured_output.py, which asks 500 times."""
    answers = asyncio.run(ask_schemas(running.address, len(SCHEMAS)))
    found = judge(answers, demo_model)
    assert found["wrong"] == []
    assert found["stopped"] >= MIN_STOPPED


def _a_dead_end_fails_alone(running: Service) -> None:
    """min_tokens forbids the end, which is all that the form leaves; another stream goes on meanwhile."""
    other = running.generation.GenerateStream(request(7), timeout=120)
    next(iter(other))
    dead = pb.GenerationInput(text="Yes or no?")
    dead.constraint.choice.values.append("no")
    dead.stopping.min_tokens, dead.stopping.max_tokens = 8, 16
    with pytest.raises(grpc.RpcError) as raised:
        running.generation.Generate(pb.GenerateRequest(input=dead), timeout=60)
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "left no id that could be drawn" in str(raised.value.details())
    text = "".join(event.delta.text for event in other)
    jsonschema.validate(json.loads(text), SCHEMA)


def test_a_structured_stream_outlives_processes(make_service: Callable[[], Service], demo_model: Path) -> None:
    running = make_service().serve(str(demo_model), "--backend", "cpu").wait_until_ready()
    for seed, role in enumerate(("worker", "scheduler")):
        old = running.pid_of(role)
        answer, text = Answer(), ""
        for event in running.generation.GenerateStream(request(seed), timeout=120):
            answer.add(event)
            text += event.delta.text
            new = len(event.delta.token_ids) if event.WhichOneof("event") == "delta" else 0
            if new and len(answer.ids) - new < KILL_AFTER <= len(answer.ids):
                os.kill(old, signal.SIGKILL)
        assert running.pid_of(role) != old
        assert answer.finished is not None
        assert answer.finished.finish_reason == pb.FINISH_REASON_STOP
        jsonschema.validate(json.loads(text), SCHEMA)
    _slice_of_the_benchmark(running, demo_model)
    _a_dead_end_fails_alone(running)
    held = running.wait_until_idle()
    assert held.free_blocks == held.total_blocks
    family = running.family()
    assert len(family) == 5  # the process that compiles grammars is the frontend's own
    running.process.send_signal(signal.SIGKILL)
    assert_gone(family)

"""Structured output of the demo model on a running service: does it hold, does it end, and what does it cost.

    octavo serve demo &
    python -m benchmarks.structured_output schemas [--requests 500] [--address 127.0.0.1:50051] [--model FOLDER]
    python -m benchmarks.structured_output tpot [--rounds 4] [--batch 32] [--tokens 64]

`schemas` asks for texts by SCHEMAS, which bound what they describe, in turn and with seeds of their own. Every text that
ended STOP must be valid, every one that ended LENGTH the beginning of one that is; at least 95% are to end STOP.
`tpot` times rounds of as many streams as the batch has, with and without a constraint in turn, so that a busy machine
makes both slower: the aim is a median that is at most 10% longer.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import grpc
import jsonschema

from octavo.cli.model_store import locate
from octavo.frontend.grammar_compiler import Compiler
from octavo.frontend.grammar_jobs import Job
from octavo.frontend.model import load_model_files
from octavo.v1 import generation_pb2 as pb
from octavo.v1 import generation_pb2_grpc as rpc
from octavo.wire.grammar import load_core, tokenizer_info, unpack
from octavo.wire.vocabulary import read_token_bytes

MAX_TOKENS = 256
MIN_STOPPED = 0.95
CONCURRENCY = 32
TIMEOUT_S = 1800


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _text(longest: int) -> dict[str, Any]:
    return {"type": "string", "maxLength": longest}


def _list(items: Any, fewest: int, most: int) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": fewest, "maxItems": most}


_COLOUR = {"enum": ["red", "green", "blue", "sky blue"]}
_POINT = _object(x={"type": "integer", "minimum": -9, "maximum": 9}, y={"type": "integer", "minimum": -9, "maximum": 9})

if TYPE_CHECKING:
    Answer: TypeAlias = tuple[str, pb.FinishReason.ValueType]  # text, and why it ended

SCHEMAS: tuple[tuple[str, Any], ...] = (
    ("a person", _object(name=_text(24), age={"type": "integer", "minimum": 0, "maximum": 120})),
    ("a colour", _COLOUR),
    ("an answer", _object(answer={"type": "boolean"}, reason=_text(60))),
    ("a point", _POINT),
    ("a path of points", _list(_POINT, 1, 4)),
    ("a date", _object(date={"type": "string", "format": "date"}, title=_text(20))),
    ("an id", _object(id={"type": "string", "format": "uuid"})),
    ("a licence plate", {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}[A-Z]?$"}),
    ("scores", _list({"type": "integer", "minimum": 0, "maximum": 100, "multipleOf": 5}, 2, 5)),
    ("a temperature", _object(celsius={"type": "number", "minimum": -50.0, "maximum": 50.0})),
    ("somebody perhaps", {"anyOf": [_object(name=_text(20)), {"type": "null"}]}),
    ("a shape", {"oneOf": [_object(kind={"const": "dot"}), _object(kind={"const": "ring"}, colour=_COLOUR)]}),
    (
        "an order",
        _object(items=_list(_object(what=_text(16), count={"enum": [1, 2, 3]}), 1, 3), paid={"type": "boolean"}),
    ),
    ("a nested thing", _object(a=_object(b=_object(c=_object(d=_text(10)))))),
    ("a pair", {"type": "array", "prefixItems": [_text(10), {"type": "boolean"}], "items": False, "minItems": 2}),
    ("a choice of types", {"type": ["integer", "null"], "minimum": 1, "maximum": 1000}),
    ("optional things", {"type": "object", "properties": {"a": _text(8), "b": _COLOUR, "c": {"type": "null"}}}),
    (
        "a tree",
        {
            "$defs": {"leaf": _object(value={"type": "integer", "minimum": 0, "maximum": 9})},
            **_object(left={"$ref": "#/$defs/leaf"}, right={"$ref": "#/$defs/leaf"}),
        },
    ),
    ("words of other languages", _object(word=_text(12), language={"enum": ["français", "日本語", "ελληνικά"]})),
    ("counts by name", {"type": "object", "patternProperties": {"^[a-z]{1,8}$": {"enum": [1, 2]}}, "maxProperties": 3}),
)
"""What to ask for, and its schema."""

_LONG = {"type": "array", "items": _text(12), "minItems": 200}


def make_input(index: int) -> pb.GenerationInput:
    """Return the `index`-th request of `schemas`."""
    what, schema = SCHEMAS[index % len(SCHEMAS)]
    message = pb.ChatMessage(role="user", content=f"Give me {what} as JSON.")
    one = pb.GenerationInput(chat=pb.ChatPrompt(messages=[message]))
    one.sampling.seed, one.sampling.temperature = index, 1.0
    one.stopping.max_tokens = MAX_TOKENS
    one.constraint.json_schema = json.dumps(schema)
    return one


class Judge:
    """Says whether texts are what was asked for."""

    def __init__(self, folder: Path) -> None:
        model = load_model_files(folder)
        self._core = load_core()
        self._compiler = Compiler(folder, model.eos_ids)
        self._info = tokenizer_info(self._core, read_token_bytes(folder), model.eos_ids)

    def is_valid(self, index: int, text: str) -> bool:
        """Say whether a whole text is valid."""
        try:
            jsonschema.Draft202012Validator(SCHEMAS[index % len(SCHEMAS)][1]).validate(json.loads(text))
        except (ValueError, jsonschema.ValidationError):
            return False
        return True

    def is_beginning(self, index: int, text: str) -> bool:
        """Say whether a text is the beginning of a valid one."""
        job = Job("json_schema", json.dumps(SCHEMAS[index % len(SCHEMAS)][1]))
        compiled, stop_ids = unpack(self._compiler.compile(job))
        grammar = self._core.CompiledGrammar.deserialize_json(compiled, self._info)
        return bool(self._core.GrammarMatcher(grammar, list(stop_ids), False, -1, None).accept_string(text, False))


async def ask_schemas(address: str, num_requests: int) -> "list[Answer]":
    """Return text and finish reason of each request."""
    gate = asyncio.Semaphore(CONCURRENCY)
    async with grpc.aio.insecure_channel(address) as channel:
        stub = rpc.GenerationServiceStub(channel)

        async def one(index: int) -> "Answer":
            async with gate:
                answer = await stub.Generate(pb.GenerateRequest(input=make_input(index)), timeout=TIMEOUT_S)
                return answer.choices[0].text, answer.choices[0].finish_reason

        return list(await asyncio.gather(*map(one, range(num_requests))))


def judge(answers: "list[Answer]", folder: Path) -> dict[str, Any]:
    """Return how the answers of `ask_schemas` ended, and those that are not what they should be."""
    rules, wrong = Judge(folder), []
    for index, (text, reason) in enumerate(answers):
        is_right = rules.is_valid if reason == pb.FINISH_REASON_STOP else rules.is_beginning
        if not is_right(index, text):
            wrong.append((index, pb.FinishReason.Name(reason), text))
    ends = Counter(pb.FinishReason.Name(reason).removeprefix("FINISH_REASON_") for _, reason in answers)
    return {"requests": len(answers), "ends": dict(ends), "stopped": ends["STOP"] / len(answers), "wrong": wrong}


async def time_round(address: str, batch: int, num_tokens: int, constrained: bool) -> float:
    """Return the mean time per output token of a round of streams, in seconds, the first token left out."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = rpc.GenerationServiceStub(channel)

        async def one(index: int) -> float:
            asked = pb.GenerationInput(text=f"Number {index}: a list of words,")
            asked.sampling.seed, asked.sampling.temperature = index, 1.0
            asked.stopping.max_tokens = num_tokens
            if constrained:
                asked.constraint.json_schema = json.dumps(_LONG)
            else:
                asked.stopping.ignore_eos = True
            asked.output.token_ids = True
            request = pb.GenerateStreamRequest(input=asked)
            first = last = 0.0
            num_seen = num_first = 0
            async for event in stub.GenerateStream(request, timeout=TIMEOUT_S):
                if event.HasField("delta"):
                    last = time.perf_counter()
                    num_seen += len(event.delta.token_ids)
                    if not first:
                        first, num_first = last, num_seen
            if num_seen != num_tokens:
                raise RuntimeError(f"{num_seen} tokens, {num_tokens} were asked for")
            return (last - first) / (num_seen - num_first)

        return statistics.fmean(await asyncio.gather(*map(one, range(batch))))


async def compare(address: str, rounds: int, batch: int, num_tokens: int) -> dict[str, Any]:
    """Return the times per output token with and without a constraint, in ms."""
    await time_round(address, batch, 8, True)
    times: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(rounds):
        for constrained in (False, True) if turn % 2 else (True, False):
            times[constrained].append(1e3 * await time_round(address, batch, num_tokens, constrained))
    free, bound = statistics.median(times[False]), statistics.median(times[True])
    ratios = [b / f for f, b in zip(times[False], times[True], strict=True)]
    return {"free_ms": times[False], "bound_ms": times[True], "ratio": bound / free, "ratios": ratios}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("schemas", "tpot"))
    parser.add_argument("--address", default="127.0.0.1:50051")
    parser.add_argument("--model", type=Path, help="the served model's folder; the demo model if left out")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    given = parser.parse_args()
    if given.what == "tpot":
        found = asyncio.run(compare(given.address, given.rounds, given.batch, given.tokens))
        print(json.dumps(found, indent=2))
        return 0 if found["ratio"] <= 1.1 else 1
    started = time.perf_counter()
    answers = asyncio.run(ask_schemas(given.address, given.requests))
    found = judge(answers, given.model or locate("demo").folder) | {"seconds": round(time.perf_counter() - started, 1)}
    print(json.dumps(found, indent=2, ensure_ascii=False))
    return 0 if not found["wrong"] and found["stopped"] >= MIN_STOPPED else 1


if __name__ == "__main__":
    sys.exit(main())

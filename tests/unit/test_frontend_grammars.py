"""The compiling process: it may be killed, take too long or too much, and only its own jobs notice."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from octavo.frontend import grammars as module
from octavo.frontend.constraint import Constraint, ConstraintKind
from octavo.frontend.errors import InvalidArgument, QueueFull, Unavailable
from octavo.frontend.grammars import Grammars
from octavo.wire.grammar import unpack
from tests.support.grammars import write_tokenizer
from tests.support.tiny_tokenizers import EOS_ID, word_piece

A = Constraint(ConstraintKind.REGEX, "a")
HARD = Constraint(
    ConstraintKind.JSON_SCHEMA,
    json.dumps({"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(1500)}}),
)


@pytest.fixture
async def grammars(tmp_path: Path) -> AsyncIterator[Grammars]:
    made = Grammars(write_tokenizer(tmp_path), (EOS_ID,))
    yield made
    await made.close()


def pid_of(grammars: Grammars) -> int:
    assert grammars._process is not None
    return grammars._process.pid


async def test_each_is_compiled_once(grammars: Grammars) -> None:
    first, second = await asyncio.gather(grammars.compile(A), grammars.compile(A))
    assert first is second
    assert await grammars.compile(A) is first
    assert unpack(first)[1] == (EOS_ID,)
    assert await grammars.compile(Constraint(ConstraintKind.CHOICE, '["b"]')) != first


@pytest.mark.parametrize("path", ["", "input.chat.tools[0]"])
async def test_what_cannot_be_compiled_names_its_field(grammars: Grammars, path: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        await grammars.compile(Constraint(ConstraintKind.REGEX, "(", path))
    assert raised.value.field_path == (path or "input.constraint.regex")


async def test_a_grammar_without_any_text_is_refused(grammars: Grammars) -> None:
    with pytest.raises(InvalidArgument, match="no text has this form"):
        await grammars.compile(Constraint(ConstraintKind.GRAMMAR, "root ::= root"))


async def test_a_killed_process_is_replaced(grammars: Grammars) -> None:
    await grammars.compile(A)
    first = pid_of(grammars)
    os.kill(first, signal.SIGKILL)
    await grammars.compile(Constraint(ConstraintKind.REGEX, "b"))
    assert pid_of(grammars) != first


async def test_what_takes_too_long_is_refused_and_others_go_on(tmp_path: Path) -> None:
    grammars = Grammars(write_tokenizer(tmp_path), (EOS_ID,), limit_s=0.5)
    await grammars.compile(A)
    first = pid_of(grammars)
    hard, other = await asyncio.gather(
        grammars.compile(HARD), grammars.compile(Constraint(ConstraintKind.REGEX, "b")), return_exceptions=True
    )
    assert isinstance(hard, InvalidArgument)
    assert "0.5 s" in hard.message
    assert isinstance(other, bytes)
    assert pid_of(grammars) != first
    await grammars.close()


async def test_a_process_that_stood_still_does_not_spoil_a_grammar_for_good(tmp_path: Path) -> None:
    grammars = Grammars(write_tokenizer(tmp_path), (EOS_ID,), limit_s=0.5, refusal_kept_s=0.0)
    await grammars.compile(A)
    other = Constraint(ConstraintKind.REGEX, "b")
    os.kill(pid_of(grammars), signal.SIGSTOP)
    with pytest.raises(InvalidArgument, match=r"0\.5 s"):
        await grammars.compile(other)
    grammars._limit_s = 10.0
    assert await grammars.compile(other)
    assert grammars._cache_bytes == sum(module._size(outcome) for outcome in grammars._cache.values())
    await grammars.close()


async def test_what_took_too_long_is_remembered_for_a_while(tmp_path: Path) -> None:
    grammars = Grammars(write_tokenizer(tmp_path), (EOS_ID,), limit_s=0.5)
    await grammars.compile(A)
    for _ in range(2):
        if grammars._process is not None:
            os.kill(pid_of(grammars), signal.SIGSTOP)
        with pytest.raises(InvalidArgument, match=r"0\.5 s"):
            await grammars.compile(Constraint(ConstraintKind.REGEX, "b"))
    assert grammars._process is None  # nobody was asked again
    await grammars.close()


async def test_who_leaves_does_not_take_it_from_others(grammars: Grammars) -> None:
    leaving = asyncio.create_task(grammars.compile(A))
    staying = asyncio.create_task(grammars.compile(A))
    await asyncio.sleep(0)
    leaving.cancel()
    assert await staying
    with pytest.raises(asyncio.CancelledError):
        await leaving


async def test_the_queue_is_bounded(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", 2)
    wanted = [grammars.compile(Constraint(ConstraintKind.REGEX, "a" * i)) for i in range(1, 5)]
    found = await asyncio.gather(*wanted, return_exceptions=True)
    assert [type(one) for one in found] == [bytes, bytes, QueueFull, QueueFull]


async def test_the_cache_is_bounded(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CACHE_ENTRIES", 2)
    for i in range(1, 5):
        await grammars.compile(Constraint(ConstraintKind.REGEX, "a" * i))
    assert len(grammars._cache) == 2
    assert grammars._cache_bytes == sum(module._size(outcome) for outcome in grammars._cache.values())


async def test_a_tokenizer_without_bytes_has_no_structured_output(tmp_path: Path) -> None:
    word_piece().save(str(tmp_path / "tokenizer.json"))
    grammars = Grammars(tmp_path, (1,))
    with pytest.raises(InvalidArgument, match="not possible with this model"):
        await grammars.compile(A)
    await grammars.close()


async def test_what_waits_at_the_end_is_told(tmp_path: Path) -> None:
    grammars = Grammars(write_tokenizer(tmp_path), (EOS_ID,))
    waiting = asyncio.create_task(grammars.compile(HARD))
    await asyncio.sleep(0)
    await grammars.close()
    with pytest.raises(Unavailable, match="stopped"):
        await waiting
    with pytest.raises(Unavailable, match="stopped"):
        await grammars.compile(A)

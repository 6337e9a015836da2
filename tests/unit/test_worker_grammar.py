"""Followers and their masks against brute force over a small vocabulary."""

import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.wire.columns import pack_ints
from octavo.wire.errors import MalformedMessage
from octavo.wire.grammar import MAX_COMPILED_BYTES, pack, unpack
from octavo.wire.plan import NewRow, RowSampling, StepPlan
from octavo.wire.vocabulary import read_token_bytes
from octavo.worker.grammar import Follower, Grammars, settle
from octavo.worker.sampler import Sampled
from tests.support.grammars import compile_grammar, write_tokenizer
from tests.support.tiny_tokenizers import EOS_ID

PROMPT = [1, 2, 3]
NOBODY = pack_ints([])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def plan_of(*rows: tuple[int, bytes, list[int]], freed: list[int] | None = None, forks: str = "") -> StepPlan:
    """Return a plan in which rows begin: row, grammar and output so far of each."""
    new = tuple(
        NewRow(row, "r", 0, len(PROMPT), 0, pack_ints(PROMPT + output), RowSampling(0), grammar=1 + place)
        for place, (row, _, output) in enumerate(rows)
    )
    pairs = [tuple(map(int, pair.split(">"))) for pair in forks.split()]
    return StepPlan(
        1,
        1,
        NOBODY,
        NOBODY,
        NOBODY,
        new_rows=new,
        grammars=tuple(grammar for _, grammar, _ in rows),
        freed_rows=pack_ints(freed or []),
        fork_src=pack_ints([source for source, _ in pairs]),
        fork_dst=pack_ints([target for _, target in pairs]),
        fork_choice=pack_ints([1] * len(pairs)),
    )


def allowed(grammars: Grammars, row: int) -> set[int]:
    """Return the ids that a row may draw next."""
    masks = grammars.masks(grammars.of_step(plan_of(), [row]))
    assert masks is not None
    if masks.dead:
        return set()
    assert masks.mask.lines == [0]
    bits = np.unpackbits(masks.mask.words[0].view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def accept(grammars: Grammars, row: int, token: int) -> None:
    ((_, follower),) = grammars.of_step(plan_of(), [row])
    follower.accept(token)


REGEX = "(ab|hell)+c?|(é)+|wo?"


def may_follow(text: bytes, piece: bytes) -> bool:
    """Say whether a text goes on with a piece, by looking at every text of the language that is short enough."""
    wanted = text + piece
    units = ("ab", "hell")
    longest = len(wanted) + 4
    words = {""}
    for _ in range(longest):
        words |= {word + unit for word in words for unit in units if len(word) < longest}
    language = {word + tail for word in words if word for tail in ("", "c")}
    language |= {"w", "wo", *("é" * i for i in range(1, longest))}
    return any(word.encode().startswith(wanted) for word in language)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_masks_are_those_of_brute_force(folder: Path, seed: int) -> None:
    draw, pieces = random.Random(seed), read_token_bytes(folder)
    grammars = Grammars(folder)
    grammars.apply(plan_of((0, compile_grammar(folder, "regex", REGEX), [])))
    text = b""
    for _ in range(4):
        found = allowed(grammars, 0)
        expected = {i for i, piece in enumerate(pieces) if piece and may_follow(text, piece)}
        assert found - {EOS_ID} == expected
        is_whole = re.fullmatch(REGEX.encode(), text) is not None
        assert (EOS_ID in found) == is_whole
        if not expected:
            return
        token = draw.choice(sorted(expected))
        text += pieces[token]
        accept(grammars, 0, token)


def test_a_row_that_begins_with_output_stands_where_it_stood(folder: Path) -> None:
    grammar = compile_grammar(
        folder, "json_schema", json.dumps({"type": "object", "properties": {"a": {"type": "null"}}})
    )
    output = list(b'{"a": nu')
    grammars = Grammars(folder)
    grammars.apply(plan_of((0, grammar, []), (1, grammar, output)))
    for token in output:
        accept(grammars, 0, token)
    assert allowed(grammars, 0) == allowed(grammars, 1) == {ord("l"), 256 + 3 + 1}  # "l" and the merge "ll"


def test_forks_go_their_own_ways(folder: Path) -> None:
    grammars = Grammars(folder)
    grammars.apply(plan_of((0, compile_grammar(folder, "regex", "a(b|c)d"), list(b"a"))))
    followers = grammars.of_step(plan_of(forks="0>3 0>5"), [0, 3, 5])
    assert [place for place, _ in followers] == [0, 1, 2]
    masks = grammars.masks(followers)
    settle(followers, masks, [Sampled(ord("b")), Sampled(ord("c")), Sampled(ord("b"))])
    assert allowed(grammars, 3) == {ord("d")}
    accept(grammars, 3, ord("d"))
    assert allowed(grammars, 3) == {EOS_ID}
    assert allowed(grammars, 0) == {ord("d")}


def test_after_the_end_there_is_no_mask_and_no_fault(folder: Path) -> None:
    grammars = Grammars(folder)
    grammars.apply(plan_of((0, compile_grammar(folder, "choice", '["ab"]'), list(b"ab"))))
    assert allowed(grammars, 0) == {EOS_ID}
    accept(grammars, 0, EOS_ID)
    followers = grammars.of_step(plan_of(), [0])
    masks = grammars.masks(followers)
    assert masks is not None
    assert (masks.mask.lines, masks.dead) == ([], [])
    assert settle(followers, masks, [Sampled(7)]) == [Sampled(7)]


@pytest.mark.parametrize("text", ['root ::= "\\xff"', 'root ::= "a" root'])
def test_a_dead_end_is_the_rows_own_fault(folder: Path, text: str) -> None:
    """No token is one of the first; an output that the grammar does not take is the end of the other."""
    grammars = Grammars(folder)
    other = compile_grammar(folder, "choice", '["b"]')
    grammars.apply(plan_of((0, compile_grammar(folder, "grammar", text), [ord("z")]), (1, other, [])))
    followers = grammars.of_step(plan_of(), [0, 1])
    masks = grammars.masks(followers)
    assert masks is not None
    assert (masks.mask.lines, masks.dead) == ([1], [0])
    assert settle(followers, masks, [Sampled(5), Sampled(ord("b"))]) == [
        Sampled(None, dead_end=True),
        Sampled(ord("b")),
    ]
    assert allowed(grammars, 1) == {EOS_ID}


@pytest.mark.parametrize(
    "body", [b"\0", b"x" * 100, pack("{}", (EOS_ID,)), pack("no json", (EOS_ID,)), pack("{}", (10**6,))]
)
def test_bytes_that_are_no_grammar_are_the_rows_own_fault(folder: Path, body: bytes) -> None:
    grammars = Grammars(folder)
    grammars.apply(plan_of((0, body, []), (1, compile_grammar(folder, "choice", '["b"]'), [])))
    assert allowed(grammars, 0) == set()
    assert allowed(grammars, 1) == {ord("b")}


def test_without_a_tokenizer_every_grammar_is_a_fault(folder: Path) -> None:
    grammars = Grammars(None)
    grammars.apply(plan_of((0, compile_grammar(folder, "choice", '["b"]'), [])))
    assert allowed(grammars, 0) == set()


def test_rows_are_let_go_of(folder: Path) -> None:
    grammar = compile_grammar(folder, "choice", '["b"]')
    grammars = Grammars(folder)
    grammars.apply(plan_of((0, grammar, []), (1, grammar, [])))
    grammars.apply(plan_of(freed=[0]))
    assert (grammars.has_any([0]), grammars.has_any([0, 1])) == (False, True)
    grammars.clear()
    assert not grammars.has_any([0, 1])


def test_a_bomb_is_not_unpacked() -> None:
    with pytest.raises(MalformedMessage):
        unpack(pack(" " * (MAX_COMPILED_BYTES + 1), ()))


def test_a_dead_follower_stays_dead() -> None:
    dead = Follower(None)
    dead.accept(3)
    assert dead.is_dead
    assert dead.fork().is_dead

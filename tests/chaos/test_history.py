"""The judge: what it must call wrong. Each history here is a good one with one thing changed."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.support.history import (
    CANCELLED,
    OK,
    UNAVAILABLE,
    Ask,
    Delta,
    End,
    Event,
    Expected,
    History,
    Started,
    Status,
    Told,
    UsageTold,
    judge,
)

ASK = Ask("two", (1, 2), 3, n=2)
EXPECTED = Expected((Told((10, 11, 12), "abc", "length"), Told((20, 21), "de", "stop")))


def good() -> list[Event]:
    return [
        Started(0.0, 2),
        Delta(0.1, 0, 0, (10,), "a"),
        Delta(0.2, 1, 0, (20, 21), "de"),
        End(0.2, 1, "stop", 2),
        Delta(0.3, 0, 1, (11, 12), "bc"),
        End(0.3, 0, "length", 3),
        UsageTold(0.3, 2, 5),
        Status(0.4, OK),
    ]


def history(events: list[Event], cancels: bool = False) -> History:
    return History(ASK, "grpc-stream", 0, 0.0, cancels, events)


def test_a_good_history_is_good() -> None:
    assert judge(history(good()), EXPECTED) == []
    assert Expected.of(history(good())) == EXPECTED


def swapped(events: list[Event]) -> list[Event]:
    return [*events[:1], events[4], *events[2:4], events[1], *events[5:]]


def changed(index: int, **fields: object) -> Callable[[list[Event]], list[Event]]:
    def change(events: list[Event]) -> list[Event]:
        events[index] = replace(events[index], **fields)  # type: ignore[arg-type]
        return events

    return change


def inserted(index: int, source: int) -> Callable[[list[Event]], list[Event]]:
    return lambda events: [*events[:index], events[source], *events[index:]]


def without(index: int) -> Callable[[list[Event]], list[Event]]:
    return lambda events: events[:index] + events[index + 1 :]


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        (swapped, "position 1 came after position -1"),
        (without(1), "position 1 came after position -1"),
        (inserted(2, 1), "position 0 came after position 0"),
        (changed(1, ids=(99,)), "expected (10,)"),
        (changed(1, text="x"), "is none of the undisturbed answer's"),
        (changed(4, ids=(11,)), "ended with 2 of 3 ids"),
        (changed(4, text="b"), "text 'ab', expected 'abc'"),
        (inserted(4, 2), "came after the end of its choice"),
        (inserted(6, 5), "ended twice"),
        (without(5), "choice 0 did not end"),
        (changed(5, reason="stop"), "ended for stop, expected length"),
        (changed(5, num_tokens=2), "ended with 2 tokens, expected 3"),
        (without(6), "without its usage"),
        (changed(6, completion_tokens=6), "usage 2 + 6"),
        (inserted(7, 6), "the usage came twice"),
        (inserted(1, 0), "it started twice"),
        (changed(0, prompt_tokens=1), "1 prompt tokens of 2"),
        (without(7), "0 terminal statuses"),
        (inserted(8, 7), "2 terminal statuses"),
        (inserted(8, 4), "came after the terminal status"),
        (changed(7, code=UNAVAILABLE), "it ended UNAVAILABLE"),
        (changed(7, code=CANCELLED), "it ended CANCELLED"),
        (changed(1, choice=2), "choice 2 of 2"),
    ],
)
def test_what_is_wrong_is_called_wrong(change: Callable[[list[Event]], list[Event]], wrong: str) -> None:
    found = judge(history(change(good())), EXPECTED)
    assert any(wrong in one for one in found), found


def test_a_beginning_is_enough_where_an_end_is_excused() -> None:
    assert judge(history([*good()[:3], Status(0.4, UNAVAILABLE)]), EXPECTED, {UNAVAILABLE}) == []
    assert judge(history([*good()[:3], Status(0.4, CANCELLED)], cancels=True), EXPECTED) == []
    wrong: list[Event] = [good()[0], Delta(0.1, 0, 0, (11,), "a"), Status(0.4, UNAVAILABLE)]
    assert judge(history(wrong), EXPECTED, {UNAVAILABLE})

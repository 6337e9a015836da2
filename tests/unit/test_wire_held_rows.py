"""The report of a worker's rows: its parts, and what in it can be seen to be wrong."""

from typing import Any

import msgspec
import pytest

from octavo.wire.codec import decode_from_peer, encode
from octavo.wire.columns import pack_ints
from octavo.wire.errors import MalformedMessage
from octavo.wire.held_rows import HeldRow, HeldRows, check_report, prompt_digest, split_report


def held(
    request: str = "f-1", choice: int = 0, computed: int = 6, table: tuple[int, ...] = (1, 2), **fields: Any
) -> HeldRow:
    row = HeldRow(request, choice, 5, prompt_digest(b"p"), pack_ints([7, 8]), computed, pack_ints(table))
    return msgspec.structs.replace(row, **fields)


def check(*rows: HeldRow) -> str | None:
    return check_report(rows, num_blocks=10, block_size=4, vocab_size=100)


def test_a_report_crosses_the_wire() -> None:
    part = HeldRows((held(), held("f-2", table=(3, 4))), is_last=True)
    assert decode_from_peer(encode(part, 5, 1))[1] == part


def test_rows_fill_messages_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.wire.held_rows.REPORT_MESSAGE_BYTES", 1200)
    rows = [held(f"f-{n}") for n in range(5)]
    parts = list(split_report(rows))
    assert [(len(part.rows), part.is_last) for part in parts] == [(2, False), (2, False), (1, True)]
    assert [row for part in parts for row in part.rows] == rows
    assert list(split_report([])) == [HeldRows((), is_last=True)]


def test_what_rows_may_share() -> None:
    assert check() is None
    assert check(held(), held("f-2", table=(1, 3)), held("f-2", 1, table=(1, 3))) is None


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ((held(), held(table=(3, 4))), "f-1/0 comes twice"),
        ((held(), held(choice=1, prompt_digest=bytes(32))), "the choices of f-1 differ in their prompt"),
        ((held(output_ids=pack_ints([7, 100])),), r"f-1/0 holds an id outside of [0, 100)"),
        ((held(table=(1,)),), "f-1/0 has 1 blocks of 4 for 6 tokens"),
        ((held(table=(1, 2, 3)),), "f-1/0 has 3 blocks of 4 for 6 tokens"),
        ((held(table=(1, 0)),), "f-1/0 names a block outside of [1, 10)"),
        ((held(table=(1, 10)),), "f-1/0 names a block outside of [1, 10)"),
        ((held(table=(1, 1)),), "f-1/0 names a block twice"),
        (
            (held(), held("f-2", table=(3, 2))),
            "f-2/0 and f-1/0 both name block 2, and not for the same tokens",
        ),
        (
            (held(), held("f-2", table=(2, 3))),
            "f-2/0 and f-1/0 both name block 2, and not for the same tokens",
        ),
    ],
)
def test_what_contradicts_is_named(rows: tuple[HeldRow, ...], message: str) -> None:
    assert check(*rows) == message


@pytest.mark.parametrize(
    "fields",
    [{"num_computed_tokens": 8}, {"output_ids": b"abc"}, {"block_table": b"a"}],
)
def test_what_no_row_can_be_is_malformed(fields: dict[str, Any]) -> None:
    with pytest.raises(MalformedMessage):
        held(**fields)

"""Worker to scheduler, at the beginning of a session: what the rows of the session before have left in the KV cache.

A worker that has lost its scheduler keeps its cache. It tells the next one of the rows that it had, first of all its
messages, so that requests which their frontends submit again can go on from the blocks. Nothing is claimed for good: a row
is worth something for as long as nobody is given its blocks.
"""

from collections.abc import Iterable, Iterator
from hashlib import sha256
from typing import Annotated

import msgspec
from msgspec import Meta

from octavo.wire.columns import same_length, unpack_ints
from octavo.wire.errors import MalformedMessage
from octavo.wire.prompt_logprobs import Int31

DIGEST_BYTES = 32

MAX_NAME_LENGTH = 256

MAX_REPORT_BYTES = 64 * 2**20
"""Of all rows that a worker reports; what does not fit is not reported, and is computed anew."""

REPORT_MESSAGE_BYTES = 4 * 2**20
"""A message that has as much takes no further row."""

_ROW_BYTES = 512
"""Of a row's fields other than its columns, generously."""


class HeldRow(msgspec.Struct, frozen=True, array_like=True):
    """A row as its worker remembers it; the keys and values of its computed tokens are in the blocks of its table."""

    request: Annotated[str, Meta(min_length=1, max_length=MAX_NAME_LENGTH)]  # as the NewRow of the row named it
    choice: Int31
    num_prompt_tokens: Annotated[int, Meta(ge=1, lt=2**31)]
    prompt_digest: Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]  # prompt_digest()
    output_ids: bytes  # int32: all that were drawn, told or not
    num_computed_tokens: Annotated[int, Meta(ge=1, lt=2**31)]
    block_table: bytes  # int32

    def __post_init__(self) -> None:
        """Check what one field says against another.

        Raises:
            MalformedMessage: a column is none, or more is computed than is known.
        """
        same_length("block table", self.block_table)
        num_known = self.num_prompt_tokens + same_length("output", self.output_ids)
        if self.num_computed_tokens > num_known:
            raise MalformedMessage(f"{self.num_computed_tokens} tokens of {num_known} are computed")

    @property
    def num_bytes(self) -> int:
        """What it takes in a message, at most."""
        return len(self.output_ids) + len(self.block_table) + _ROW_BYTES


class HeldRows(msgspec.Struct, frozen=True, array_like=True, tag="held-rows"):
    """A part of the report, in order; a worker whose Hello named no rows sends none."""

    rows: tuple[HeldRow, ...]
    is_last: bool  # the report is whole


def prompt_digest(prompt_ids: bytes) -> bytes:
    """Return the digest of a prompt, an int32 column."""
    return sha256(prompt_ids).digest()


def split_report(rows: Iterable[HeldRow]) -> Iterator[HeldRows]:
    """Yield the messages that tell of some rows."""
    part: list[HeldRow] = []
    num_bytes = 0
    for row in rows:
        if part and num_bytes + row.num_bytes > REPORT_MESSAGE_BYTES:
            yield HeldRows(tuple(part), is_last=False)
            part, num_bytes = [], 0
        part.append(row)
        num_bytes += row.num_bytes
    yield HeldRows(tuple(part), is_last=True)


def check_report(rows: Iterable[HeldRow], num_blocks: int, block_size: int, vocab_size: int) -> str | None:
    """Return what contradicts in a report that is whole, None if nothing does.

    Args:
        rows: of all messages.
        num_blocks: of the cache, the null block included.
        block_size: tokens of a block.
        vocab_size: ids are below it.
    """
    seen: set[tuple[str, int]] = set()
    prompts: dict[str, tuple[int, bytes]] = {}
    owners: dict[int, tuple[int, HeldRow]] = {}  # block -> its place in a table, and whose
    for row in rows:
        name = f"{row.request}/{row.choice}"
        if (row.request, row.choice) in seen:
            return f"{name} comes twice"
        seen.add((row.request, row.choice))
        prompt = (row.num_prompt_tokens, row.prompt_digest)
        if prompts.setdefault(row.request, prompt) != prompt:
            return f"the choices of {row.request} differ in their prompt"
        output, table = unpack_ints(row.output_ids), unpack_ints(row.block_table)
        if output and not (min(output) >= 0 and max(output) < vocab_size):
            return f"{name} holds an id outside of [0, {vocab_size})"
        if len(table) != -(-row.num_computed_tokens // block_size):
            return f"{name} has {len(table)} blocks of {block_size} for {row.num_computed_tokens} tokens"
        if not (min(table) > 0 and max(table) < num_blocks):
            return f"{name} names a block outside of [1, {num_blocks})"
        if len(set(table)) != len(table):
            return f"{name} names a block twice"
        for place, block in enumerate(table):
            other_place, other = owners.setdefault(block, (place, row))
            if other is row:
                continue
            is_full = (place + 1) * block_size <= min(row.num_computed_tokens, other.num_computed_tokens)
            if place != other_place or not (is_full or other.request == row.request):
                return f"{name} and {other.request}/{other.choice} both name block {block}, and not for the same tokens"
    return None

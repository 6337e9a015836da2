"""Rows and blocks of beam groups: how the sequences of one request become the beams of a search, step by step.

What is decided stands in beams.py. A beam that has a next one stays where it is for the first of them; the others begin in
rows of their own with its blocks, whose last one, partly filled, is copied before anybody writes to it. Beams without a
next one leave as soon as that is known.
"""

from collections.abc import Mapping

from octavo.scheduler.batch import Batch
from octavo.scheduler.beams import BeamSearch
from octavo.scheduler.draft import Draft, Seat
from octavo.scheduler.errors import InvariantViolation
from octavo.scheduler.sequence import BeamGroup, Request, Sequence, Status
from octavo.scheduler.tables import BlockTables
from octavo.wire.columns import unpack_floats, unpack_ints
from octavo.wire.plan import RowLogprobs


def most_blocks(num_prompt_tokens: int, max_tokens: int, width: int, block_size: int) -> int:
    """Return the most blocks that a group ever has: full ones of the prompt are shared, all others may be a beam's own."""
    shared = num_prompt_tokens // block_size
    longest = num_prompt_tokens + max_tokens - 1  # the last id is not computed
    return shared + width * (-(-longest // block_size) - shared)


def restart(request: Request, through: int) -> None:
    """Let a group that has no rows begin anew, with its first sequence waiting for one.

    Args:
        request: the group's.
        through: nothing counts that plans up to this one draw for it.
    """
    group = group_of(request)
    group.search.restart()
    for s in request.sequences:
        s.status = Status.HELD
        s.num_known = s.plan_limit = s.num_prompt
        s.void_draws(through)
    request.sequences[0].status = Status.WAITING


def group_of(request: Request) -> BeamGroup:
    """Return a request's group.

    Raises:
        InvariantViolation: it has none.
    """
    if request.group is None:
        raise InvariantViolation(f"{request.name} has no beams")
    return request.group


class Groups:
    """The groups of one worker that have rows. They hold the rows of beams to come: once begun, they lack blocks only."""

    def __init__(self, batch: Batch, tables: BlockTables, block_size: int) -> None:
        self._batch = batch
        self._tables = tables
        self._block_size = block_size

    def enter(self, first: Sequence) -> None:
        """Begin a group whose first sequence has got a row and a table; there are as many rows as the group is wide."""
        group = group_of(first.request)
        group.beams, group.children = [first], []
        self._batch.num_held += len(first.request.sequences) - 1
        self._tables.begin_group(first.number)

    def leave(self, request: Request, status: Status, newest_step: int) -> None:
        """Take all rows and blocks of a group; no plan after `newest_step` names it."""
        group = group_of(request)
        self._batch.num_held -= len(request.sequences) - len(group.beams)
        for beam in group.beams:
            self._leave(beam, status, newest_step)
        self._tables.end_group(request.sequences[0].number)
        group.beams, group.children = [], []

    def choose(self, request: Request, candidates: Mapping[Sequence, RowLogprobs], newest_step: int) -> BeamSearch:
        """Choose the next beams of a group from what came with the draws of the present ones; return its search."""
        group = group_of(request)
        for beam in group.beams:
            beam.num_confirmed = beam.num_planned
            beam.num_expected = beam.num_known
        pairs = [_pairs(candidates[beam]) for beam in group.beams]
        group.children = [(group.beams[parent], token) for parent, token in group.search.step(pairs)]
        if group.search.is_over:
            return group.search
        parents = {parent for parent, _ in group.children}
        for beam in group.beams:
            if beam not in parents:
                self._leave(beam, Status.HELD, newest_step)
                self._batch.num_held += 1
        group.beams = [beam for beam in group.beams if beam in parents]
        return group.search

    def num_wanted(self, request: Request) -> int:
        """Return the blocks that the next beams of a group take for their newest ids."""
        group = group_of(request)
        if group.beams[0].num_planned % self._block_size == 0:
            return len(group.children)
        return len(group.children) - len(group.beams)  # of those that share a block, one writes where it is

    def seat(self, request: Request, draft: Draft) -> list[Sequence]:
        """Let the next beams of a group take their rows and tables, and return them; their newest id is not planned."""
        group = group_of(request)
        held = [s for s in request.sequences if s.status is Status.HELD]
        seats: list[Seat] = []
        for parent, token in group.children:
            is_first = all(parent is not seat.source for seat in seats)
            seats.append(Seat(parent if is_first else self._begin(held.pop(), parent), parent, token))
        group.beams, group.children = [seat.beam for seat in seats], []
        for beam in group.beams:
            beam.publishes = False
            beam.num_known += 1
            beam.num_expected = beam.plan_limit = beam.num_known
        draft.seats += seats
        draft.seated.add(request)
        return group.beams

    def _begin(self, beam: Sequence, parent: Sequence) -> Sequence:
        self._batch.num_held -= 1
        self._batch.enter(beam)
        self._tables.fork(parent.number, beam.number)
        beam.num_known, beam.num_planned = parent.num_known, parent.num_planned
        beam.num_confirmed, beam.num_blocks_sent = parent.num_confirmed, parent.num_blocks_sent
        beam.num_cached, beam.num_published = parent.num_cached, parent.num_published
        beam.uses_cache, beam.num_preemptions = parent.uses_cache, parent.num_preemptions
        beam.first_planned_at, beam.first_token_at = parent.first_planned_at, parent.first_token_at
        beam.keys = list(parent.keys)
        beam.first_told = beam.num_prompt
        return beam

    def _leave(self, beam: Sequence, status: Status, newest_step: int) -> None:
        self._tables.release(beam.number)
        self._batch.leave(beam, status, newest_step)


def _pairs(candidates: RowLogprobs) -> list[tuple[int, float]]:
    return list(zip(unpack_ints(candidates.top_ids), unpack_floats(candidates.top_logprobs), strict=True))

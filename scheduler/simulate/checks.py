"""What the scheduler must never do, whatever it was told: an account of its own beside the core, from events and
instructions alone."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from octavo.scheduler.adoption import GRACE_S
from octavo.scheduler.config import Limits, SchedulerConfig, resolve_limits
from octavo.scheduler.events import (
    CacheResetRequested,
    ChoiceStopped,
    Event,
    FrontendLost,
    RequestCancelled,
    RequestSubmitted,
    StepCompleted,
    WorkerLost,
    WorkerReady,
)
from octavo.scheduler.instructions import (
    AnswerCacheReset,
    EmitOutput,
    EndFrontendSession,
    EndWorkerSession,
    Instruction,
    SendPlan,
    TellAdopted,
)
from octavo.scheduler.simulate.deaths import Deaths, RequestName
from octavo.scheduler.simulate.workload import NOT_AGAIN
from octavo.scheduler.simulate.world import Violation
from octavo.wire.columns import unpack_ints
from octavo.wire.ids import SessionId
from octavo.wire.plan import StepPlan, StepResult
from octavo.wire.requests import FailureCode, RequestFailed, StepOutput, SubmitRequest


@dataclass(slots=True)
class _Live:
    """A request that has not ended."""

    arrival: int
    root: bytes
    choices: set[int]
    is_started: bool = False


@dataclass(slots=True)
class _RowUse:
    """Who has a row."""

    request: RequestName
    choice: int
    root: bytes
    own: dict[int, int] = field(default_factory=dict)
    """Blocks that it was given to write, with the plan that gave them."""
    table: set[int] = field(default_factory=set)
    held: Sequence[int] = ()
    """Table of the row that the worker reported for it."""


@dataclass(slots=True)
class _Epoch:
    """One worker's session."""

    id: SessionId
    boot_id: str
    limits: Limits
    held: dict[tuple[str, int], Sequence[int]]
    """Tables of the rows that the worker reported, by request and choice."""
    grace_end: float
    """So long requests may wait for others that go on from such rows."""
    num_sent: int = 0
    num_completed: int = 0
    num_faults: int = 0
    num_alone: int = 0
    """Requests that may have to run alone, and take the rows of others for it."""
    reset_at: int = 0
    """Newest plan at the newest reset of the prefix cache."""
    rows: dict[int, _RowUse] = field(default_factory=dict)
    entries: Counter[tuple[RequestName, int]] = field(default_factory=Counter)
    block_root: dict[int, bytes] = field(default_factory=dict)
    block_step: dict[int, int] = field(default_factory=dict)
    """Plan that gave a block out to be written, or handed it to the first that went on from its reported row."""
    given: set[int] = field(default_factory=set)
    """Blocks that were given out to be written."""
    broken: dict[int, RequestName] = field(default_factory=dict)
    """Blocks that rows with broken values wrote, and whose rows these were, until they are given out anew."""
    outstanding: dict[int, dict[int, _RowUse]] = field(default_factory=dict)
    """Rows of the plans whose results are not back."""


class Auditor:
    """Follows one scheduler, from its first event on.

    Checks that plans name live requests only, keep to budgets and to the pipeline's depth, that found blocks belong to
    the same tenant and to the time after the newest reset, and were not written by a row that faulted, that preemptions
    are bounded and nobody is overtaken under `fcfs`, that whoever is told an end had not ended, and that work is never
    left lying.

    Attributes:
        stats: what the plans did.
    """

    def __init__(self, config: SchedulerConfig, stats: Counter[str]) -> None:
        self.stats = stats
        self._config = config
        self._live: dict[RequestName, _Live] = {}
        self._names: dict[str, RequestName] = {}  # by the name that plans have for it
        self._epoch: _Epoch | None = None
        self._deaths = Deaths(config.pipeline_depth)
        self._lost_at: float | None = None
        self._num_submitted = 0
        # Of the present call: what its events ended may be told an end that came before, in the order of the core.
        self._just_ended: set[RequestName | tuple[RequestName, int]] = set()
        self._away_since: float | None = None
        self._was_away = True
        self._has_one_event = False

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return len(self._live)

    @property
    def frontends(self) -> set[SessionId]:
        """Sessions of the frontends that have requests."""
        return {name[0] for name in self._live}

    def follow(self, events: list[Event], instructions: list[Instruction], now: float) -> None:
        """Check one call of the core.

        Raises:
            Violation: it did what it must not do.
        """
        self._just_ended.clear()
        self._has_one_event = len(events) == 1
        self._was_away, self._away_since = self._epoch is None, self._lost_at
        for event in events:
            self._on_event(event, now)
        for instruction in instructions:
            match instruction:
                case EmitOutput(frontend, output):
                    self._on_output(frontend, output, now)
                case EndFrontendSession():
                    raise Violation(f"the core sends a frontend away: {instruction}")
                case EndWorkerSession(session, reason):
                    if not reason.startswith("no step finished for"):
                        raise Violation(f"the core sends a worker away: {reason}")
                    if self._epoch is not None and self._epoch.id == session:
                        self._lose_worker(now, "")
                    self.stats["step timeouts"] += 1
                case AnswerCacheReset() | SendPlan() | TellAdopted():
                    pass
        for instruction in instructions:
            if isinstance(instruction, SendPlan):
                self._on_plan(instruction.plan)
        self._check_progress(now)

    # Events

    def _on_event(self, event: Event, now: float) -> None:
        match event:
            case StepCompleted(result):
                if (epoch := self._epoch) is not None and result.epoch == epoch.id:
                    self._on_result(result, epoch)
            case RequestSubmitted(frontend, message, owner):
                self._on_submitted(frontend, message, owner)
            case RequestCancelled(frontend, cancel):
                self._end_request((frontend, cancel.handle))
            case ChoiceStopped(frontend, finish):
                name: RequestName = (frontend, finish.handle)
                if self._end_choice(name, finish.choice):
                    self._just_ended |= {name, (name, finish.choice)}
            case FrontendLost(frontend):
                for lost in [name for name in self._live if name[0] == frontend]:
                    del self._live[lost]
            case WorkerReady():
                self._begin_epoch(event, now)
            case WorkerLost(session, _, is_orderly):
                if self._epoch is not None and self._epoch.id == session:
                    self._lose_worker(now, None if is_orderly else self._epoch.boot_id)
            case CacheResetRequested():
                if self._epoch is not None:
                    self._epoch.reset_at = self._epoch.num_sent

    def _on_result(self, result: StepResult, epoch: _Epoch) -> None:
        epoch.num_completed += 1
        rows = epoch.outstanding.pop(result.step)
        for row in unpack_ints(result.fault_row):
            self.stats["faults"] += 1
            epoch.num_faults += 1
            use = rows[row]
            for block, step in use.own.items():
                if epoch.block_step[block] == step:
                    epoch.broken[block] = use.request

    def _end_request(self, name: RequestName) -> None:
        if (live := self._live.pop(name, None)) is not None:
            self._just_ended.add(name)
            self._just_ended.update((name, choice) for choice in live.choices)

    def _on_submitted(self, frontend: SessionId, message: SubmitRequest, owner: str) -> None:
        choices = set(range(message.num_choices)) - set(unpack_ints(message.finished_choices))
        self._num_submitted += 1
        self._names[f"{owner or format(frontend, 'x')}-{message.handle}"] = (frontend, message.handle)
        self._live[frontend, message.handle] = _Live(self._num_submitted, message.prefix_root, choices)
        self.stats["replays"] += bool(message.output_ids)

    def _begin_epoch(self, ready: WorkerReady, now: float) -> None:
        self._deaths.settle(ready.boot_id, self._live)
        held = {(row.request, row.choice): unpack_ints(row.block_table) for row in ready.held_rows}
        grace_end = now + (GRACE_S if held else 0.0)
        limits = resolve_limits(self._config, ready.facts)
        self._epoch = _Epoch(ready.epoch, ready.boot_id, limits, held, grace_end)
        self._epoch.num_alone = self._deaths.num_suspects
        self._lost_at = None
        self.stats["epochs"] += 1

    def _lose_worker(self, now: float, boot_id: str | None) -> None:
        """Take note of a loss; `boot_id` is None if it left in good order, '' if it counts as dead in any case."""
        if self._epoch is not None and boot_id is not None:
            uses = [use.request for rows in self._epoch.outstanding.values() for use in rows.values()]
            self._deaths.note_loss(boot_id, set(uses) & set(self._live))
        self._epoch = None
        self._lost_at = now
        self._was_away = True

    def _end_choice(self, name: RequestName, choice: int) -> bool:
        """Take note of a choice's end; say whether it lived."""
        if (live := self._live.get(name)) is None or choice not in live.choices:
            return False
        live.choices.discard(choice)
        if not live.choices:
            del self._live[name]
        return True

    # Instructions

    def _on_output(self, frontend: SessionId, output: StepOutput, now: float) -> None:
        self._deaths.count_tokens(frontend, output)
        for finished in output.finished:
            name = (frontend, finished.handle)
            if not self._end_choice(name, finished.choice) and (name, finished.choice) not in self._just_ended:
                raise Violation(f"an end of what has ended: {finished}")
        for failed in output.failed:
            name = (frontend, failed.handle)
            live = self._live.pop(name, None)
            if live is None and name not in self._just_ended:
                raise Violation(f"a failure of what has ended: {failed}")
            if live is not None and failed.message.endswith(NOT_AGAIN):
                self._deaths.check_blame(name, len(live.choices), self._live)
            self._check_failure(failed, now)

    def _check_failure(self, failed: RequestFailed, now: float) -> None:
        self.stats[f"failures {failed.code.name}"] += 1
        if failed.code in (FailureCode.QUEUE_FULL, FailureCode.CALLER_LIMIT) and self._has_one_event and not self._live:
            raise Violation(f"{failed}, but nobody else is here")
        if failed.code is not FailureCode.UNAVAILABLE:
            return
        if not self._was_away and "smaller" not in failed.message:
            raise Violation(f"{failed}, but there is a worker")
        waited = math.inf if self._away_since is None else now - self._away_since
        if self._epoch is None and waited < self._config.recovery_timeout_s - 1e-6:
            raise Violation(f"{failed} after {waited} s without a worker")

    def _on_plan(self, plan: StepPlan) -> None:
        epoch = self._epoch
        if epoch is None or plan.epoch != epoch.id or plan.step != epoch.num_sent + 1:
            raise Violation(f"plan {plan.step} of epoch {plan.epoch:x} out of order")
        epoch.num_sent = plan.step
        if epoch.num_sent - epoch.num_completed > self._config.pipeline_depth:
            raise Violation(f"{epoch.num_sent - epoch.num_completed} plans are outstanding")
        self._follow_beams(plan, epoch)
        self._follow_rows(plan, epoch)
        self._follow_blocks(plan, epoch)
        self._follow_forks(plan, epoch)
        rows, counts = unpack_ints(plan.row), unpack_ints(plan.num_tokens)
        if sum(counts) > epoch.limits.max_num_batched_tokens or max(counts) > epoch.limits.max_chunk_tokens:
            raise Violation(f"plan {plan.step} computes {list(counts)} tokens, limits {epoch.limits}")
        if len(epoch.rows) > epoch.limits.max_num_seqs:
            raise Violation(f"plan {plan.step} holds {len(epoch.rows)} rows")
        for row in rows:
            self._check_alive(plan, epoch, row)
        epoch.outstanding[plan.step] = {row: epoch.rows[row] for row in (*rows, *unpack_ints(plan.fork_dst))}
        self.stats["plans"] += 1
        self.stats["rows"] += len(rows)

    def _follow_beams(self, plan: StepPlan, epoch: _Epoch) -> None:
        for row in unpack_ints(plan.freed_rows):
            if epoch.rows.pop(row, None) is None:
                raise Violation(f"plan {plan.step} frees row {row}, which nobody has")
        for row, source in zip(unpack_ints(plan.beam_row), unpack_ints(plan.beam_src), strict=True):
            use = epoch.rows[source]
            if any(rows.get(source) is use for rows in epoch.outstanding.values()):
                raise Violation(f"plan {plan.step} goes on from row {source}, whose result is not back")
            if row != source:
                beam = _RowUse(use.request, use.choice, use.root, dict(use.own), set(use.table))
                self._take_row(plan, epoch, row, beam)
            self.stats["beams"] += 1

    def _follow_rows(self, plan: StepPlan, epoch: _Epoch) -> None:
        for new in plan.new_rows:
            name = self._names.get(new.request)
            if name is None or (live := self._live.get(name)) is None:
                raise Violation(f"plan {plan.step} begins {new.request}, which has ended")
            if not live.is_started:
                live.is_started = True
                if not (new.num_computed_tokens and (new.request, new.choice) in epoch.held):
                    self._check_order(name, live)
            held = epoch.held.pop((new.request, new.choice), ())
            self._take_row(plan, epoch, new.row, _RowUse(name, new.choice, live.root, held=held))
            epoch.entries[name, new.choice] += 1
            num_excused = epoch.num_faults + epoch.num_alone
            if epoch.entries[name, new.choice] > 1 + self._config.max_preemptions + num_excused:
                raise Violation(f"{new.request}/{new.choice} enters for the {epoch.entries[name, new.choice]}th time")
            self.stats["readmissions"] += epoch.entries[name, new.choice] > 1

    def _follow_forks(self, plan: StepPlan, epoch: _Epoch) -> None:
        if not plan.fork_src:
            return
        for source, target, choice in zip(
            *map(unpack_ints, (plan.fork_src, plan.fork_dst, plan.fork_choice)), strict=True
        ):
            use = epoch.rows[source]
            self._take_row(plan, epoch, target, _RowUse(use.request, choice, use.root, table=set(use.table)))
            self._check_alive(plan, epoch, target)
            self.stats["forks"] += 1

    def _check_order(self, name: RequestName, live: _Live) -> None:
        if self._config.scheduling_policy != "fcfs":
            return
        for other, waiting in self._live.items():
            if waiting.arrival < live.arrival and not waiting.is_started:
                raise Violation(f"{name} starts before {other}, which came earlier")

    def _take_row(self, plan: StepPlan, epoch: _Epoch, row: int, use: _RowUse) -> None:
        if row in epoch.rows:
            raise Violation(f"plan {plan.step} gives row {row} to {use}, but {epoch.rows[row]} has it")
        epoch.rows[row] = use

    def _check_alive(self, plan: StepPlan, epoch: _Epoch, row: int) -> None:
        if (use := epoch.rows.get(row)) is None:
            raise Violation(f"plan {plan.step} names row {row}, which nobody has")
        live = self._live.get(use.request)
        if live is None or use.choice not in live.choices:
            raise Violation(f"plan {plan.step} names {use.request}, choice {use.choice}, which has ended")
        if not epoch.broken or use.table.isdisjoint(epoch.broken):
            return
        for block in use.table:
            if epoch.broken.get(block, use.request) != use.request:
                raise Violation(f"plan {plan.step}: {use.request} goes on from block {block}, whose values are broken")

    def _follow_blocks(self, plan: StepPlan, epoch: _Epoch) -> None:
        num_found = {new.row: epoch.limits.blocks_for(new.num_computed_tokens) for new in plan.new_rows}
        found: list[tuple[int, int]] = []
        if not plan.append_row and not plan.copy_row:
            return
        for row, block in zip(unpack_ints(plan.append_row), unpack_ints(plan.append_block), strict=True):
            if num_found.get(row, 0):
                num_found[row] -= 1
                found.append((row, block))
                epoch.rows[row].table.add(block)
            else:
                self._give_block(plan, epoch, row, block)
        for row, source, block in zip(*map(unpack_ints, (plan.copy_row, plan.copy_src, plan.copy_dst)), strict=True):
            epoch.rows[row].table.discard(source)
            self._give_block(plan, epoch, row, block)
            self.stats["copies"] += 1
        for row, block in found:
            use = epoch.rows[row]
            if block in use.held and block not in epoch.given:
                # That it holds the right tokens is seen by the worker, which reads them.
                self.stats["blocks adopted"] += 1
                epoch.block_root.setdefault(block, use.root)
                epoch.block_step.setdefault(block, plan.step)
            else:
                self._check_found(plan, epoch, row, block)

    def _give_block(self, plan: StepPlan, epoch: _Epoch, row: int, block: int) -> None:
        use = epoch.rows[row]
        use.own[block] = epoch.block_step[block] = plan.step
        use.table.add(block)
        epoch.block_root[block] = use.root
        epoch.given.add(block)
        epoch.broken.pop(block, None)

    def _check_found(self, plan: StepPlan, epoch: _Epoch, row: int, block: int) -> None:
        self.stats["blocks found"] += 1
        root = epoch.rows[row].root
        if not self._config.enable_prefix_caching or not root:
            raise Violation(f"plan {plan.step}: {epoch.rows[row]} takes no part in the cache, and found block {block}")
        if epoch.block_root.get(block) != root:
            raise Violation(
                f"plan {plan.step}: {epoch.rows[row]} found block {block} of {epoch.block_root.get(block)!r}"
            )
        if block in epoch.broken:
            raise Violation(f"plan {plan.step}: {epoch.rows[row]} found block {block}, whose values are broken")
        if epoch.block_step[block] <= epoch.reset_at:
            raise Violation(f"plan {plan.step}: block {block} was found, but the cache was reset at {epoch.reset_at}")

    def _check_progress(self, now: float) -> None:
        """A worker, requests, and nothing under way: nobody would ever wake the scheduler."""
        epoch = self._epoch
        if epoch is not None and self._live and epoch.num_sent == epoch.num_completed and now >= epoch.grace_end:
            raise Violation(f"{len(self._live)} requests, a worker, and no plan")

"""The auditor says no to what a scheduler must not do, one thing at a time; it is not enough that it says nothing."""

from collections import Counter
from typing import Any

import pytest

from octavo.scheduler.config import SchedulerConfig
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
    EmitOutput,
    EndFrontendSession,
    EndWorkerSession,
    Instruction,
    SendPlan,
)
from octavo.scheduler.simulate.checks import Auditor
from octavo.scheduler.simulate.model import make_facts
from octavo.scheduler.simulate.world import Violation
from octavo.wire.columns import pack_ints
from octavo.wire.ids import BootId, SessionId
from octavo.wire.plan import FAULT_NONFINITE_LOGITS, NewRow, RowSampling, StepPlan, StepResult
from octavo.wire.requests import (
    CancelRequest,
    ChoiceFinished,
    FailureCode,
    FinishChoice,
    FinishReason,
    RequestFailed,
    ResetPrefixCache,
    StepOutput,
    SubmitRequest,
)

EPOCH, FRONTEND = SessionId(5), SessionId(0xF)
ROOT, OTHER_ROOT = b"r" * 32, b"o" * 32


class Account:
    """An auditor with a worker of blocks of 4 tokens, and shorthands for what it is told."""

    def __init__(self, **config: Any) -> None:
        self.auditor = Auditor(SchedulerConfig(address="ipc:///unused", config_digest="d", **config), Counter())
        self.step = 0
        facts = make_facts(block_size=4, num_blocks=20, max_num_seqs=2, max_num_batched_tokens=8)
        self.tell(WorkerReady(EPOCH, facts, BootId("w")))

    def tell(self, *events: Event, then: tuple[Instruction, ...] = (), now: float = 0.0) -> None:
        self.auditor.follow(list(events), list(then), now)

    def submit(self, handle: int, root: bytes = ROOT, num_choices: int = 1) -> RequestSubmitted:
        message = SubmitRequest(handle, pack_ints([1] * 8), num_choices, 9, RowSampling(seed=0), prefix_root=root)
        return RequestSubmitted(FRONTEND, message)

    def plan(self, rows: list[int], *new: NewRow, counts: list[int] | None = None, **columns: list[int]) -> SendPlan:
        self.step += 1
        packed: dict[str, Any] = {name: pack_ints(values) for name, values in columns.items()}
        counts = counts or [1] * len(rows)
        flags = pack_ints([1] * len(rows))
        plan = StepPlan(EPOCH, self.step, pack_ints(rows), pack_ints(counts), flags, new_rows=new, **packed)
        return SendPlan(plan)

    def result(self, step: int, faults: tuple[int, ...] = ()) -> StepCompleted:
        codes = pack_ints([FAULT_NONFINITE_LOGITS] * len(faults))
        return StepCompleted(StepResult(EPOCH, step, b"", b"", pack_ints(faults), codes))


def enter(row: int, handle: int, choice: int = 0, num_computed: int = 0) -> NewRow:
    return NewRow(row, f"{FRONTEND:x}-{handle}", choice, 8, num_computed, pack_ints([1] * 8), RowSampling(seed=0))


def finished(handle: int, choice: int = 0) -> EmitOutput:
    ended = ChoiceFinished(handle, choice, FinishReason.LENGTH, 9)
    return EmitOutput(FRONTEND, StepOutput(finished=(ended,)))


def failed(handle: int, code: FailureCode = FailureCode.INVALID, message: str = "") -> EmitOutput:
    return EmitOutput(FRONTEND, StepOutput(failed=(RequestFailed(handle, code, message, 1.0),)))


def test_a_request_from_its_submission_to_its_end() -> None:
    account = Account()
    first = account.plan([0], enter(0, 1), counts=[8], append_row=[0, 0], append_block=[1, 2])
    account.tell(account.submit(1), then=(first,))
    account.tell(account.submit(2), account.result(1), then=(account.plan([0]),))
    hit = account.plan([1], enter(1, 2, num_computed=4), append_row=[1, 1], append_block=[1, 3], freed_rows=[0])
    account.tell(account.result(2), then=(hit, finished(1)))
    account.tell(account.result(3), then=(finished(2),))
    assert account.auditor.num_live == 0
    assert account.auditor.stats["blocks found"] == 1


@pytest.mark.parametrize(
    "end",
    [
        RequestCancelled(FRONTEND, CancelRequest(1)),
        ChoiceStopped(FRONTEND, FinishChoice(1, 0, 3)),
        FrontendLost(FRONTEND),
    ],
)
def test_no_plan_names_what_has_ended(end: Event) -> None:
    account = Account()
    account.tell(account.submit(1), then=(account.plan([0], enter(0, 1)),))
    with pytest.raises(Violation, match="which has ended"):
        account.tell(end, then=(account.plan([0]),))


def test_no_plan_names_a_request_that_is_told_its_end_in_the_same_call() -> None:
    account = Account()
    account.tell(account.submit(1), then=(account.plan([0], enter(0, 1)),))
    with pytest.raises(Violation, match="which has ended"):
        account.tell(account.result(1), then=(account.plan([0]), finished(1)))


def test_no_choice_that_has_ended_is_forked() -> None:
    account = Account()
    stop = ChoiceStopped(FRONTEND, FinishChoice(1, 1, 0))
    plan = account.plan([0], enter(0, 1), fork_src=[0], fork_dst=[1], fork_choice=[1])
    with pytest.raises(Violation, match="choice 1, which has ended"):
        account.tell(account.submit(1, num_choices=2), stop, then=(plan,))


@pytest.mark.parametrize("ending", [finished(1), failed(1)])
def test_nothing_ends_twice(ending: EmitOutput) -> None:
    account = Account()
    account.tell(account.submit(1), then=(account.plan([0], enter(0, 1)),))
    account.tell(account.result(1), then=(finished(1),))
    with pytest.raises(Violation, match="of what has ended"):
        account.tell(then=(ending,))


@pytest.mark.parametrize("ending", [finished(1), failed(1, FailureCode.DEADLINE)])
def test_an_end_that_crosses_a_cancel_in_one_call_is_right(ending: EmitOutput) -> None:
    account = Account()
    account.tell(account.submit(1), then=(account.plan([0], enter(0, 1)),))
    account.tell(account.result(1), RequestCancelled(FRONTEND, CancelRequest(1)), then=(ending,))


@pytest.mark.parametrize(
    ("root", "first_root", "message"),
    [(OTHER_ROOT, ROOT, "of b'rrrr"), (b"", ROOT, "takes no part"), (ROOT, b"", "found block 1 of b''")],
)
def test_nobody_finds_the_blocks_of_another_tenant(root: bytes, first_root: bytes, message: str) -> None:
    account = Account()
    first = account.plan([0], enter(0, 1), counts=[8], append_row=[0, 0], append_block=[1, 2])
    account.tell(account.submit(1, first_root), then=(first,))
    plan = account.plan([1], enter(1, 2, num_computed=4), append_row=[1, 1], append_block=[1, 3])
    with pytest.raises(Violation, match=message):
        account.tell(account.submit(2, root), then=(plan,))


def test_nobody_finds_what_was_computed_before_a_reset() -> None:
    account = Account()
    first = account.plan([0], enter(0, 1), counts=[8], append_row=[0, 0], append_block=[1, 2])
    account.tell(account.submit(1), then=(first,))
    account.tell(CacheResetRequested(FRONTEND, ResetPrefixCache(1)))
    plan = account.plan([1], enter(1, 2, num_computed=4), append_row=[1, 1], append_block=[1, 3])
    with pytest.raises(Violation, match="the cache was reset"):
        account.tell(account.submit(2), then=(plan,))


def test_nobody_finds_what_a_faulting_row_wrote_until_it_is_given_out_anew() -> None:
    for given_anew in (False, True):
        account = Account(pipeline_depth=3)
        first = account.plan([0], enter(0, 1), counts=[8], append_row=[0, 0], append_block=[1, 2])
        account.tell(account.submit(1), account.submit(3), then=(first,))
        blocks = [1, 2] if given_anew else [4, 5]
        again = account.plan([0], enter(0, 3), counts=[8], freed_rows=[0], append_row=[0, 0], append_block=blocks)
        account.tell(account.result(1, faults=(0,)), then=(again, failed(1, FailureCode.INTERNAL)))
        plan = account.plan([1], enter(1, 2, num_computed=4), append_row=[1, 1], append_block=[1, 3])
        if given_anew:
            account.tell(account.submit(2), then=(plan,))
        else:
            with pytest.raises(Violation, match="whose values are broken"):
                account.tell(account.submit(2), then=(plan,))


def test_nobody_goes_on_from_what_a_faulting_row_of_another_request_wrote() -> None:
    account = Account(pipeline_depth=3)
    first = account.plan([0], enter(0, 1), counts=[8], append_row=[0, 0], append_block=[1, 2])
    account.tell(account.submit(1), then=(first,))
    hit = account.plan([1], enter(1, 2, num_computed=4), append_row=[1, 1], append_block=[1, 3])
    account.tell(account.submit(2), then=(hit,))
    with pytest.raises(Violation, match="goes on from block 1"):
        account.tell(account.result(1, faults=(0,)), then=(account.plan([1], freed_rows=[0]), failed(1)))


def test_nobody_overtakes_under_fcfs() -> None:
    account = Account()
    plan = account.plan([0], enter(0, 2))
    with pytest.raises(Violation, match="starts before"):
        account.tell(account.submit(1), account.submit(2), then=(plan,))
    account = Account(scheduling_policy="fair")
    account.tell(account.submit(1), account.submit(2), then=(account.plan([0], enter(0, 2)),))


def test_budgets_depth_and_rows_are_kept() -> None:
    account = Account()
    account.tell(account.submit(1), then=(account.plan([0], enter(0, 1)),))
    with pytest.raises(Violation, match="computes"):
        account.tell(then=(account.plan([0], counts=[9]),))
    account = Account(long_prefill_token_threshold=2)
    with pytest.raises(Violation, match="computes"):
        account.tell(account.submit(1), then=(account.plan([0], enter(0, 1), counts=[3]),))
    account = Account(pipeline_depth=1)
    account.tell(account.submit(1), then=(account.plan([0], enter(0, 1)),))
    with pytest.raises(Violation, match="2 plans are outstanding"):
        account.tell(then=(account.plan([0]),))
    account = Account()
    news = [enter(row, row) for row in range(3)]
    with pytest.raises(Violation, match="holds 3 rows"):
        account.tell(*[account.submit(row) for row in range(3)], then=(account.plan([0, 1, 2], *news),))


def test_rows_are_given_out_once_and_freed_once() -> None:
    account = Account()
    account.tell(account.submit(1), account.submit(2), then=(account.plan([0], enter(0, 1)),))
    with pytest.raises(Violation, match="has it"):
        account.tell(account.result(1), then=(account.plan([0], enter(0, 2)),))
    account = Account()
    with pytest.raises(Violation, match="frees row 1, which nobody has"):
        account.tell(account.submit(1), then=(account.plan([0], enter(0, 1), freed_rows=[1]),))


def test_preemptions_are_bounded() -> None:
    account = Account(max_preemptions=2)
    account.tell(account.submit(1), then=(account.plan([0], enter(0, 1)),))
    for step in (1, 2):
        account.tell(account.result(step), then=(account.plan([0], enter(0, 1), freed_rows=[0]),))
    with pytest.raises(Violation, match="enters for the 4th time"):
        account.tell(account.result(3), then=(account.plan([0], enter(0, 1), freed_rows=[0]),))


def test_work_is_not_left_lying() -> None:
    account = Account()
    with pytest.raises(Violation, match="1 requests, a worker, and no plan"):
        account.tell(account.submit(1))


def test_nobody_is_sent_away_but_a_worker_that_hangs() -> None:
    account = Account()
    with pytest.raises(Violation, match="sends a frontend away"):
        account.tell(then=(EndFrontendSession(FRONTEND, "test"),))
    with pytest.raises(Violation, match="sends a worker away"):
        account.tell(then=(EndWorkerSession(EPOCH, "result of plan 3, expected 2"),))
    account.tell(then=(EndWorkerSession(EPOCH, "no step finished for 300 s"),))


def test_no_worker_is_a_reason_only_when_it_has_been_away_for_long_enough() -> None:
    away = failed(1, FailureCode.UNAVAILABLE, "no worker")
    account = Account(recovery_timeout_s=10.0)
    with pytest.raises(Violation, match="but there is a worker"):
        account.tell(account.submit(1), then=(away,))
    account = Account(recovery_timeout_s=10.0)
    account.tell(WorkerLost(EPOCH, "test"), now=100.0)
    with pytest.raises(Violation, match="without a worker"):
        account.tell(account.submit(1), then=(away,), now=109.0)
    account.tell(account.submit(1), then=(away,), now=110.0)


def test_an_empty_scheduler_refuses_nobody_for_load() -> None:
    full = failed(1, FailureCode.QUEUE_FULL)
    account = Account()
    account.tell(account.submit(2), then=(account.plan([0], enter(0, 2)),))
    account.tell(account.submit(1), then=(full,))
    with pytest.raises(Violation, match="nobody else is here"):
        Account().tell(account.submit(1), then=(full,))

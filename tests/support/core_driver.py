"""Drives the scheduler's core with the fake model, on a clock of its own, and compares every token with the solo run.

The driver plays frontends, network and worker: plans wait to be executed, results wait to be delivered, and a test says
when. After every call of the core its invariants are checked, and each plan is compared with what is still alive.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypedDict, Unpack

from octavo.scheduler.beams import BeamSearch
from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.core import Scheduler
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
)
from octavo.scheduler.simulate.model import FakeModel, FaultRule, Rule, hash_rule, told_of_prompt
from octavo.scheduler.simulate.solo import solo_run, solo_search
from octavo.wire.columns import unpack_ints
from octavo.wire.handshake import WorkerFacts
from octavo.wire.ids import BootId, SessionId
from octavo.wire.plan import StepPlan, StepResult
from octavo.wire.prefix import root_key
from octavo.wire.requests import (
    BeamParams,
    CancelRequest,
    FailureCode,
    FinishChoice,
    FinishReason,
    RequestFailed,
    ResetPrefixCache,
    StepOutput,
    SubmitRequest,
)
from tests.support.fake_frontend import Received, make_submit

FRONTEND = SessionId(7)

NOT_AGAIN = "it is not tried again"
"""Ends what the caller of a request is told that kills its workers."""


def make_config(
    *,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
    max_model_len: int | None = None,
    long_prefill_token_threshold: int = 0,
    pipeline_depth: int = 2,
    max_waiting_requests: int = 1024,
    max_waiting_tokens: int = 2**20,
    max_preemptions: int = 3,
    scheduling_policy: str = "fcfs",
    enable_prefix_caching: bool = True,
    max_requests_per_caller: int = 0,
    max_waiting_tokens_per_caller: int = 0,
) -> SchedulerConfig:
    """Return a configuration for the core alone."""
    return SchedulerConfig(
        address="ipc:///unused",
        config_digest="digest",
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        long_prefill_token_threshold=long_prefill_token_threshold,
        pipeline_depth=pipeline_depth,
        max_waiting_requests=max_waiting_requests,
        max_waiting_tokens=max_waiting_tokens,
        max_preemptions=max_preemptions,
        scheduling_policy=scheduling_policy,
        enable_prefix_caching=enable_prefix_caching,
        max_requests_per_caller=max_requests_per_caller,
        max_waiting_tokens_per_caller=max_waiting_tokens_per_caller,
    )


class SubmitOptions(TypedDict, total=False):
    """What else a request says; see `CoreDriver.prepare`."""

    frontend: SessionId
    num_choices: int
    stop_ids: Sequence[int]
    min_tokens: int
    seed: int
    deadline_s: float | None
    is_faulty: bool
    caller: str
    priority: int
    tenant: str | None
    prompt_logprobs: int
    beams: BeamParams | None


@dataclass
class Client:
    """What a test knows of one request, and what it expects."""

    frontend: SessionId
    handle: int
    message: SubmitRequest
    prompt: list[int]
    expected: list[list[int]]  # by choice: the solo run
    choices_left: set[int]
    is_faulty: bool = False
    is_gone: bool = False  # cancelled, or failed
    stopped_at: dict[int, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """As plans name it."""
        return f"{self.frontend:x}-{self.handle}"

    @property
    def is_live(self) -> bool:
        """Whether anything is still to come."""
        return not self.is_gone and bool(self.choices_left)


class CoreDriver:
    """One core with one worker, which may be lost and come back.

    Args:
        facts: of the worker.
        config: of the scheduler.
        rule: the model; default: a hash of all tokens.
        fault_rule: which rows fault.
    """

    def __init__(
        self,
        facts: WorkerFacts,
        config: SchedulerConfig | None = None,
        rule: Rule | None = None,
        fault_rule: FaultRule | None = None,
    ) -> None:
        self.config = config or make_config()
        self.facts = facts
        self.rule = rule or hash_rule(facts.vocab_size)
        self.fault_rule = fault_rule
        self.core = Scheduler(self.config)
        self.checks = True
        self.now = 1000.0
        self.epoch = SessionId(0)
        self.model: FakeModel | None = None
        self.sent: deque[StepPlan] = deque()  # not executed yet
        self.results: deque[StepResult] = deque()  # not delivered yet
        self.plans: list[StepPlan] = []
        self.clients: dict[tuple[SessionId, int], Client] = {}
        self.received: dict[SessionId, Received] = {}
        self.ended_sessions: list[EndFrontendSession | EndWorkerSession] = []
        self.deaths: list[set[str]] = []  # of each death of a worker: the names of the requests under way
        self._lost: set[str] | None = None  # the same, of a loss of which it is not known yet whether it was a death
        self._num_workers = 0
        self._row_names: dict[int, str] = {}
        self._plan_names: dict[tuple[int, int], set[str]] = {}  # of each plan, by epoch and step
        self._next_handle = 0

    # What happens outside

    def tell(self, *events: Event) -> list[Instruction]:
        """Tell the core what has happened, play the receivers of its instructions, check everything."""
        instructions = self.core.on_events(events, self.now)
        for instruction in instructions:
            match instruction:
                case SendPlan(plan):
                    self._take_plan(plan)
                case EmitOutput(frontend, output):
                    self._take_output(frontend, output)
                case EndFrontendSession() | EndWorkerSession():
                    self.ended_sessions.append(instruction)
        if self.checks:
            self.core.check()
        assert len(self.sent) + len(self.results) <= self.config.pipeline_depth
        return instructions

    def worker_ready(self, *, is_same: bool = False) -> list[Instruction]:
        """Bring a worker with nothing in it: a fresh one, or the same process with a new session."""
        self.epoch = SessionId(self.epoch + 1)
        self._num_workers += not is_same
        self._settle_deaths(is_same=is_same)
        self.model = FakeModel(self.facts, self.rule, self.fault_rule)
        self.sent.clear()
        self.results.clear()
        self._row_names.clear()
        return self.tell(WorkerReady(self.epoch, self.facts, BootId(f"w{self._num_workers}")))

    def lose_worker(self) -> list[Instruction]:
        """Let the worker be lost, with all that is under way."""
        self.model = None
        self._lost = self._under_way()
        self.sent.clear()
        self.results.clear()
        self._row_names.clear()
        return self.tell(WorkerLost(self.epoch, "test"))

    def prepare(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        frontend: SessionId = FRONTEND,
        num_choices: int = 1,
        stop_ids: Sequence[int] = (),
        min_tokens: int = 0,
        seed: int = 0,
        deadline_s: float | None = None,
        is_faulty: bool = False,
        caller: str = "",
        priority: int = 0,
        tenant: str | None = "",
        prompt_logprobs: int = -1,
        beams: BeamParams | None = None,
    ) -> Client:
        """Make a request to send, and expect its solo run."""
        self._next_handle += 1
        message = make_submit(
            self._next_handle,
            prompt,
            max_tokens,
            num_choices=num_choices,
            stop_ids=stop_ids,
            min_tokens=min_tokens,
            seed=seed,
            deadline_s=deadline_s,
            caller=caller,
            priority=priority,
            prefix_root=b"" if tenant is None else root_key("digest", tenant),
            block_size=self.facts.block_size,
            prompt_logprobs=prompt_logprobs,
            beams=beams,
        )
        expected = [
            solo_run(
                self.rule,
                prompt,
                seed=seed,
                choice=choice,
                max_output=max_tokens,
                stop_ids=stop_ids,
                min_tokens=min_tokens,
                vocab_size=self.facts.vocab_size,
            )
            for choice in range(num_choices)
        ]
        if beams is not None:
            search = BeamSearch(beams, max_tokens, min_tokens, frozenset(stop_ids))
            solo_search(self.rule, prompt, seed=seed, search=search, vocab_size=self.facts.vocab_size)
            expected = [hypothesis.ids for hypothesis in search.best(num_choices)]
        client = Client(
            frontend, message.handle, message, list(prompt), expected, set(range(num_choices)), is_faulty=is_faulty
        )
        self.clients[frontend, message.handle] = client
        return client

    def submit_all(self, *clients: Client) -> None:
        """Send prepared requests in one turn of the core."""
        self.tell(*(RequestSubmitted(client.frontend, client.message) for client in clients))

    def submit(self, prompt: Sequence[int], max_tokens: int, **how: Unpack[SubmitOptions]) -> Client:
        """Prepare a request and send it; see `prepare`."""
        client = self.prepare(prompt, max_tokens, **how)
        self.submit_all(client)
        return client

    def cancel(self, client: Client) -> None:
        """The caller goes away."""
        self.tell()  # what is due now comes first
        if not client.is_live:
            return
        client.is_gone = True
        self.tell(RequestCancelled(client.frontend, CancelRequest(client.handle)))

    def stop_choice(self, client: Client, choice: int) -> None:
        """The frontend finds a stop string at the newest token."""
        self.tell()
        if not client.is_live:
            return
        client.choices_left.discard(choice)
        num_tokens = len(self.tokens(client, choice))
        client.stopped_at[choice] = num_tokens
        self.tell(ChoiceStopped(client.frontend, FinishChoice(client.handle, choice, num_tokens)))

    def replay(self, frontend: SessionId, new_frontend: SessionId) -> None:
        """A frontend loses its session and sends what is live again in a new one, with the ids that it has."""
        self.tell()
        live = [c for c in self.clients.values() if c.frontend == frontend and c.is_live]
        old = self.received.pop(frontend, Received())
        for client in self.clients.values():
            client.is_gone = client.is_gone or client.frontend == frontend
        self.tell(FrontendLost(frontend))
        for client in live:
            outputs = [old.tokens[client.handle, choice] for choice in range(len(client.expected))]
            finished = set(range(len(client.expected))) - client.choices_left
            self._next_handle += 1
            params, told = client.message, old.prompts[client.handle]
            message = make_submit(
                self._next_handle,
                client.prompt,
                params.max_tokens,
                num_choices=params.num_choices,
                stop_ids=unpack_ints(params.stop_token_ids),
                min_tokens=params.sampling.min_tokens,
                seed=params.sampling.seed,
                output_ids=outputs,
                finished=sorted(finished),
                caller=params.caller,
                priority=params.priority,
                prefix_root=params.prefix_root,
                block_size=self.facts.block_size,
                prompt_logprobs=params.sampling.prompt_logprobs,
                num_prompt_told=old.num_prompt_told(client.handle) if told else 0,
                beams=params.beams,
            )
            again = Client(
                new_frontend,
                message.handle,
                message,
                client.prompt,
                client.expected,
                set(client.choices_left),
                client.is_faulty,
            )
            self.clients[new_frontend, message.handle] = again
            if told:
                self._received(new_frontend).prompts[message.handle] = told
            for choice, ids in enumerate(outputs):
                self._received(new_frontend).resume(message.handle, choice, ids)
            self.tell(RequestSubmitted(new_frontend, message))

    def reset_cache(self) -> int:
        """An operator resets the prefix cache; return how many blocks could be found until then."""
        self._next_handle += 1
        instructions = self.tell(CacheResetRequested(FRONTEND, ResetPrefixCache(self._next_handle)))
        (answer,) = [i for i in instructions if isinstance(i, AnswerCacheReset)]
        assert (answer.frontend, answer.answer.tag_id) == (FRONTEND, self._next_handle)
        assert self.core.figures.num_cached_blocks == 0
        return answer.answer.num_blocks

    def execute(self) -> bool:
        """Let the worker execute its next plan; False if there is none."""
        if self.model is None or not self.sent:
            return False
        self.results.append(self.model.execute(self.sent.popleft()))
        return True

    def deliver(self) -> bool:
        """Deliver the next result; False if there is none."""
        if not self.results:
            return False
        self.tell(StepCompleted(self.results.popleft()))
        return True

    def step(self) -> bool:
        """Execute and deliver one plan; False if there is none."""
        return self.execute() and self.deliver()

    def step_until(self, condition: Callable[[], object]) -> None:
        """Execute and deliver plans until a condition holds."""
        while not condition():
            assert self.step(), "no plan is under way, and the condition does not hold"

    def drain(self) -> None:
        """Run until all requests have ended; then everything must be free."""
        if self.model is None:
            self.worker_ready()
        work = sum(len(c.prompt) + sum(map(len, c.expected)) for c in self.clients.values())
        for _ in range(20 * work + 100):
            if not any(c.is_live for c in self.clients.values()):
                break
            if self.results:
                self.deliver()
            else:
                assert self.execute(), "live requests, but no plan is under way"
        assert not any(c.is_live for c in self.clients.values()), "requests do not end"
        while self.execute() or self.deliver():
            pass
        figures = self.core.figures
        assert (figures.num_requests, figures.num_running, figures.num_waiting) == (0, 0, 0)
        assert figures.num_free_blocks == self.facts.num_blocks - 1
        assert self.core.next_timer is None

    # What tests look at

    def tokens(self, client: Client, choice: int = 0) -> list[int]:
        """Return what has been received for a choice."""
        return self._received(client.frontend).tokens[client.handle, choice]

    def num_cached(self, client: Client) -> int:
        """Return how many tokens of its prompt a request was told to have found in the cache."""
        return self._received(client.frontend).started[client.handle].num_cached_tokens

    def failure(self, client: Client) -> RequestFailed:
        """Return how a request failed."""
        return self._received(client.frontend).failed[client.handle]

    def reason(self, client: Client, choice: int = 0) -> FinishReason:
        """Return how a choice ended."""
        return self._received(client.frontend).finished[client.handle, choice].reason

    def _received(self, frontend: SessionId) -> Received:
        return self.received.setdefault(frontend, Received())

    def _take_plan(self, plan: StepPlan) -> None:
        assert plan.epoch == self.epoch
        for row in unpack_ints(plan.freed_rows):
            del self._row_names[row]
        for new in plan.new_rows:
            self._row_names[new.row] = new.request
        for source, target in zip(unpack_ints(plan.fork_src), unpack_ints(plan.fork_dst), strict=True):
            self._row_names[target] = self._row_names[source]
        for row, source, _ in beams_of(plan):
            self._row_names[row] = self._row_names[source]
        alive = {c.name for c in self.clients.values() if c.is_live}
        for row in unpack_ints(plan.row):
            assert self._row_names[row] in alive, f"plan {plan.step} names {self._row_names[row]}, which has ended"
        self._plan_names[plan.epoch, plan.step] = {self._row_names[row] for row in unpack_ints(plan.row)}
        self.sent.append(plan)
        self.plans.append(plan)

    def _take_output(self, frontend: SessionId, output: StepOutput) -> None:
        received = self._received(frontend)
        received.take(output)
        self._check_told(frontend, output)
        touched = zip(unpack_ints(output.handle), unpack_ints(output.choice), strict=True)
        for handle, choice in set(touched):
            client = self.clients[frontend, handle]
            assert not client.is_gone, f"output for {client.name}, which is gone"
            assert choice in client.choices_left, f"output for choice {choice} of {client.name}, which has ended"
            got = received.tokens[handle, choice]
            assert got == client.expected[choice][: len(got)], f"{client.name}/{choice} differs from its solo run"
        for finished in output.finished:
            client = self.clients[frontend, finished.handle]
            expected = client.expected[finished.choice]
            if client.message.sampling.prompt_logprobs >= 0:
                assert received.num_prompt_told(finished.handle) == len(client.prompt), "the prompt was not told whole"
            assert received.tokens[finished.handle, finished.choice] == expected, "ended early"
            is_stop = bool(expected) and expected[-1] in unpack_ints(client.message.stop_token_ids)
            is_stop = is_stop and len(expected) > client.message.sampling.min_tokens
            assert finished.reason == (FinishReason.STOP if is_stop else FinishReason.LENGTH)
            client.choices_left.discard(finished.choice)
        for failed in output.failed:
            client = self.clients[frontend, failed.handle]
            assert client.is_live, f"{failed} after the end"
            if failed.message.endswith(NOT_AGAIN):
                assert self.is_convicted(client), f"{failed}, deaths {self.deaths}"
            else:
                assert client.is_faulty or failed.code is not FailureCode.INTERNAL, f"{failed} without a fault"
            client.is_gone = True

    def is_convicted(self, client: Client) -> bool:
        """Whether a request was under way at three deaths of workers, and alone at the newest."""
        at = [death for death in self.deaths if client.name in death]
        return len(at) >= 3 and self.deaths[-1] == {client.name}

    def _under_way(self) -> set[str]:
        """Return the names of the requests of which plans are outstanding, and which have not ended."""
        alive = {c.name for c in self.clients.values() if c.is_live}
        steps = [plan.step for plan in self.sent] + [result.step for result in self.results]
        return set().union(*(self._plan_names[self.epoch, step] for step in steps)) & alive

    def _settle_deaths(self, *, is_same: bool) -> None:
        if self._lost is not None and not is_same:
            self.deaths.append(self._lost)
        self._lost = None

    def _check_told(self, frontend: SessionId, output: StepOutput) -> None:
        for told in output.prompt_logprobs:
            client = self.clients[frontend, told.of]
            assert client.is_live, f"log-probabilities of {client.name}, which is gone"
            end, top = told.first_position + told.count, client.message.sampling.prompt_logprobs
            assert top >= 0, "nobody asked"
            assert told == told_of_prompt(
                told.of, client.prompt, told.first_position, end, top, self.facts.vocab_size
            ), f"log-probabilities of the prompt of {client.name} differ"


# Plans as tests look at them


def rows_of(plan: StepPlan) -> list[tuple[int, int, int]]:
    """Return (row, tokens, flags) of a plan."""
    return list(zip(*map(unpack_ints, (plan.row, plan.num_tokens, plan.flags)), strict=True))


def copies_of(plan: StepPlan) -> list[tuple[int, int, int]]:
    """Return (row, source, target) of a plan's copies."""
    return list(zip(*map(unpack_ints, (plan.copy_row, plan.copy_src, plan.copy_dst)), strict=True))


def forks_of(plan: StepPlan) -> list[tuple[int, int, int]]:
    """Return (source row, target row, choice) of a plan's forks."""
    return list(zip(*map(unpack_ints, (plan.fork_src, plan.fork_dst, plan.fork_choice)), strict=True))


def beams_of(plan: StepPlan) -> list[tuple[int, int, int]]:
    """Return (row, source row, id) of a plan's beams."""
    return list(zip(*map(unpack_ints, (plan.beam_row, plan.beam_src, plan.beam_token)), strict=True))


def appended_to(plan: StepPlan, row: int) -> list[int]:
    """Return the blocks that a plan appends to a row's table."""
    pairs = zip(unpack_ints(plan.append_row), unpack_ints(plan.append_block), strict=True)
    return [block for r, block in pairs if r == row]


@dataclass(frozen=True)
class Entry:
    """One time that a sequence takes a row."""

    step: int
    choice: int
    num_computed: int
    blocks: list[int]
    """Those that the same plan appends: found ones first."""


def entries_of(driver: CoreDriver, client: Client) -> list[Entry]:
    """Return when a request's sequences took rows by themselves, and what they found."""
    return [
        Entry(plan.step, new.choice, new.num_computed_tokens, appended_to(plan, new.row))
        for plan in driver.plans
        for new in plan.new_rows
        if new.request == client.name
    ]

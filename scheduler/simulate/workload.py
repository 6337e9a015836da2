"""What callers ask for: jobs with everything that will happen to them, and what each must get."""

import zlib
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from random import Random

from octavo.scheduler.beams import BeamSearch, Hypothesis
from octavo.scheduler.config import Limits
from octavo.scheduler.groups import most_blocks
from octavo.scheduler.simulate.model import hash_rule
from octavo.scheduler.simulate.scenario import DIGEST, VOCAB_SIZE, Traffic
from octavo.scheduler.simulate.solo import solo_search
from octavo.scheduler.simulate.world import Violation
from octavo.wire.columns import pack_ints
from octavo.wire.handshake import ServiceFacts
from octavo.wire.plan import RowSampling
from octavo.wire.prefix import prompt_keys, root_key
from octavo.wire.requests import (
    BeamParams,
    ChoiceFinished,
    FailureCode,
    RequestFailed,
    SubmitRequest,
    num_candidates,
)

_SICK_BIT, _DEADLY_BIT = 1 << 40, 1 << 41
"""Set in the seeds of sick and of deadly jobs; the bits below tell which choice is it from which length on."""

NOT_AGAIN = "it is not tried again"
"""Ends the message of a request that is given up because workers died of it."""

ROOTS = (root_key(DIGEST, "tenant a"), root_key(DIGEST, "tenant b"))


class Oracle:
    """The solo run of one choice, one id at a time: the same ids as `model.solo_run` with `hash_rule`.

    Args:
        prompt_ids: column of int32.
        seed: of the request.
        choice: which one.
        stop_ids: held back before `min_tokens`.
        min_tokens: least output.
    """

    __slots__ = ("_crc", "_masked", "_min_tokens", "_num_output")

    def __init__(self, prompt_ids: bytes, seed: int, choice: int, stop_ids: Sequence[int], min_tokens: int) -> None:
        self._crc = zlib.crc32(prompt_ids, zlib.crc32(f"{seed}/{choice}".encode()))
        self._masked = stop_ids
        self._min_tokens = min_tokens
        self._num_output = 0

    def next(self) -> int:
        """Return the next id."""
        token = self._crc % VOCAB_SIZE
        if self._num_output < self._min_tokens:
            while token in self._masked:
                token = (token + 1) % VOCAB_SIZE
        self._crc = zlib.crc32(token.to_bytes(4, "little"), self._crc)
        self._num_output += 1
        return token


class Finder:
    """The solo run of a search, made when its first id is asked for.

    Args:
        prompt: ids.
        seed: of the request.
        search: what has not begun.
        count: how many continuations come back.
    """

    def __init__(self, prompt: Sequence[int], seed: int, search: BeamSearch, count: int) -> None:
        self._prompt, self._seed = prompt, seed
        self._search, self._count = search, count

    @cached_property
    def found(self) -> list[Hypothesis]:
        """The best continuations."""
        rule = hash_rule(VOCAB_SIZE)
        solo_search(rule, self._prompt, seed=self._seed, search=self._search, vocab_size=VOCAB_SIZE)
        return self._search.best(self._count)


class FoundIds:
    """One continuation that a search finds, one id at a time."""

    __slots__ = ("_finder", "_index", "_num_output")

    def __init__(self, finder: Finder, index: int) -> None:
        self._finder = finder
        self._index = index
        self._num_output = 0

    def next(self) -> int:
        """Return the next id, -1 behind the last."""
        ids = self._finder.found[self._index].ids
        self._num_output += 1
        return ids[self._num_output - 1] if self._num_output <= len(ids) else -1


@dataclass(slots=True, eq=False)
class Choice:
    """One choice of a job: what has come of it."""

    oracle: Oracle | FoundIds
    ids: "array[int]" = field(default_factory=lambda: array("i"))
    num_logprobs: int = 0
    stop_at: int | None = None
    """Tokens at which the frontend finds a stop string; 0: it ends the choice at once."""
    is_finished: bool = False


@dataclass(slots=True, eq=False)
class Job:
    """One request, as its frontend holds it.

    Attributes:
        cancel_at: tokens, of all choices, at which the caller goes away; None: it stays.
        cancel_after_s: seconds after which the caller goes away.
        sick: choice and length from which on its values are broken.
        is_deadly: whether it kills its worker there instead.
        is_wrong: whether admission must refuse it.
        outcome: how it ended; None while it lives.
    """

    prompt: list[int]
    prompt_ids: bytes
    num_choices: int
    max_tokens: int
    sampling: RowSampling
    stop_ids: tuple[int, ...]
    caller: str
    priority: int
    root: bytes
    deadline_s: float | None
    cancel_at: int | None
    cancel_after_s: float | None
    sick: tuple[int, int] | None
    is_wrong: bool
    is_deadly: bool = False
    beams: BeamParams | None = None
    finder: Finder | None = None
    choices: list[Choice] = field(default_factory=list)
    handle: int = -1
    submitted_at: float = 0.0
    num_prompt_told: int = 1
    num_received: int = 0
    started_in: int = 0
    """Session in which its start was told."""
    outcome: str | None = None

    @property
    def is_replay(self) -> bool:
        """Whether it has started in any session: from then on it must not be refused for load."""
        return self.started_in != 0

    @property
    def num_sequences(self) -> int:
        """Choices, or beams."""
        return self.num_choices if self.beams is None else self.beams.width

    def exceeds(self, limits: Limits) -> bool:
        """Say whether it can never run with these limits."""
        if len(self.prompt) + self.max_tokens > limits.max_model_len:
            return True
        if self.beams is None:
            return False
        most = most_blocks(len(self.prompt), self.max_tokens, self.beams.width, limits.block_size)
        return self.beams.width > limits.max_num_seqs or most >= limits.num_blocks

    def objection(
        self, event: RequestFailed, limits: Sequence[Limits], now: float, *, is_deadly_world: bool
    ) -> str | None:
        """Return why it must not fail like this, None if it may.

        Args:
            event: the failure.
            limits: of the service, one or the other.
            now: seconds.
            is_deadly_world: whether workers die of something else than requests.
        """
        match event.code:
            case FailureCode.INVALID:
                return None if self.is_wrong or any(map(self.exceeds, limits)) else "it is valid"
            case FailureCode.INTERNAL if event.message.endswith(NOT_AGAIN):
                return None if self.is_deadly or is_deadly_world else "it kills nobody, and nothing else does"
            case FailureCode.INTERNAL:
                return None if self.sick is not None and not self.is_deadly else "it is not sick"
            case FailureCode.DEADLINE:
                is_over = self.deadline_s is not None and now >= self.submitted_at + self.deadline_s
                return None if is_over else "its time is not over"
            case FailureCode.QUEUE_FULL | FailureCode.CALLER_LIMIT if self.is_replay:
                return "it has started before"
            case FailureCode.QUEUE_FULL | FailureCode.CALLER_LIMIT | FailureCode.UNAVAILABLE:
                return None if event.retry_after_s > 0 or "smaller" in event.message else "when to come back?"

    def forget_output(self) -> None:
        """Wait for all of a search's output anew."""
        if self.finder is not None:
            self.num_received = 0
            self.choices = [Choice(FoundIds(self.finder, index)) for index in range(self.num_choices)]

    def check_logprob(self, event: ChoiceFinished) -> None:
        """Compare the log-probability of a choice with the solo run's.

        Raises:
            Violation: they differ.
        """
        if self.finder is not None and event.cumulative_logprob != self.finder.found[event.choice].logprob:
            raise Violation(f"job {self.handle}: {event}, alone it is {self.finder.found[event.choice]}")

    def to_request(self, facts: ServiceFacts, now: float) -> SubmitRequest:
        """Return what begins it, or goes on with it."""
        is_shared = facts.prefix_caching and self.root
        return SubmitRequest(
            handle=self.handle,
            prompt_ids=self.prompt_ids,
            num_choices=self.num_choices,
            max_tokens=self.max_tokens,
            sampling=self.sampling,
            stop_token_ids=pack_ints(self.stop_ids),
            output_ids=tuple(b"" if self.beams else c.ids.tobytes() for c in self.choices) if self.is_replay else (),
            finished_choices=pack_ints(i for i, choice in enumerate(self.choices) if choice.is_finished),
            deadline_s=None if self.deadline_s is None else max(0.0, self.submitted_at + self.deadline_s - now),
            caller=self.caller,
            priority=self.priority,
            prefix_root=self.root if is_shared else b"",
            prefix_keys=prompt_keys(self.root, self.prompt_ids, facts.block_size) if is_shared else b"",
            num_prompt_told=self.num_prompt_told,
            beams=self.beams,
        )


def is_sick(ids: Sequence[int], seed: int, choice: int) -> bool:
    """Say whether what a row writes is broken: the fault rule of the simulated model."""
    return bool(seed & _SICK_BIT) and (seed >> 32) & 0xF == choice and len(ids) >= seed >> 16 & 0xFFFF


def is_deadly(ids: Sequence[int], seed: int, choice: int) -> bool:
    """Say whether a row kills its worker: the kill rule of the simulated model."""
    return bool(seed & _DEADLY_BIT) and (seed >> 32) & 0xF == choice and len(ids) >= seed >> 16 & 0xFFFF


def make_seed(base: int, sick: tuple[int, int] | None, *, kills: bool = False) -> int:
    """Return a seed that makes a job sick, or deadly, or neither."""
    if sick is None:
        return base
    return base | sick[1] << 16 | sick[0] << 32 | (_DEADLY_BIT if kills else _SICK_BIT)


class Workload:
    """Draws jobs. Prompts share beginnings, and go on where earlier answers ended, so that blocks are found again."""

    def __init__(self, random: Random, traffic: Traffic, uses_priorities: bool) -> None:
        self._random = random
        self._traffic = traffic
        self._uses_priorities = uses_priorities
        self._stems = [[random.randrange(VOCAB_SIZE) for _ in range(128)] for _ in range(random.randint(1, 3))]
        self._answers: deque[list[int]] = deque(maxlen=8)

    def remember(self, job: Job) -> None:
        """Let a later prompt begin with a job's prompt and answer."""
        if job.choices[0].ids and not job.is_wrong:
            self._answers.append([*job.prompt, *job.choices[0].ids])

    def make(self, facts: ServiceFacts) -> Job:
        """Draw a job that fits the service, or is wrong on purpose."""
        random, traffic = self._random, self._traffic
        prompt = self._draw_prompt(facts)
        max_tokens = random.randint(1, max(1, min(traffic.max_output, facts.max_model_len - len(prompt))))
        tells_prompt = random.random() < traffic.prompt_logprobs
        if tells_prompt and random.random() < 0.3:
            max_tokens = 0
        num_choices = random.randint(2, 4) if random.random() < traffic.choices else 1
        stop_ids = tuple(random.sample(range(VOCAB_SIZE), random.choice([0, 0, 1, 3])))
        min_tokens = random.randint(0, max_tokens) if random.random() < 0.2 else 0
        sick = None
        kills = random.random() < traffic.deadly
        if kills or random.random() < traffic.sick:
            sick = (random.randrange(num_choices), random.randint(1, len(prompt) + max_tokens))
        is_wrong = random.random() < traffic.wrong
        if is_wrong:
            prompt[random.randrange(len(prompt))] = random.choice([-1, VOCAB_SIZE, 2**31 - 1])
        prompt_ids = pack_ints(prompt)
        seed = make_seed(random.randrange(4), sick, kills=kills)
        total = max_tokens * num_choices
        job = Job(
            prompt=prompt,
            prompt_ids=prompt_ids,
            num_choices=num_choices,
            max_tokens=max_tokens,
            sampling=RowSampling(
                seed=seed,
                min_tokens=min_tokens,
                stop_token_ids=pack_ints(stop_ids),
                logprobs=random.randint(0, 3) if random.random() < traffic.logprobs else -1,
                prompt_logprobs=random.randint(0, 2) if tells_prompt else -1,
            ),
            stop_ids=stop_ids,
            caller=random.choice(["a", "a", "b", "c"]),
            priority=random.choice([-1, 0, 0, 1, 5]) if self._uses_priorities else 0,
            root=b"" if random.random() < traffic.unshared else random.choice(ROOTS),
            deadline_s=random.choice([0.0, 0.2, 2.0, 20.0]) if random.random() < traffic.deadlines else None,
            cancel_at=random.randint(0, total) if random.random() < traffic.cancels else None,
            cancel_after_s=random.choice([0.002, 0.05, 1.0, 30.0]) if random.random() < traffic.cancels / 2 else None,
            sick=sick,
            is_wrong=is_wrong,
            is_deadly=kills,
        )
        for index in range(num_choices):
            choice = Choice(Oracle(prompt_ids, seed, index, stop_ids, min_tokens))
            if max_tokens and random.random() < traffic.stops:
                choice.stop_at = random.randint(max(1, min_tokens), max_tokens)
            job.choices.append(choice)
        if num_choices > 1 and random.random() < traffic.stops / 2:
            random.choice(job.choices).stop_at = 0
        if random.random() < traffic.beams:
            self._search(job, facts)
        return job

    def _search(self, job: Job, facts: ServiceFacts) -> None:
        """Make a job a search, which mostly fits."""
        random = self._random
        width = random.randint(1, max(1, min(4, facts.max_num_seqs)) + (random.random() < 0.05))
        room = max(1, (facts.max_model_len - len(job.prompt)) // width)
        job.num_choices = random.randint(1, width)
        job.max_tokens = random.randint(1, max(1, min(job.max_tokens, room)))
        job.beams = BeamParams(width, random.choice([1.0, 0.0, 2.0, -1.0]), random.random() < 0.5)
        if job.sick is not None:
            job.sick = (0, job.sick[1])
        job.sampling = RowSampling(
            seed=make_seed(random.randrange(4), job.sick, kills=job.is_deadly),
            temperature=0.0,
            min_tokens=min(job.sampling.min_tokens, job.max_tokens),
            logprobs=num_candidates(job.beams, len(job.stop_ids)),
        )
        search = BeamSearch(job.beams, job.max_tokens, job.sampling.min_tokens, frozenset(job.stop_ids))
        job.finder = Finder(job.prompt, job.sampling.seed, search, job.num_choices)
        job.forget_output()

    def _draw_prompt(self, facts: ServiceFacts) -> list[int]:
        random = self._random
        longest = min(self._traffic.max_prompt, facts.max_model_len - 1)
        size = facts.block_size
        if self._answers and random.random() < 0.25:
            prompt = list(random.choice(self._answers))
            prompt = prompt[: random.randint(1, longest)]
        else:
            stem = random.choice(self._stems)
            length = random.randint(0, longest // size) * size + random.randint(-1, 1)
            prompt = stem[: max(0, min(length, longest))]
        room = longest - len(prompt)
        if room > 0 and random.random() < 0.5:
            prompt += [random.randrange(VOCAB_SIZE) for _ in range(random.randint(1, min(room, 2 * size)))]
        return prompt or [random.randrange(VOCAB_SIZE)]

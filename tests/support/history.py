"""What one client saw of one request, and the judge who knows what it must have seen.

The judge knows the undisturbed answer. Whatever was killed meanwhile: positions are contiguous from 0, nothing comes twice,
ids and text are those of the undisturbed run (all of them if the request ended well, else a beginning), every choice ends
once, the usage is exact, and after the one terminal status nothing follows (I11, I12, I13, I16).
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from octavo.v1 import generation_pb2 as pb

OK, CANCELLED, UNAVAILABLE = "OK", "CANCELLED", "UNAVAILABLE"


@dataclass(frozen=True)
class Ask:
    """A request, as every door can put it."""

    name: str
    prompt: tuple[int, ...]
    max_tokens: int
    n: int = 1
    seed: int = 0
    temperature: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    stop_strings: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = True

    def to_grpc(self) -> pb.GenerationInput:
        """Return the request for gRPC."""
        return pb.GenerationInput(
            token_ids=pb.TokenIds(ids=self.prompt),
            sampling=pb.SamplingParams(
                n=self.n,
                seed=self.seed,
                temperature=self.temperature,
                frequency_penalty=self.frequency_penalty,
                repetition_penalty=self.repetition_penalty,
            ),
            stopping=pb.StoppingParams(
                max_tokens=self.max_tokens,
                min_tokens=self.min_tokens,
                stop_strings=self.stop_strings,
                stop_token_ids=self.stop_ids,
                ignore_eos=self.ignore_eos,
            ),
            output=pb.OutputOptions(token_ids=True),
        )

    def to_http(self, model: str, stream: bool) -> dict[str, Any]:
        """Return the body for /v1/completions."""
        body: dict[str, Any] = {
            "model": model,
            "prompt": list(self.prompt),
            "max_tokens": self.max_tokens,
            "n": self.n,
            "seed": self.seed,
            "temperature": self.temperature,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
            "min_tokens": self.min_tokens,
            "stop": list(self.stop_strings) or None,
            "stop_token_ids": list(self.stop_ids),
            "ignore_eos": self.ignore_eos,
            "return_token_ids": True,
            "stream": stream,
        }
        if stream:
            body["stream_options"] = {"include_usage": True}
        return body


@dataclass(frozen=True)
class Started:
    """The request runs."""

    at: float
    prompt_tokens: int


@dataclass(frozen=True)
class Delta:
    """What is new of a choice; `first` is the position of its first id, None where the door does not say."""

    at: float
    choice: int
    first: int | None
    ids: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class End:
    """A choice ends; `num_tokens` is None where the door does not say."""

    at: float
    choice: int
    reason: str
    num_tokens: int | None


@dataclass(frozen=True)
class UsageTold:
    """What the request has used."""

    at: float
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class Status:
    """The terminal status."""

    at: float
    code: str
    detail: str = ""


Event: TypeAlias = Started | Delta | End | UsageTold | Status


@dataclass(eq=False)
class History:
    """Everything that a client saw of a request, in order and unchecked."""

    ask: Ask
    door: str
    frontend: int
    began: float
    cancels: bool = False
    events: list[Event] = field(default_factory=list)

    @property
    def status(self) -> Status | None:
        return next((event for event in self.events if isinstance(event, Status)), None)

    @property
    def ended(self) -> float:
        return self.events[-1].at if self.events else self.began

    @property
    def num_tokens(self) -> int:
        return sum(len(event.ids) for event in self.events if isinstance(event, Delta))

    @property
    def token_times(self) -> list[float]:
        return [event.at for event in self.events if isinstance(event, Delta) and event.ids]

    def __str__(self) -> str:
        return f"{self.ask.name} through {self.door} at frontend {self.frontend}, {len(self.events)} events"


@dataclass(frozen=True)
class Told:
    """The undisturbed answer of one choice."""

    ids: tuple[int, ...]
    text: str
    reason: str


@dataclass(frozen=True)
class Expected:
    """The undisturbed answer."""

    choices: tuple[Told, ...]

    @staticmethod
    def of(history: History) -> "Expected":
        """Return what an undisturbed client saw.

        Raises:
            AssertionError: it was disturbed.
        """
        ids: dict[int, list[int]] = {index: [] for index in range(history.ask.n)}
        text, reasons = dict.fromkeys(ids, ""), dict.fromkeys(ids, "")
        for event in history.events:
            if isinstance(event, Delta):
                ids[event.choice] += event.ids
                text[event.choice] += event.text
            elif isinstance(event, End):
                reasons[event.choice] = event.reason
        found = Expected(tuple(Told(tuple(ids[i]), text[i], reasons[i]) for i in ids))
        assert (wrong := judge(history, found)) == [], wrong
        return found


def judge(history: History, expected: Expected, may_fail: Collection[str] = ()) -> list[str]:
    """Return what a client saw and must not have seen; empty if all is well.

    Args:
        history: what it saw.
        expected: the undisturbed answer.
        may_fail: statuses that its frontend's death, say, excuses.
    """
    return [f"{history}: {wrong}" for wrong in (*_Trial(history, expected).order(), *_ending(history, may_fail))]


def _ending(history: History, may_fail: Collection[str]) -> list[str]:
    statuses = [event for event in history.events if isinstance(event, Status)]
    if len(statuses) != 1:
        return [f"{len(statuses)} terminal statuses"]
    wrong = []
    if not isinstance(history.events[-1], Status):
        wrong.append(f"{history.events[-1]} came after the terminal status")
    allowed = {OK, *may_fail} | ({CANCELLED} if history.cancels else set())
    if statuses[0].code not in allowed:
        wrong.append(f"it ended {statuses[0].code}: {statuses[0].detail}")
    return wrong


class _Trial:
    """Goes through a history in order."""

    def __init__(self, history: History, expected: Expected) -> None:
        self._history = history
        self._expected = expected
        choices = range(history.ask.n)
        self._ids: Mapping[int, list[int]] = {index: [] for index in choices}
        self._text = dict.fromkeys(choices, "")
        self._ends: dict[int, End] = {}
        self._started: Started | None = None
        self._usage: UsageTold | None = None
        self._wrong: list[str] = []

    def order(self) -> list[str]:
        for event in self._history.events:
            match event:
                case Started():
                    self._on_started(event)
                case Delta():
                    self._on_delta(event)
                case End():
                    self._on_end(event)
                case UsageTold():
                    self._on_usage(event)
                case Status(code=code):
                    if code == OK:
                        self._on_ok()
        return self._wrong

    def _on_started(self, event: Started) -> None:
        if self._started is not None or any(self._ids.values()):
            self._wrong.append("it started twice, or after its first token")
        self._started = event
        if event.prompt_tokens != len(self._history.ask.prompt):
            self._wrong.append(f"{event.prompt_tokens} prompt tokens of {len(self._history.ask.prompt)}")

    def _on_delta(self, event: Delta) -> None:
        if event.choice not in self._ids:
            self._wrong.append(f"choice {event.choice} of {self._history.ask.n}")
            return
        if event.choice in self._ends:
            self._wrong.append(f"{event} came after the end of its choice")
        ids, told = self._ids[event.choice], self._expected.choices[event.choice]
        if event.ids and event.first is not None and event.first != len(ids):
            self._wrong.append(f"position {event.first} came after position {len(ids) - 1} of choice {event.choice}")
        begin = len(ids)
        ids += event.ids
        self._text[event.choice] += event.text
        if tuple(ids) != told.ids[: len(ids)]:
            wanted = told.ids[begin : begin + len(event.ids)]
            self._wrong.append(f"choice {event.choice}, from position {begin}: {event.ids}, expected {wanted}")
        if not told.text.startswith(self._text[event.choice]):
            self._wrong.append(f"choice {event.choice}: text {event.text!r} is none of the undisturbed answer's")

    def _on_end(self, event: End) -> None:
        if event.choice in self._ends or event.choice not in self._ids:
            self._wrong.append(f"choice {event.choice} ended twice, or is none")
            return
        self._ends[event.choice] = event
        told = self._expected.choices[event.choice]
        if event.reason != told.reason:
            self._wrong.append(f"choice {event.choice} ended for {event.reason}, expected {told.reason}")
        if event.num_tokens not in (None, len(told.ids)):
            self._wrong.append(f"choice {event.choice} ended with {event.num_tokens} tokens, expected {len(told.ids)}")

    def _on_usage(self, event: UsageTold) -> None:
        if self._usage is not None:
            self._wrong.append("the usage came twice")
        self._usage = event
        wanted = (len(self._history.ask.prompt), sum(len(told.ids) for told in self._expected.choices))
        if (event.prompt_tokens, event.completion_tokens) != wanted:
            self._wrong.append(f"usage {event.prompt_tokens} + {event.completion_tokens}, expected {wanted}")

    def _on_ok(self) -> None:
        for index, told in enumerate(self._expected.choices):
            if index not in self._ends:
                self._wrong.append(f"it ended OK, but choice {index} did not end")
            if tuple(self._ids[index]) != told.ids:
                self._wrong.append(f"choice {index} ended with {len(self._ids[index])} of {len(told.ids)} ids")
            if self._text[index] != told.text:
                self._wrong.append(f"choice {index}: text {self._text[index]!r}, expected {told.text!r}")
        if self._usage is None:
            self._wrong.append("it ended OK without its usage")

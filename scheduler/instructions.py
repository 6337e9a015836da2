"""What the core wants done outside, in this order."""

from dataclasses import dataclass, field
from typing import TypeAlias

from octavo.scheduler.adoption import Adopted
from octavo.wire.ids import SessionId
from octavo.wire.plan import StepPlan
from octavo.wire.requests import PrefixCacheReset, StepOutput


@dataclass(frozen=True, slots=True)
class SendPlan:
    """Send a plan to the worker whose epoch it names."""

    plan: StepPlan


@dataclass(frozen=True, slots=True)
class EmitOutput:
    """Send a frontend all that is new for it; at most one for each frontend and call of the core."""

    frontend: SessionId
    output: StepOutput


@dataclass(frozen=True, slots=True)
class EndWorkerSession:
    """Take leave of a worker that cannot be trusted or does not answer; the core has given it up already."""

    epoch: SessionId
    reason: str
    cause: str = field(default="protocol", compare=False)  # or step_timeout; for metrics


@dataclass(frozen=True, slots=True)
class EndFrontendSession:
    """Take leave of a frontend that broke the contract; the core has cancelled its requests already."""

    frontend: SessionId
    reason: str
    cause: str = field(default="protocol", compare=False)


@dataclass(frozen=True, slots=True)
class AnswerCacheReset:
    """Tell a frontend that its reset of the prefix cache is done."""

    frontend: SessionId
    answer: PrefixCacheReset


@dataclass(frozen=True, slots=True)
class TellAdopted:
    """Tell the operator what came of the rows that a worker reported."""

    adopted: Adopted
    num_recomputed_tokens: int
    """In this epoch until now."""


Instruction: TypeAlias = SendPlan | EmitOutput | EndWorkerSession | EndFrontendSession | AnswerCacheReset | TellAdopted

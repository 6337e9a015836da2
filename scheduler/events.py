"""What has happened outside, as the core is told. The time comes with it (`Scheduler.on_events`)."""

from dataclasses import dataclass
from typing import TypeAlias

from octavo.wire.handshake import WorkerFacts
from octavo.wire.held_rows import HeldRow
from octavo.wire.ids import BootId, SessionId
from octavo.wire.plan import StepResult
from octavo.wire.requests import CancelRequest, FinishChoice, ResetPrefixCache, SubmitRequest


@dataclass(frozen=True, slots=True)
class RequestSubmitted:
    """A frontend has sent a request, new or replayed."""

    frontend: SessionId
    message: SubmitRequest
    owner: str = ""
    """Boot id of the frontend."""


@dataclass(frozen=True, slots=True)
class RequestCancelled:
    """Nobody wants the rest of a request."""

    frontend: SessionId
    message: CancelRequest


@dataclass(frozen=True, slots=True)
class ChoiceStopped:
    """A frontend has ended a choice itself."""

    frontend: SessionId
    message: FinishChoice


@dataclass(frozen=True, slots=True)
class FrontendLost:
    """A frontend's session is over; nobody reads what its requests would still get."""

    frontend: SessionId


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """A worker has been welcomed and has no rows. Its facts fit the configuration (`resolve_limits`)."""

    epoch: SessionId
    facts: WorkerFacts
    boot_id: BootId
    """Of the process: the same as before if only its session was lost."""
    held_rows: tuple[HeldRow, ...] = ()
    """What it had at the end of the session before: it may be told to go on from there."""


@dataclass(frozen=True, slots=True)
class StepCompleted:
    """A worker has sent the result of a plan."""

    result: StepResult


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """A worker's session is over, and with it every outstanding plan."""

    epoch: SessionId
    reason: str
    is_orderly: bool = False
    """Whether the worker took its leave: then it has not died of anything that it computed."""


@dataclass(frozen=True, slots=True)
class CacheResetRequested:
    """An operator wants nothing that was computed so far to be found in the prefix cache."""

    frontend: SessionId
    message: ResetPrefixCache


Event: TypeAlias = (
    RequestSubmitted
    | RequestCancelled
    | ChoiceStopped
    | FrontendLost
    | WorkerReady
    | StepCompleted
    | WorkerLost
    | CacheResetRequested
)

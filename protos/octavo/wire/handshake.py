"""How a session begins, stays alive and ends.

The peer (frontend or worker) says Hello until the scheduler answers Welcome or Refuse. A Welcome draws the session's
identity; both sides then number their messages from 1. A frontend is welcomed only once a worker is ready, so that it
knows the facts it needs to check requests; until then its Hello is answered with Wait.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from octavo.wire.plan import NonNegative

PROTOCOL_VERSION = 4
"""Of the messages of octavo.wire; peers of different versions refuse each other."""


class WorkerFacts(msgspec.Struct, frozen=True, array_like=True):
    """What a ready worker tells the scheduler."""

    num_blocks: Annotated[int, Meta(ge=2)]  # of the KV cache, the null block included
    block_size: Annotated[int, Meta(ge=1)]  # tokens
    vocab_size: Annotated[int, Meta(ge=1)]  # of the embedding: valid ids are below it
    max_model_len: Annotated[int, Meta(ge=1)]  # of the model, or as configured
    max_num_seqs: Annotated[int, Meta(ge=1)]  # rows
    max_num_batched_tokens: Annotated[int, Meta(ge=1)]  # most tokens of a step
    backend: str
    device: str
    dtype: str


class ServiceFacts(msgspec.Struct, frozen=True, array_like=True):
    """What the scheduler tells a frontend; `max_model_len` is capped at the block pool."""

    vocab_size: Annotated[int, Meta(ge=1)]
    max_model_len: Annotated[int, Meta(ge=1)]
    block_size: Annotated[int, Meta(ge=1)]
    max_num_seqs: Annotated[int, Meta(ge=1)]
    scheduling_policy: str = "fcfs"
    prefix_caching: bool = False  # whether requests should bring their prefix keys
    takes_priorities: bool = False  # whether the policy uses priorities; without, anything but 0 is refused


class FrontendHello(msgspec.Struct, frozen=True, array_like=True, tag="frontend-hello"):
    """A frontend asks for a session."""

    protocol_version: int
    config_digest: str  # model_digest() of the model folder
    boot_id: str
    pid: NonNegative


class WorkerHello(msgspec.Struct, frozen=True, array_like=True, tag="worker-hello"):
    """A worker asks for a session; `facts` are unset while it loads."""

    protocol_version: int
    config_digest: str
    boot_id: str
    pid: NonNegative
    rank: NonNegative = 0
    facts: WorkerFacts | None = None
    num_held_rows: NonNegative = 0  # that it will report first of all (held_rows.py); 0: it sends no report


class FrontendWelcome(msgspec.Struct, frozen=True, array_like=True, tag="frontend-welcome"):
    """The session of a frontend begins; the header carries its identity."""

    scheduler_boot_id: str
    facts: ServiceFacts


class WorkerWelcome(msgspec.Struct, frozen=True, array_like=True, tag="worker-welcome"):
    """The session of a worker begins; the header carries its identity, which is the epoch of its plans."""

    scheduler_boot_id: str


class Wait(msgspec.Struct, frozen=True, array_like=True, tag="wait"):
    """Not yet: the peer says Hello again after a while."""

    reason: str


class Refuse(msgspec.Struct, frozen=True, array_like=True, tag="refuse"):
    """Never: the peer must stop, and say why."""

    reason: str


class UnknownSession(msgspec.Struct, frozen=True, array_like=True, tag="unknown-session"):
    """The session that a message named does not exist (any more): the peer begins a new one."""


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, tag="heartbeat"):
    """Still here. The scheduler sends one to each peer every HEARTBEAT_INTERVAL_S; the peer answers with one."""


class Goodbye(msgspec.Struct, frozen=True, array_like=True, tag="goodbye"):
    """The sender leaves in good order; its session is over."""

    reason: str


class WorkerState(msgspec.Struct, frozen=True, array_like=True, tag="worker-state"):
    """Tells a frontend whether steps can be made; work goes on being accepted meanwhile, within bounds."""

    ready: bool
    reason: str = ""

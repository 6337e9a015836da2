"""Identities that cross process boundaries, and how they are made."""

import secrets
from typing import NewType

BootId = NewType("BootId", str)
"""Identity of one life of a process: 16 hex digits, drawn at start."""

SessionId = NewType("SessionId", int)
"""Identity of one session between the scheduler and a peer (for a worker: the epoch); 63 random bits, never 0."""

Handle = NewType("Handle", int)
"""A request's number within its frontend's session, in [0, 2**31)."""

Row = NewType("Row", int)
"""A slot of the worker's persistent batch, in [0, max_num_seqs)."""

BlockId = NewType("BlockId", int)
"""A block of the KV cache; 0 is the null block, never written."""

MAX_HANDLE = 2**31 - 1
NULL_BLOCK = BlockId(0)


def new_boot_id() -> BootId:
    """Draw the identity of this life of the process."""
    return BootId(secrets.token_hex(8))


def new_session_id() -> SessionId:
    """Draw a session identity; sessions are compared for equality only."""
    return SessionId(secrets.randbits(63) | 1)

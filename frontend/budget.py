"""A bound on what requests that are still being read may hold together, beside the bound on each of them."""

from collections.abc import Iterator
from contextlib import contextmanager

from octavo.frontend.errors import TooManyBytes

FREE_BYTES = 65536
"""Of each request, not counted: small requests get through while others send large ones slowly."""


class ByteBudget:
    """How many bytes of unread requests there are.

    The law: shares together never exceed the limit, and each is given back when its request has been read.

    Args:
        limit: in bytes, of what requests hold beyond FREE_BYTES each.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0

    @contextmanager
    def share(self) -> "Iterator[Share]":
        """Open a request's share; it is given back at the end."""
        share = Share(self)
        try:
            yield share
        finally:
            self.used -= share.counted


class Share:
    """What one request holds."""

    def __init__(self, budget: ByteBudget) -> None:
        self.counted = 0
        self._budget = budget

    def grow(self, num_bytes: int) -> None:
        """Hold so many bytes in all, from now on.

        Raises:
            TooManyBytes: others hold too many.
        """
        budget, counted = self._budget, max(self.counted, num_bytes - FREE_BYTES)
        if budget.used - self.counted + counted > budget.limit:
            raise TooManyBytes(f"requests of {budget.limit} bytes are being read here, the limit")
        budget.used += counted - self.counted
        self.counted = counted

"""One thread asks, the thread that owns the state answers."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

ANSWER_TIMEOUT_S = 2.0
"""How long an asker waits."""

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Lets another thread have something made by the thread that owns what it is made of.

    Args:
        wake: makes the owner look soon; safe from any thread.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._asking = threading.Lock()
        self._answered = threading.Event()
        self._answer: T | None = None
        self.is_asked = False  # the owner looks at this once a turn

    def ask(self) -> T | None:
        """Return what the owner makes, None if it does not within ANSWER_TIMEOUT_S. Askers wait for each other."""
        with self._asking:
            self._answer = None
            self._answered.clear()
            self.is_asked = True
            self._wake()
            return self._answer if self._answered.wait(ANSWER_TIMEOUT_S) else None

    def answer(self, made: T) -> None:
        """Give the asker what it waits for."""
        self.is_asked = False
        self._answer = made
        self._answered.set()

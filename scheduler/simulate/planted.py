"""Bugs to plant: each breaks the scheduler for the time of a run, so that a test can tell that the simulation finds it."""

from collections.abc import Callable
from contextlib import AbstractContextManager

PLANTS: dict[str, Callable[[], AbstractContextManager[None]]] = {}
"""By the name that --plant takes."""

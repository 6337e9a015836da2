"""A moment on a stream that the host can look at, or wait for."""

import time

import torch

from octavo.worker.errors import DeviceHung
from octavo.worker.interface import LOOK_INTERVAL_S

HANG_TIMEOUT_S = 60.0
"""A GPU that needs longer for the steps under way does not come back."""


class Moment:
    """The end of what a stream has been given so far; without a stream (on the CPU) it has come already."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._event = None if stream is None else stream.record_event()

    def has_come(self) -> bool:
        """Say whether it has come."""
        return self._event is None or bool(self._event.query())

    def wait(self, timeout_s: float = HANG_TIMEOUT_S) -> None:
        """Wait until it has.

        Raises:
            DeviceHung: it has not after `timeout_s` seconds.
        """
        deadline = time.monotonic() + timeout_s
        while not self.has_come():
            if time.monotonic() > deadline:
                raise DeviceHung(f"the GPU did not finish what it was given within {timeout_s:g} s")
            time.sleep(LOOK_INTERVAL_S)

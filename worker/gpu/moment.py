"""A moment on a stream that the host can look at, or wait for."""

import torch


class Moment:
    """The end of what a stream has been given so far; without a stream (on the CPU) it has come already."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._event = None if stream is None else stream.record_event()

    def has_come(self) -> bool:
        """Say whether it has come."""
        return self._event is None or bool(self._event.query())

    def wait(self) -> None:
        """Wait until it has."""
        if self._event is not None:
            self._event.synchronize()

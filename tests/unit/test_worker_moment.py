"""Moments: the host looks, waits, and gives up."""

import pytest

from octavo.worker.errors import DeviceHung
from octavo.worker.gpu.moment import Moment


class Event:
    """Stands for a CUDA event that comes at a number of looks, or never."""

    def __init__(self, looks: int | None) -> None:
        self._left = looks

    def query(self) -> bool:
        if self._left is None:
            return False
        self._left -= 1
        return self._left < 0


def moment(looks: int | None) -> Moment:
    made = Moment(None)
    made._event = Event(looks)
    return made


def test_on_the_cpu_every_moment_has_come() -> None:
    assert Moment(None).has_come()
    Moment(None).wait(0)


def test_waiting_looks_until_the_moment_has_come() -> None:
    assert not moment(1).has_come()
    moment(3).wait(60)


def test_a_device_that_does_not_come_to_an_end_is_hung() -> None:
    with pytest.raises(DeviceHung, match=r"did not finish what it was given within 0 s"):
        moment(None).wait(0)

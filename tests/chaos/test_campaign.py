"""The arithmetic of benchmarks/chaos.py: what excuses a client's error, and what counts as a pause."""

import pytest

from benchmarks.chaos import Kill, _excuses, _gap
from tests.support.history import Ask, Delta, History


def history(times: list[float], frontend: int = 0, door: str = "grpc-stream") -> History:
    events = [Delta(at, 0, place, (place,), "x") for place, at in enumerate(times)]
    return History(Ask("one", (1,), 9), door, frontend, times[0] - 0.1, events=list(events))


def test_what_excuses_an_error() -> None:
    one = history([1.0, 2.0, 3.0], frontend=1)
    assert _excuses(one, []) == set()
    assert _excuses(one, [Kill("frontend-0", 1.5, 1.6, True), Kill("scheduler", 1.5, 1.6, True)]) == set()
    assert "UNAVAILABLE" in _excuses(one, [Kill("frontend-1", 0.5, 0.95, True)]), "it began before all was whole"
    assert _excuses(one, [Kill("frontend-1", 0.1, 0.8, True)]) == set()
    deaths = [Kill("worker", 1.0 + i / 10, 1.05 + i / 10, True) for i in range(3)]
    assert _excuses(one, deaths[:2]) == set()
    assert _excuses(one, deaths) == {"INTERNAL"}


@pytest.mark.parametrize(
    ("times", "kill_at", "found"),
    [
        ([1.0, 1.1, 3.0, 3.1], 1.15, (1.1, 3.0)),
        ([1.0, 1.1, 1.2, 3.0, 3.1], 1.15, (1.2, 3.0)),  # one token had left already
        ([1.0, 1.1, 1.2], 1.3, None),  # it had ended
        ([1.0, 1.1], 0.9, None),  # it had not begun
    ],
)
def test_the_pause_of_a_stream(times: list[float], kill_at: float, found: tuple[float, float] | None) -> None:
    kill = Kill("worker", kill_at, 2.0, True)
    assert _gap(history(times), kill, float("inf")) == found
    assert _gap(history(times, door="http"), kill, float("inf")) is None, "a whole answer has no pauses"

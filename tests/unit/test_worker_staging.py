"""Weights on their way to a device: whole, in its dtype, and never through a buffer that is still being read."""

import pytest
import torch

from octavo.worker import staging
from octavo.worker.staging import Staging

CUDA = torch.device("cuda")
BYTES = 64


class Bus:
    """Stands for a CUDA device: copies are done when somebody waits for them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_pinned = 0
        self.pending: list[Copied] = []
        monkeypatch.setattr(staging, "_pinned", self.pinned)
        monkeypatch.setattr(staging, "_end_of_copies", self.end_of_copies)

    def pinned(self, num_bytes: int) -> torch.Tensor:
        assert num_bytes == BYTES
        self.num_pinned += 1
        return torch.empty(num_bytes, dtype=torch.uint8)

    def end_of_copies(self, device: torch.device) -> "Copied":
        copied = Copied(self.pending)
        self.pending.append(copied)
        assert len(self.pending) <= self.num_pinned  # a buffer was filled before its last copy was waited for
        return copied


class Copied:
    def __init__(self, pending: list["Copied"]) -> None:
        self._pending = pending

    def synchronize(self) -> None:
        if self in self._pending:
            self._pending.remove(self)


@pytest.mark.parametrize("shape", [(1,), (15,), (16,), (17,), (7, 13), (3, 64), (5, 16, 2), (0, 4)])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_everything_arrives(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], stored: torch.dtype, wanted: torch.dtype
) -> None:
    bus = Bus(monkeypatch)
    lane = Staging(CUDA, BYTES)
    sources = [torch.randn(shape).to(stored) for _ in range(3)]
    targets = [torch.full(shape, float("nan"), dtype=wanted) for _ in range(3)]
    for target, source in zip(targets, sources, strict=True):
        lane.copy(target, source)
    lane.finish()
    assert not bus.pending
    for target, source in zip(targets, sources, strict=True):
        assert torch.equal(target, source.to(wanted))


def test_a_part_of_a_tensor_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    Bus(monkeypatch)
    lane = Staging(CUDA, BYTES)
    source = torch.randn(9, 20)
    target = torch.empty(9, 10)
    lane.copy(target, source[:, 5:15])
    lane.finish()
    assert torch.equal(target, source[:, 5:15])


def test_two_buffers_are_made_and_only_where_they_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    bus = Bus(monkeypatch)
    lane = Staging(torch.device("cpu"), BYTES)
    target = torch.empty(100)
    lane.copy(target, torch.ones(100, dtype=torch.float16))
    lane.finish()
    assert bool((target == 1).all())
    assert bus.num_pinned == 0
    lane = Staging(CUDA, BYTES)
    assert bus.num_pinned == 0
    lane.copy(target, torch.zeros(100))
    assert bus.num_pinned == 2

"""Services of real processes that fail on purpose, and clients whose histories are judged."""

import asyncio
import random
import tempfile
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.chaos_load import CALL_TIMEOUT_S, Client, Load, make_asks, undisturbed
from tests.support.cluster import Cluster
from tests.support.history import Ask, Expected, History, judge
from tests.support.tiny_tokenizers import write_model_folder

SILENCE_S = 1.0
"""After which a peer counts as lost here: ten seconds would make the tests long."""

PATIENCE = ("--silence", str(SILENCE_S))
NUM_STREAMS = 16


class Chaos:
    """A cluster, a client, and what its requests must bring."""

    def __init__(self, cluster: Cluster, seed: int, call_timeout_s: float | None) -> None:
        self.cluster = cluster
        self.seed = seed
        self.draw = random.Random(seed)
        self.client = Client(cluster.targets, "model", call_timeout_s)
        self.asks = make_asks(18, 259, 48, seed=seed)
        self._expected: dict[Ask, Expected] = {}

    async def prepare(self) -> None:
        """Wait for all processes, and learn the undisturbed answers."""
        await asyncio.to_thread(self.cluster.wait_until_whole)
        self._expected = await undisturbed(self.client, self.asks)
        self.client.histories.clear()

    def load(self, cancel_share: float = 0.0) -> Load:
        """Return closed loops over all doors of all frontends."""
        frontends = tuple(range(len(self.cluster.targets)))
        return Load(self.client, self.asks, NUM_STREAMS, frontends, self.seed, cancel_share)

    async def until_tokens(self, number: int) -> None:
        """Wait until so many more tokens have come."""
        wanted = number + sum(one.num_tokens for one in self.client.histories)
        async with asyncio.timeout(60):
            while sum(one.num_tokens for one in self.client.histories) < wanted:  # noqa: ASYNC110  many tasks write them
                await asyncio.sleep(0.01)

    async def judge(self, excused: Callable[[History], Collection[str]] = lambda _: ()) -> list[History]:
        """Fail if a client saw what it must not see, or something is left; return what clients saw."""
        histories, self.client.histories = self.client.histories, []
        wrong = [one for h in histories for one in judge(h, self._expected[h.ask], excused(h))]
        assert not wrong, "\n".join([f"--chaos-seed {self.seed}", *wrong[:10], self.cluster.output[-8000:]])
        held = await asyncio.to_thread(self.cluster.wait_until_idle)
        assert held.failed_checks == 0
        return histories


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    given = request.config.getoption("--chaos-seed")
    chosen = random.SystemRandom().randrange(2**31) if given is None else int(given)
    print(f"--chaos-seed {chosen}")  # noqa: T201  shown by pytest where the test fails
    return chosen


@pytest.fixture
def folder() -> Iterator[Path]:
    # pytest's own folders are too deep for the 107 bytes of a Unix socket's path.
    with tempfile.TemporaryDirectory(prefix="octavo-") as name:
        yield Path(name)


@asynccontextmanager
async def running(
    folder: Path, seed: int, call_timeout_s: float | None = CALL_TIMEOUT_S, **settings: Any
) -> AsyncIterator[Chaos]:
    """Run a service with short patience; in the end nothing of it may be left, and nothing may have ended by itself."""
    model = write_model_folder(folder / "model")
    with Cluster(
        folder, model, **({"options": PATIENCE, "frontend": ("--served-model-name", "model")} | settings)
    ) as cluster:
        chaos = Chaos(cluster, seed, call_timeout_s)
        try:
            await chaos.prepare()
            yield chaos
        finally:
            await chaos.client.close()

"""Processes of a service are killed at random moments under load; every client's history is judged.

    python -m benchmarks.chaos --kills 1000 --target mixed --worker fake [--seed 1] [--streams 16] [--output-json FILE]

Scheduler, worker and two frontends are processes that are started again at once whenever they end. Closed loops put
requests of every kind through both doors of both frontends: streams and whole answers, greedy and drawn, n of 2,
penalties, stop strings and ids, and clients that hang up. The ids and text of each are known from an undisturbed run (and
with the fake worker, which reads its tokens through the block tables, from a pure function), so the judge
(tests/support/history.py) sees what is lost, repeated or wrong. Requests of a frontend that was killed may end
UNAVAILABLE. A fault in five follows the one before at once; one in ten stops its process for a while before it is killed.
After each round of kills the load pauses and nothing may be left: no request, no block, no process, no socket.

The worker is `fake` (no torch, so that hundreds of kills take minutes) or `real`: the demo model on the reference backend,
whose ids do not depend on what was recomputed. A pause is the longest time that a stream which ran at a kill then waited
for a token; `resume` is when the first of these streams went on, `whole` when every process served again, and
`beyond_whole` how long streams waited from then on (for their recomputation). The seed chooses victims, moments and requests.
Ctrl-C ends a campaign after its present round.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import stat
import sys
import tempfile
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._record import record
from octavo.cli.model_store import resolve
from octavo.scheduler.simulate.model import draw, hash_rule
from tests.support.chaos_load import Client, Load, make_asks, undisturbed
from tests.support.cluster import FAKE_WORKER, Cluster
from tests.support.history import UNAVAILABLE, Ask, Expected, History, judge
from tests.support.tiny_tokenizers import EOS_ID, write_model_folder

MAX_CRASHES = 3
"""A request that was under way at so many deaths of workers may end INTERNAL."""

FAKE_VOCAB_SIZE = 300
MAX_LOAD_S = 300.0
"""No token for so long: something is lost."""

TARGETS = ("worker", "scheduler", "frontend", "mixed")
REAL_WORKER = (
    "worker",
    *("--backend", "reference", "--max-model-len", "256", "--max-num-seqs", "16", "--num-gpu-blocks-override", "129"),
)


@dataclass(frozen=True)
class Kill:
    """One process that was killed: when, when all was whole again, and whether anybody waited for that."""

    name: str
    at: float
    whole: float
    is_alone: bool

    @property
    def role(self) -> str:
        return self.name.partition("-")[0]


@dataclass
class Found:
    """What a campaign has found so far."""

    kills: list[Kill] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    pauses: dict[str, list[float]] = field(default_factory=dict)
    resumes: dict[str, list[float]] = field(default_factory=dict)
    beyond: dict[str, list[float]] = field(default_factory=dict)
    num_tokens: int = 0
    num_excused: int = 0

    def judge(self, histories: Sequence[History], expected: dict[Ask, Expected], kills: Sequence[Kill]) -> None:
        """Judge what clients saw in a round."""
        for history in histories:
            status = history.status
            self.outcomes[f"{history.door} {status.code if status else 'none'}"] += 1
            self.num_tokens += history.num_tokens
            excuses = _excuses(history, kills)
            if status is not None and status.code in excuses:
                self.num_excused += 1
            self.violations += judge(history, expected[history.ask], excuses)
        for index, kill in enumerate(kills):
            end = kills[index + 1].at if index + 1 < len(kills) else float("inf")
            found = [gap for one in histories if (gap := _gap(one, kill, end)) is not None]
            if found:
                self.pauses.setdefault(kill.role, []).extend(after - before for before, after in found)
                if kill.is_alone:
                    self.beyond.setdefault(kill.role, []).extend(max(0.0, after - kill.whole) for _, after in found)
                self.resumes.setdefault(kill.role, []).append(min(after for _, after in found) - kill.at)


def _excuses(history: History, kills: Sequence[Kill]) -> set[str]:
    excuses = set()
    own = f"frontend-{history.frontend}"
    if any(one.name == own and one.at < history.ended and history.began < one.whole for one in kills):
        excuses |= {UNAVAILABLE, "TRUNCATED"}
    if sum(one.name == "worker" and history.began < one.at < history.ended for one in kills) >= MAX_CRASHES:
        excuses.add("INTERNAL")
    return excuses


def _gap(history: History, kill: Kill, end: float) -> tuple[float, float] | None:
    """Return the longest time without a token that a stream had because of a kill; None if it did not run then.

    Tokens that had left the dead process already still come after the kill, for a moment.
    """
    times = history.token_times
    if not times or not times[0] < kill.at < times[-1] or "stream" not in history.door:
        return None
    if kill.role == "frontend":  # its own streams end, others do not wait
        return None
    first = bisect_left(times, kill.at) - 1
    pairs = [(a, b) for a, b in zip(times[first:], times[first + 1 :]) if a < min(kill.at + 0.25, end) and b < end]
    return max(pairs, key=lambda pair: pair[1] - pair[0], default=None)


class Campaign:
    """Kills, one after the other, and the load under which they come."""

    def __init__(self, args: argparse.Namespace, cluster: Cluster, client: Client, asks: list[Ask]) -> None:
        self.found = Found()
        self._args = args
        self._cluster = cluster
        self._client = client
        self._draw = random.Random(args.seed)
        frontends = range(len(cluster.targets))
        self._load = Load(client, asks, args.streams, frontends, seed=args.seed, cancel_share=0.1)
        self._expected: dict[Ask, Expected] = {}
        self._is_interrupted = False

    async def run(self) -> None:
        """Kill as often as was asked for, in rounds."""
        await asyncio.to_thread(self._cluster.wait_until_whole)
        self._expected = await undisturbed(self._client, self._load.asks)
        if self._args.worker == "fake":
            self._check_expected()
        self._client.histories.clear()
        left = self._args.kills
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self._interrupt)
        while left and not self._is_interrupted:
            number = min(left, self._args.round)
            left -= number
            await self._round(number)
            print(
                f"{len(self.found.kills)} kills, {sum(self.found.outcomes.values())} requests, "
                f"{len(self.found.violations)} violations",
                file=sys.stderr,
                flush=True,
            )

    def _interrupt(self) -> None:
        """End after the round that is under way; what was found until then is told."""
        self._is_interrupted = True

    async def _round(self, number: int) -> None:
        self._load.seed += 1000
        self._load.start()
        kills = [await self._kill() for _ in range(number)]
        await asyncio.to_thread(self._cluster.wait_until_whole)
        await self._load.stop()
        self.found.kills += kills
        self.found.judge(self._client.histories, self._expected, kills)
        self._client.histories.clear()
        await asyncio.to_thread(self._check_idle)

    async def _kill(self) -> Kill:
        draw, longest = self._draw, self._args.tokens_between or (600 if self._args.worker == "fake" else 160)
        follows = draw.random() < 0.2
        await (asyncio.sleep(draw.uniform(0, 0.3)) if follows else self._load_runs(draw.randrange(1, longest)))
        name = self._choose()
        began = time.monotonic()
        if draw.random() < 0.1:
            await asyncio.to_thread(self._cluster.signal, name, signal.SIGSTOP)
            await asyncio.sleep(draw.uniform(0.01, 1.0))
        await asyncio.to_thread(self._cluster.kill, name)
        # What a frontend refuses is excused until all is whole: the next death must not come before.
        if is_alone := not follows or name.startswith("frontend"):
            await asyncio.to_thread(self._cluster.wait_until_whole)
        return Kill(name, began, time.monotonic(), is_alone)

    async def _load_runs(self, num_tokens: int) -> None:
        """Let the load run for so many tokens, however fast the machine is."""
        histories = self._client.histories
        wanted = num_tokens + sum(one.num_tokens for one in histories)
        async with asyncio.timeout(MAX_LOAD_S):
            while sum(one.num_tokens for one in histories) < wanted:  # noqa: ASYNC110  many tasks write them
                await asyncio.sleep(0.02)

    def _choose(self) -> str:
        target = self._args.target
        if target == "mixed":
            target = self._draw.choices(("worker", "scheduler", "frontend"), (4, 4, 2))[0]
        return f"frontend-{self._draw.randrange(len(self._cluster.targets))}" if target == "frontend" else target

    def _check_expected(self) -> None:
        """See that the undisturbed answers are what the fake worker's function says."""
        rule = hash_rule(FAKE_VOCAB_SIZE)
        for ask, expected in self._expected.items():
            for choice, told in enumerate(expected.choices):
                stop_ids = ask.stop_ids if ask.ignore_eos else (*ask.stop_ids, EOS_ID)
                for place, token in enumerate(told.ids):
                    masked = stop_ids if place < ask.min_tokens else ()
                    pure = draw(rule([*ask.prompt, *told.ids[:place]], ask.seed, choice), masked, FAKE_VOCAB_SIZE)
                    if token != pure:
                        self.found.violations.append(f"undisturbed {ask}: {token} at {place}, expected {pure}")

    def _check_idle(self) -> None:
        """See that nothing is left of a round."""
        cluster, wrong = self._cluster, self.found.violations
        held = cluster.wait_until_idle()
        if held.failed_checks:
            wrong.append(f"the idle scheduler contradicts itself {held.failed_checks} times")
        wrong += [f"{life.name} ended by itself with {life.code}" for life in cluster.odd_ends()]
        kills = Counter(kill.name for kill in self.found.kills)
        lives = Counter(life.name for life in cluster.lives)
        wrong += [f"{lives[n]} lives of the {n} after {kills[n]} kills" for n in lives if lives[n] != kills[n] + 1]
        if orphans := cluster.orphans():
            wrong.append(f"orphaned processes: {orphans}")
        sockets = sorted(p.name for p in cluster.folder.iterdir() if stat.S_ISSOCK(p.stat().st_mode))
        if sockets != ["s"]:
            wrong.append(f"sockets: {sockets}")
        if wrong:
            print("\n".join(wrong[:20]), file=sys.stderr, flush=True)


def _figures(name: str, values: list[float], percentiles: Sequence[int]) -> dict[str, float]:
    row = {f"{name}_p{p}": round(float(np.percentile(values, p)), 3) for p in percentiles} if values else {}
    return row | ({f"{name}_max": round(max(values), 3), f"{name}_n": len(values)} if values else {})


def make_row(args: argparse.Namespace, found: Found, cluster: Cluster, seconds: float) -> dict[str, Any]:
    """Return what is kept of a campaign."""
    row: dict[str, Any] = {
        "bench": "chaos",
        "worker": args.worker,
        "target": args.target,
        "seed": args.seed,
        "streams": args.streams,
        "kills": len(found.kills),
        "killed": dict(Counter(kill.role for kill in found.kills)),
        "requests": sum(found.outcomes.values()),
        "outcomes": dict(sorted(found.outcomes.items())),
        "tokens": found.num_tokens,
        "violations": len(found.violations),
        "excused": found.num_excused,
        "seconds": round(seconds),
        "files_open": {name: process.num_fds() for name, process in cluster.processes().items()},
    }
    for role in sorted({kill.role for kill in found.kills}):
        whole = [kill.whole - kill.at for kill in found.kills if kill.role == role and kill.is_alone]
        row[f"of_{role}"] = {
            **_figures("pause_s", found.pauses.get(role, []), (50, 99)),
            **_figures("resume_s", found.resumes.get(role, []), (50, 99)),
            **_figures("whole_s", whole, (50,)),
            **_figures("beyond_whole_s", found.beyond.get(role, []), (50, 99)),
        }
    return row


async def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run a campaign; return its row, and raise nothing for what it found."""
    if args.worker == "fake":
        model, worker = write_model_folder(folder / "model"), (*FAKE_WORKER, "--seconds-per-step", "0.003")
        asks = make_asks(24, 259, args.tokens or 60, seed=args.seed)
    else:
        model, worker = resolve(args.model).folder, REAL_WORKER
        asks = make_asks(12, 49_000, args.tokens or 12, seed=args.seed, text=True)
    began = time.monotonic()
    with Cluster(folder, model, worker, num_frontends=2, frontend=("--served-model-name", "served")) as cluster:
        client = Client(cluster.targets, "served")
        campaign = Campaign(args, cluster, client, asks)
        try:
            await campaign.run()
            row = make_row(args, campaign.found, cluster, time.monotonic() - began)
        except BaseException:
            print(cluster.output[-20000:], file=sys.stderr)
            raise
        finally:
            await client.close()
        if campaign.found.violations:
            print(cluster.output[-20000:], file=sys.stderr)
    return row


def main() -> None:
    """Run, print the row, and fail if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--target", choices=TARGETS, default="mixed")
    parser.add_argument("--worker", choices=("fake", "real"), default="fake")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--seed", type=int, default=None, help="drawn and printed by default")
    parser.add_argument("--round", type=int, default=10, help="kills between two looks at what is left")
    parser.add_argument("--tokens-between", type=int, help="most tokens of load before a kill; default 600 or 160")
    parser.add_argument("--tokens", type=int, help="most of a request; default 60, with a real worker 12")
    parser.add_argument("--model", default="demo", help="of a real worker")
    parser.add_argument("--nice", type=int, default=0)
    parser.add_argument("--output-json", type=Path, help="file that the row is added to")
    args = parser.parse_args()
    os.nice(args.nice)
    args.seed = random.SystemRandom().randrange(2**31) if args.seed is None else args.seed
    print(f"seed {args.seed}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="octavo-") as folder:
        row = asyncio.run(run(args, Path(folder)))
    print(json.dumps(row), flush=True)
    if args.output_json:
        record(args.output_json, "benchmarks/chaos.py", [row])
    sys.exit(1 if row["violations"] else 0)


if __name__ == "__main__":
    main()

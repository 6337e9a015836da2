"""Benchmarks on real processes: what the rows hold, and what is said when a process does not start or dies."""

import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from octavo.cli import bench_engine, bench_suite, bench_workloads
from octavo.cli.bench_client import Run, RunFailed
from octavo.cli.bench_engine import (
    Engine,
    EngineFailed,
    EngineRefused,
    known_max_model_len,
    running_engine,
    settings_for,
)
from octavo.cli.bench_measure import Bench, Row
from octavo.cli.bench_report import RowWriter, describe, read_rows
from octavo.cli.errors import ConfigurationError
from tests.support.tiny_models import TINY_LLAMA, write_model

FLAGS: dict[str, object] = {
    "device": "cpu",
    "num-threads": 1,
    "max-num-seqs": 16,
    "max-num-batched-tokens": 512,
    "num-gpu-blocks-override": 1025,
}
PEER_ROWS = Path(__file__).parents[2] / "benchmarks" / "peers" / "vllm_0.26_h200.jsonl"


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with settings_for("tiny", FLAGS) as settings, running_engine(settings) as engine:
        yield engine
    assert not engine_processes()


@pytest.fixture
def nothing_is_left() -> Iterator[None]:
    """Fail if the test leaves a process of an engine behind."""
    before = engine_processes()
    yield
    assert engine_processes() == before


def engine_processes() -> list[psutil.Process]:
    """Return the processes of benched engines that this one started and that live; other tests have services."""
    return [p for p in psutil.Process().children() if any("octavo-bench-" in word for word in p.cmdline())]


def peer_keys(bench: str) -> set[str]:
    """Return the keys of the figures in another engine's rows."""
    (row, *_) = [row for row in read_rows([PEER_ROWS]) if row["bench"] == bench]
    return set(row) - {"engine", "version", "model", "tensor_parallel_size", "device", "torch", "date"}


def test_an_engine_is_two_processes_and_this_one(engine: Engine) -> None:
    status = engine.client.status()
    assert {process.role: process.state for process in status.processes} == dict.fromkeys(
        ("scheduler", "worker", "frontend"), "ready"
    )
    assert len({process.pid for process in status.processes}) == 3
    assert os.getpid() in {process.pid for process in status.processes}
    assert len(engine_processes()) == 2
    assert engine.num_blocks == 1024
    assert engine.facts.max_num_seqs == 16
    assert engine.start_s > 0
    assert (engine.backend, engine.torch_device) == ("cpu", "cpu")
    assert status.steps > 0  # of the warm-up
    assert status.cached_blocks == 0


def test_a_row_of_decode(engine: Engine) -> None:
    runs: list[tuple[str, Run]] = []
    bench = Bench(engine.client, on_run=lambda name, run: runs.append((name, run)))
    row = bench.decode(bench_workloads.decode(engine.facts.vocab_size, 4, 64, 8))
    assert row["total_tok_s"] == pytest.approx(row["in_tok_s"] + row["out_tok_s"], abs=0.2)
    assert peer_keys("decode") <= set(row)
    assert (row["batch"], row["prompt"], row["out"], row["repeat"]) == (4, 64, 8, 2)
    assert {key: len(row[key]) for key in ("walls", "walls1", "cached_walls", "cached_walls1")} == dict.fromkeys(
        ("walls", "walls1", "cached_walls", "cached_walls1"), 2
    )
    assert row["wall_s"] == min(row["walls"])
    assert row["ttft_all_ms"] == pytest.approx(1000 * min(row["walls1"]), abs=0.1)
    assert row["tpot_ms"] == pytest.approx(1000 * (min(row["walls"]) - min(row["walls1"])) / 7, abs=0.05)
    assert row["cached_in_tokens"] == 4 * 48  # all whole blocks but the last one
    assert row["out_tok_s"] == pytest.approx(4 * 8 / row["wall_s"], rel=0.01)
    cold = [run.num_cached_tokens for _, run in runs]
    assert cold == [0, 0, 192, 192] * 2
    assert [run.num_tokens.tolist() for _, run in runs] == [[1] * 4, [8] * 4] * 4


@pytest.mark.parametrize(("name", "n_out", "cached"), [("prefill", 3, 0), ("shared_prefix", 96, 2048)])
def test_a_row_of_throughput(engine: Engine, name: str, n_out: int, cached: int) -> None:
    row = bench_suite.measure(Bench(engine.client), engine.facts.vocab_size, name, bench_suite.Sizes(num_requests=3))
    assert peer_keys(name) <= set(row)
    assert (row["bench"], row["n"], row["n_out"], row["cached_in_tokens"]) == (name, 3, n_out, cached)
    assert row["sha"] == bench_workloads.make_offline(name, engine.facts.vocab_size, 3).digest
    assert len(row["walls"]) == (3 if name == "prefill" else 2)
    assert row["wall_s"] == min(row["walls"])
    assert row["out_tok_s"] == pytest.approx(n_out / row["wall_s"], rel=0.02)


def test_rows_of_serving_and_latency(engine: Engine) -> None:
    workload = bench_workloads.decode(engine.facts.vocab_size, 6, 32, 4)
    serving = Bench(engine.client).serving(workload, concurrency=2)
    assert (serving["concurrency"], serving["n"], serving["n_out"]) == (2, 6, 24)
    assert 0 < serving["ttft_ms_p50"] <= serving["ttft_ms_p99"]
    latency = Bench(engine.client).latency(workload, num_iters=3)
    assert len(latency["latencies"]) == 3
    assert min(latency["latencies"]) <= latency["avg_latency"] <= max(latency["latencies"])
    assert (latency["batch"], latency["prompt"], latency["out"]) == (6, 32, 4)


def test_one_token_has_no_time_per_token(engine: Engine) -> None:
    workload = bench_workloads.decode(engine.facts.vocab_size, 2, 32, 1)
    assert Bench(engine.client).latency(workload, num_iters=1)["tpot_ms"] is None


@pytest.mark.parametrize(
    ("name", "sizes", "totals"),
    [
        ("prefill", bench_suite.Sizes(3, 20), (3, 60, 3)),
        ("unique_prefix", bench_suite.Sizes(3, 20, 5), (3, 60, 15)),
        ("shared_prefix", bench_suite.Sizes(3, 20, 5), (3, 3264, 15)),  # its prompts have fixed lengths
        ("decode_b2", bench_suite.Sizes(3, 20, 5), (2, 40, 10)),  # as many as its batch
    ],
)
def test_a_size_changes_the_workloads_that_it_holds_for(
    name: str, sizes: bench_suite.Sizes, totals: tuple[int, int, int]
) -> None:
    made = bench_suite.make(name, 32_000, sizes)
    assert (len(made.requests), made.num_prompt_tokens, made.num_output_tokens) == totals


def test_every_flag_for_sizes_changes_every_workload_that_it_is_said_to_hold_for() -> None:
    fields = {"num-prompts": "num_requests", "input-len": "num_prompt_tokens", "output-len": "num_output_tokens"}
    names = {"decode": "decode_b2", "serving": "serving_c2"}
    for flag, field in fields.items():
        sizes = bench_suite.Sizes(**{field: 7})
        for kind in bench_workloads.NAMES:
            name = names.get(kind, kind)
            made, usual = (bench_suite.make(name, 32_000, s) for s in (sizes, bench_suite.Sizes()))
            assert (made.digest != usual.digest) == (kind in bench_suite.TAKEN_BY[flag]), (flag, kind)


def test_flags_that_hold_for_none_of_the_workloads_are_refused() -> None:
    bench_suite.check_flags({"num-prompts": 2, "input-len": 32, "repeat": 1}, ["decode_b8", "shared_prefix"])
    with pytest.raises(
        ConfigurationError,
        match="--input-len 64 does not hold for workload shared_prefix, serving_c2; it holds for decode, prefill, unique",
    ):
        bench_suite.check_flags({"input-len": 64}, ["shared_prefix", "serving_c2"])
    with pytest.raises(ConfigurationError, match="--repeat 2 does not hold for workload serving_c2"):
        bench_suite.check_flags({"repeat": 2}, ["serving_c2"])


def test_what_the_model_takes_is_known_before_the_start() -> None:
    with settings_for("tiny", FLAGS) as settings:
        assert known_max_model_len(settings) == 8192
    with settings_for("tiny", FLAGS | {"max-model-len": "100"}) as settings:
        assert known_max_model_len(settings) == 100
    with settings_for("tiny", FLAGS, ("--max-model-len=50",)) as settings:
        assert known_max_model_len(settings) is None
    bench_suite.check_lengths(["decode_b1", "prefill"], bench_suite.Sizes(), 1025)
    with pytest.raises(ConfigurationError, match=r"prefill has a request of 1025 tokens .* at most 1024"):
        bench_suite.check_lengths(["decode_b1", "prefill"], bench_suite.Sizes(), 1024)


def test_a_run_is_announced_and_said_to_be_over(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = bench_suite.Sizes(num_requests=3, repeat=1)
    bench_suite.measure(Bench(engine.client), engine.facts.vocab_size, "shared_prefix", sizes)
    first, last = capsys.readouterr().err.splitlines()
    assert first == "shared_prefix: 3 requests, 3,264 tokens in, 96 out"
    assert re.fullmatch(r"shared_prefix: measured in \d+\.\d s", last)


def suite(engine: Engine, deadline: float | None, estimates: dict[str, float], folder: Path) -> list[Row]:
    writer = RowWriter(folder / "rows.jsonl")
    writer.common = {"model": "tiny"}
    sizes = bench_suite.Sizes(num_requests=2, num_prompt_tokens=32, num_output_tokens=4, repeat=1)
    names = ("decode_b2", "shared_prefix")
    bench = Bench(engine.client, deadline)
    bench_suite.run_suite(bench, engine.facts.vocab_size, names, sizes, writer, estimates)
    writer.close()
    assert read_rows([folder / "rows.jsonl"]) == writer.rows
    return writer.rows


def test_a_suite_without_limit_measures_all(engine: Engine, tmp_path: Path) -> None:
    assert [row["bench"] for row in suite(engine, None, {}, tmp_path)] == ["decode", "shared_prefix"]


def test_what_does_not_fit_is_skipped_and_the_rest_runs(engine: Engine, tmp_path: Path) -> None:
    rows = suite(engine, time.monotonic() + 60, {"decode_b2": 1000.0, "shared_prefix": 1.0}, tmp_path)
    assert [row["bench"] for row in rows] == ["skipped", "shared_prefix"]
    assert rows[0]["name"] == "decode_b2"
    assert "about 1000 s are needed" in rows[0]["reason"]


def test_after_the_deadline_everything_is_skipped(engine: Engine, tmp_path: Path) -> None:
    rows = suite(engine, time.monotonic(), {}, tmp_path)
    assert [(row["bench"], row["name"]) for row in rows] == [("skipped", "decode_b2"), ("skipped", "shared_prefix")]


def test_a_run_that_meets_the_deadline_is_a_skipped_row(engine: Engine, tmp_path: Path) -> None:
    rows = suite(engine, time.monotonic() + 0.005, {}, tmp_path)
    assert [row["bench"] for row in rows] == ["skipped", "skipped"]


def test_a_description_names_machine_and_engine(engine: Engine) -> None:
    with settings_for("tiny", FLAGS) as settings:
        row = describe("tiny", settings, engine, commit="abc")
    assert (row["engine"], row["commit"], row["model"], row["backend"]) == ("octavo", "abc", "tiny", "cpu")
    assert (row["num_blocks"], row["max_num_seqs"], row["max_num_batched_tokens"]) == (1024, 16, 512)
    assert "cores of" in row["device"]
    assert row["torch"][0].isdigit()


@pytest.mark.usefixtures("nothing_is_left")
def test_a_worker_that_is_killed_is_named_with_its_log() -> None:
    with (
        settings_for("tiny", FLAGS) as settings,
        pytest.raises(EngineFailed, match=r"(?s)the worker ended \(signal 9\); the last it said:\n.*ready in"),
        running_engine(settings) as engine,
    ):
        (pid,) = [process.pid for process in engine.client.status().processes if process.role == "worker"]
        os.kill(pid, signal.SIGKILL)
        engine.client.run(bench_workloads.decode(engine.facts.vocab_size, 2, 32, 4))


@pytest.mark.usefixtures("nothing_is_left")
def test_a_worker_that_cannot_start_is_named_with_its_reason() -> None:
    with (
        settings_for("tiny", FLAGS, ("--no-such-flag",)) as settings,
        pytest.raises(EngineRefused, match=r"(?s)the worker ended \(exit code 2\):\n  Usage: .*--no-such-flag"),
        running_engine(settings),
    ):
        pass


@pytest.mark.usefixtures("nothing_is_left")
def test_a_vocabulary_without_ids_for_prompts_is_named(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", TINY_LLAMA)
    with (
        settings_for(str(folder), FLAGS) as settings,
        pytest.raises(ConfigurationError, match="a vocabulary of 97"),
        running_engine(settings),
    ):
        pass


def test_an_engine_that_is_never_ready_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_engine, "END_TIMEOUT_S", 0.2)
    stubborn = (
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('here', flush=True)\ntime.sleep(600)"
    )
    with (
        settings_for("tiny", FLAGS, start_timeout_s=1.0) as settings,
        pytest.raises(RunFailed, match="not ready after 1 s"),
        running_engine(settings, (sys.executable, "-c", stubborn)),
    ):
        pass
    assert not [p for p in psutil.Process().children() if stubborn in p.cmdline()]


def test_a_path_of_the_socket_that_is_too_long_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with (
        settings_for("tiny", FLAGS) as settings,
        pytest.raises(EngineFailed, match="TMPDIR can name a shorter folder"),
        running_engine(settings),
    ):
        pass

"""octavo bench and benchmarks/engine.py, as they are typed."""

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import typer.main

from octavo.cli.bench_engine import FLAGS
from octavo.cli.bench_models import CONFIGS
from octavo.cli.main import build

ROOT = Path(__file__).parents[2]
SMALL = (
    *("--device", "cpu", "--num-threads", "1", "--max-num-seqs", "16", "--max-num-batched-tokens", "512"),
    *("--num-gpu-blocks-override", "1025"),
)
OF_PROCESSES = {
    "model",
    "scheduler_address",
    "curve_keys",
    "log_level",
    "log_format",
    "metrics_host",
    "metrics_port",
    "live_socket",
    "otlp_traces_endpoint",
    "step_timeout",
    "served_model_name",
    "config",
    "exit_with_parent",
}


def run(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def octavo(*words: str) -> "subprocess.CompletedProcess[str]":
    return run("-P", "-m", "octavo.cli.main", *words)


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def parameters(*path: str) -> dict[str, Any]:
    """Return the defaults of a command's parameters by name."""
    found: Any = typer.main.get_command(build(path[0]))
    for name in path:
        found = found.get_command(typer.Context(found), name)
    return {parameter.name: parameter.default for parameter in found.params}


@pytest.mark.parametrize("command", ["throughput", "latency"])
def test_every_flag_of_the_worker_is_offered_with_the_same_default(command: str) -> None:
    of_worker = {name: value for name, value in parameters("worker").items() if name not in OF_PROCESSES}
    of_bench = parameters("bench", command)
    assert {name: of_bench[name] for name in of_worker} == of_worker
    assert {name.replace("_", "-") for name in of_worker} <= set(FLAGS)


def test_the_client_loads_no_torch() -> None:
    names = ("torch", "transformers", "grpc")
    program = f"import sys, octavo.cli.bench; print([name for name in {names!r} if name in sys.modules])"
    assert run("-P", "-c", program).stdout == "[]\n"


def test_throughput(tmp_path: Path) -> None:
    peers = tmp_path / "peers.jsonl"
    peers.write_text(
        json.dumps({"engine": "other", "version": "1", "device": "a pocket", "model": "tiny", "bench": "shared_prefix",
                    "n_in": 3264, "n_out": 96, "wall_s": 1000.0}) + "\n"
    )  # fmt: skip
    out = tmp_path / "rows.jsonl"
    done = octavo(
        *("bench", "throughput", "tiny", "--workload", "shared_prefix", "--num-prompts", "3", "--repeat", "1"),
        *("--output-json", str(out), "--peers", str(peers), *SMALL),
    )
    assert done.returncode == 0, done.stderr
    engine, row = rows_of(out)
    assert (engine["bench"], row["bench"], row["engine"], row["model"]) == ("engine", "shared_prefix", "octavo", "tiny")
    assert (row["n_in"], row["n_out"], row["num_blocks"], len(row["walls"])) == (3264, 96, 1024, 1)
    assert "other 1 (a pocket)" in done.stdout
    assert "shared_prefix" in done.stdout
    assert "waiting: " in done.stderr
    assert "ready after" in done.stderr
    assert "shared_prefix: 3 requests, 3,264 tokens in, 96 out\nshared_prefix: measured in" in done.stderr
    assert "--peers" not in done.stderr
    figures = [line.split()[1] for line in done.stdout.splitlines() if line.startswith(" shared_prefix")]
    assert figures == ["wall_s", "out_tok_s", "in_tok_s", "total_tok_s"]


def test_latency() -> None:
    done = octavo(
        *("bench", "latency", "tiny", "--batch-size", "2", "--input-len", "32", "--output-len", "4"),
        *("--num-iters", "2", "--no-enable-prefix-caching", "--max-model-len", "100", *SMALL),
    )
    assert done.returncode == 0, done.stderr
    assert "latency_b2" in done.stdout
    assert "avg_latency" in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("tiny", "--workload", "gutenberg"), "workload 'gutenberg' is unknown; there are sharegpt_like, prefill"),
        (
            ("no-such-model",),
            f"nor 'demo', nor a shape for benchmarks ({', '.join(CONFIGS)})",
        ),
        (("tiny", "--peers", "absent.jsonl"), "absent.jsonl cannot be read"),
        (("tiny", "--batch", "0"), "'--batch'"),
        (("tiny", "--workload", "shared_prefix", "--batch", "3"), "--batch 3 does not hold for workload shared_prefix"),
        (("tiny", "--workload", "decode", "--num-prompts", "5"), "--num-prompts 5 does not hold for workload decode"),
        (("tiny", "--workload", "prefill", "--concurrency", "8"), "--concurrency 8 does not hold for workload prefill"),
        (("tiny", "--workload", "serving", "--repeat", "2"), "--repeat 2 does not hold for workload serving"),
        (
            ("tiny", "--workload", "decode", "--input-len", "100000", "--output-len", "8"),
            "a request of 100008 tokens with its output, the engine takes at most 8192",
        ),
    ],
)
def test_what_cannot_be_asked_for_starts_nothing(words: tuple[str, ...], said: str) -> None:
    done = octavo("bench", "throughput", *words)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert "waiting: " not in done.stderr


def test_a_worker_that_cannot_start_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["NoSuchModel"]}')
    done = octavo("bench", "latency", str(tmp_path), *SMALL)
    assert done.returncode == 2
    problem = f"{tmp_path}/config.json: architecture 'NoSuchModel' is not supported"
    assert f"octavo: the worker ended (exit code 2): {problem}" in done.stderr
    assert done.stderr.count("NoSuchModel") == 1
    assert "Traceback" not in done.stderr


def test_the_program_runs_what_fits_and_says_what_does_not(tmp_path: Path) -> None:
    peers = tmp_path / "peers.jsonl"
    slow = {"engine": "slow", "model": "tiny", "bench": "decode", "batch": 8, "prompt": 32, "out": 4, "walls": [1e6]}
    peers.write_text(json.dumps(slow) + "\n")
    out = tmp_path / "rows.jsonl"
    done = run(
        *("benchmarks/engine.py", "--rows", "decode_b1,decode_b8,prefill", "--num-prompts", "2", "--repeat", "1"),
        *("--input-len", "32", "--output-len", "4", "--time-limit", "100", "--peers", str(peers)),
        *("--out", str(out), "--trace", str(tmp_path / "trace"), "--commit", "abc", *SMALL),
    )
    assert done.returncode == 0, done.stderr
    rows = rows_of(out)
    assert [row["bench"] for row in rows] == ["engine", "decode", "skipped", "prefill", "end"]
    assert rows[2]["name"] == "decode_b8"
    assert {row["commit"] for row in rows} == {"abc"}
    assert "decode_b8: skipped: " in done.stderr
    messages = rows_of(tmp_path / "trace" / "client.jsonl")
    assert sum(m["tokens"] for m in messages if m["workload"] == "decode_b1") == 1 + 4 + 1 + 4
    assert any("compute_us" in line for line in rows_of(tmp_path / "trace" / "plans.jsonl"))


def test_the_program_names_an_unknown_workload() -> None:
    done = run("benchmarks/engine.py", "--rows", "decode_b1,gutenberg")
    assert done.returncode == 2
    assert done.stderr.startswith("engine: workload 'gutenberg' is unknown")


def test_the_program_refuses_a_size_that_holds_for_no_row() -> None:
    done = run("benchmarks/engine.py", "--rows", "decode_b1,decode_b8", "--num-prompts", "3")
    assert done.returncode == 2
    assert done.stderr.startswith(
        "engine: --num-prompts 3 does not hold for workload decode_b1, decode_b8; it holds for"
    )


BENCH = ("-P", "-m", "octavo.cli.main", "bench", "throughput", "tiny", *SMALL)
ENGINE = ("benchmarks/engine.py", "--rows", "sharegpt_like", *SMALL)
H200 = (
    "-c",
    "import sys\n"
    "from benchmarks import h200\n"
    "h200.torch.cuda.is_available = lambda: True\n"
    f"h200.programs = lambda out, commit: [('engine', {list(ENGINE)!r})]\n"
    "sys.argv = ['h200', '--out', sys.argv[1]]\n"
    "h200.main()",
)


@pytest.mark.parametrize(
    ("words", "number", "code", "last"),
    [
        (BENCH, signal.SIGINT, 130, "interrupted"),
        (BENCH, signal.SIGTERM, 143, "terminated"),
        (ENGINE, signal.SIGINT, 130, "interrupted"),
        (ENGINE, signal.SIGTERM, 143, "terminated"),
        (H200, signal.SIGTERM, 143, "terminated"),
    ],
    ids=["bench-int", "bench-term", "engine-int", "engine-term", "h200-term"],
)
def test_a_signal_ends_everything_in_order(
    words: tuple[str, ...], number: signal.Signals, code: int, last: str, tmp_path: Path
) -> None:
    with tempfile.TemporaryDirectory(prefix="oct") as folder:  # short: paths of sockets are bounded
        more = (str(tmp_path / "out"),) if words is H200 else ()
        process = subprocess.Popen(
            [sys.executable, *words, *more],
            cwd=ROOT,
            env=os.environ | {"TMPDIR": folder},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stderr is not None
            while not (line := process.stderr.readline()).startswith("sharegpt_like: 1000 requests"):
                assert line, "it ended by itself"
            started = psutil.Process(process.pid).children(recursive=True)
            assert len([p for p in started if "octavo.cli.main" in p.cmdline()]) == 2
            assert len(list(Path(folder).glob("octavo-bench-*"))) == 2
            process.send_signal(number)
            process.send_signal(number)  # `timeout` sends it to the process and to its group
            rest = process.stderr.read()
            assert process.wait(60) == code
        finally:
            process.kill()
            process.communicate()
        assert rest.splitlines()[-1] == last
        assert "Traceback" not in rest
        assert not list(Path(folder).glob("octavo-bench-*"))
        assert not [p for p in started if p.is_running()]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("name", [p.stem for p in (ROOT / "benchmarks").glob("gpu_*.py")] + ["h200"])
def test_programs_for_gpus_say_that_there_is_none(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as ended:  # in this process, which has loaded torch and triton already
        importlib.import_module(f"benchmarks.{name}").main()
    assert ended.value.code == 2
    assert re.fullmatch(rf"{name}: torch \S+ finds no CUDA device\n", capsys.readouterr().err)
    assert not (tmp_path / "out").exists()

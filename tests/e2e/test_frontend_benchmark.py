"""benchmarks/frontend_cpu.py runs, and counts what it sends."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_token_that_is_paced_is_delivered_over_both_doors(demo_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    sizes = ("--streams", "4", "--rate", "20", "--phases", "2", "--warmup", "0.5", "--seconds", "2")
    command = (sys.executable, "-m", "benchmarks.frontend_cpu", "--model", str(demo_model), *sizes)
    # The program itself fails if a stream gets fewer or more tokens than were sent to it.
    done = subprocess.run(
        [*command, "--output-json", str(out)], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["door"] for row in rows] == ["grpc", "http"]
    for row in rows:
        assert row["n_out"] > 0
        assert row["frontend_cpu_us_per_token"] > 0
        assert row["added_delay_ms_p99"] > 0

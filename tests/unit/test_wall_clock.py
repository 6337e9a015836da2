"""F51, I24: nothing decides by the wall clock; whoever reads it is named here, with what for."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("frontend", "scheduler", "worker", "kernels", "protos/octavo/wire", "cli")

READERS = {
    "frontend/metrics.py": "when the process started, as Prometheus has it",
    "frontend/openai/answers.py": "`created` of an answer",
    "frontend/openai/endpoints.py": "`created` of a model",
    "frontend/chat_template.py": "strftime_now() of a chat template",
    "protos/octavo/wire/tracing.py": "when spans began and ended, as OpenTelemetry has it",
    "cli/bench_report.py": "date of a benchmark",
    "cli/bench_serve.py": "date of a benchmark",
    "cli/status.py": "headline of a watched status",
    "cli/top.py": "headline of each look",
}

WALL = {
    "time": {"time", "time_ns", "localtime", "gmtime", "ctime", "asctime", "strftime"},
    "datetime": {"now", "utcnow", "today"},
    "date": {"today"},
}


def reads(source: str) -> set[str]:
    """Return the names through which a module reads the wall clock."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            base = node.value
            owner = base.id if isinstance(base, ast.Name) else base.attr if isinstance(base, ast.Attribute) else ""
            if node.attr in WALL.get(owner, ()):
                found.add(f"{owner}.{node.attr}")
        elif isinstance(node, ast.ImportFrom) and node.module == "time":
            found |= {f"time.{name.name}" for name in node.names if name.name in WALL["time"]}
        elif isinstance(node, ast.Constant) and node.value == "CLOCK_REALTIME":
            found.add("CLOCK_REALTIME")
    return found


def test_only_what_tells_people_the_time_reads_the_wall_clock() -> None:
    found = {
        path.relative_to(ROOT).as_posix()
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        if reads(path.read_text(encoding="utf-8"))
    }
    assert found == set(READERS)


def test_what_reads_the_wall_clock_is_seen() -> None:
    assert reads("import time\ntime.time()") == {"time.time"}
    assert reads("import datetime\ndatetime.datetime.now()") == {"datetime.now"}
    assert reads("from time import time_ns") == {"time.time_ns"}
    assert reads("import time\ntime.monotonic()\nself.time()") == set()

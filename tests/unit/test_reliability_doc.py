"""The table of faults in docs/reliability.md names every case once, and tests that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NUM_CASES = 62
ROW = re.compile(r"^\| (F\d+) \|", re.MULTILINE)
TEST = re.compile(r"`(?:tests/)?([\w/]+\.py)::(test_\w+)`")
PROGRAM = re.compile(r"`python -m ([\w.]+)")


def test_every_case_has_one_row_and_each_names_what_shows_it() -> None:
    text = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    assert ROW.findall(text) == [f"F{number}" for number in range(1, NUM_CASES + 1)]
    for line in text.splitlines():
        if ROW.match(line):
            assert TEST.search(line) or PROGRAM.search(line), line


def test_what_the_table_names_exists() -> None:
    text = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    for file, name in TEST.findall(text):
        source = (ROOT / "tests" / file).read_text(encoding="utf-8")
        assert re.search(rf"def {name}\(", source), f"{file}::{name}"
    for module in PROGRAM.findall(text):
        path = ROOT.joinpath(*module.split("."))
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module

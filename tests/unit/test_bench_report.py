"""Other engines' rows, and the table against them."""

from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from octavo.cli import bench_suite
from octavo.cli.bench_report import RowWriter, name_of, peer_of, print_table, read_rows, table
from octavo.cli.errors import CommandError, ConfigurationError

ROOT = Path(__file__).parents[2]
PEERS = read_rows([ROOT / "benchmarks" / "peers" / "vllm_0.26_h200.jsonl"])
LLAMA = {"engine": "octavo", "model": "llama-3.1-8b", "tensor_parallel_size": 1}
DECODE = LLAMA | {"bench": "decode", "batch": 8, "prompt": 512, "out": 128, "sha": "e8e8f19d9133d7a4"}


def printed(rows: list[dict[str, Any]], peers: list[dict[str, Any]]) -> list[list[str]]:
    out = StringIO()
    Console(file=out, width=200).print(table(rows, peers))
    return [line.split() for line in out.getvalue().splitlines()]


@pytest.mark.parametrize("name", ["vllm_0.26_h200.jsonl", "floor_h200.jsonl"])
def test_every_row_of_peers_says_where_it_is_from(name: str) -> None:
    for row in read_rows([ROOT / "benchmarks" / "peers" / name]):
        assert {"device", "torch", "date"} <= set(row)


def test_a_peer_ran_the_same_workload_of_the_same_model() -> None:
    peer = peer_of(DECODE, PEERS)
    assert peer is not None
    assert peer["tpot_cached_ms"] == 5.1905
    assert peer_of(DECODE | {"prompt": 64}, PEERS) is None
    assert peer_of(DECODE | {"model": "llama-2-7b"}, PEERS) is None
    two = peer_of(DECODE | {"tensor_parallel_size": 2}, PEERS)
    assert two is not None
    assert two["tpot_cached_ms"] == 3.692


def test_a_workload_of_another_size_has_no_peer() -> None:
    row = LLAMA | {"bench": "prefill", "n_in": 65536, "n_out": 64, "sha": "3b02b2c9d7a32dd9"}
    assert peer_of(row, PEERS) is not None
    assert peer_of(row | {"sha": "other"}, PEERS) is None


def test_a_ratio_above_one_is_better_whatever_the_figure() -> None:
    decode = DECODE | {"tpot_cached_ms": 5.1905 / 2, "tpot_ms": 5.2267 * 2, "ttft_all_ms": 93.21}
    prefill = LLAMA | {"bench": "prefill", "n_in": 65536, "n_out": 64, "in_tok_s": 43278.6 * 2}
    _, *lines = printed([decode, prefill], PEERS)
    assert [(line[0], line[1], line[-1]) for line in lines] == [
        ("decode_b8", "tpot_cached_ms", "2.00"),
        ("decode_b8", "tpot_ms", "0.50"),
        ("decode_b8", "ttft_all_ms", "1.00"),
        ("prefill", "in_tok_s", "2.00"),
    ]


def test_rates_are_shown_once_where_they_are_wanted() -> None:
    rates = {"out_tok_s": 1.0, "in_tok_s": 2.0, "total_tok_s": 3.0}
    rows = [{"bench": name, "model": "tiny", "wall_s": 0.5, **rates} for name in ("shared_prefix", "prefill")]
    out = StringIO()
    Console(file=out, width=200).print(table(rows, [], with_rates=True))
    lines = [line.split()[:2] for line in out.getvalue().splitlines()[1:]]
    assert lines == [
        *(["shared_prefix", figure] for figure in ("wall_s", "out_tok_s", "in_tok_s", "total_tok_s")),
        *(["prefill", figure] for figure in ("in_tok_s", "out_tok_s", "total_tok_s")),
    ]


def test_files_of_peers_without_a_row_to_compare_with_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    start = LLAMA | {"bench": "engine", "start_s": 12.5}
    print_table([start, DECODE], PEERS, [Path("peers.jsonl")])
    assert capsys.readouterr().err == ""
    print_table([start, DECODE | {"prompt": 64}], PEERS, [Path("a.jsonl"), Path("b.jsonl")])
    assert capsys.readouterr().err.startswith("--peers a.jsonl, b.jsonl: no row has the model, workload and sizes")
    print_table([start, DECODE | {"prompt": 64}], PEERS)  # none were asked for
    assert capsys.readouterr().err == ""


def test_without_peers_there_is_nothing_to_compare() -> None:
    header, start, skipped = printed(
        [{"bench": "engine", "start_s": 12.5, "model": "tiny"}, {"bench": "skipped", "name": "prefill"}], PEERS
    )
    assert header == ["workload", "figure", "unit", "octavo"]
    assert start == ["engine", "start_s", "s", "12.50"]
    assert skipped == ["prefill", "skipped"]


def test_names_are_those_that_suites_take() -> None:
    rows = [row for row in PEERS if row["bench"] not in ("engine", "end", "http")]
    bench_suite.check_names(map(name_of, rows))
    with pytest.raises(ConfigurationError, match="workload 'decode_b0' is unknown; there are sharegpt_like"):
        bench_suite.check_names(["prefill", "decode_b0"])


@pytest.mark.parametrize("model", ["llama-3.1-8b", "qwen3-0.6b"])
def test_a_suite_is_what_others_have_figures_of(model: str) -> None:
    rows = [r for r in PEERS if r["model"] == model and r["tensor_parallel_size"] == 1]
    theirs = [name_of(row) for row in rows if row["bench"] not in ("engine", "end", "http")]
    assert list(bench_suite.suite_of(model)) == theirs


def test_what_a_workload_may_take_is_what_it_took_others() -> None:
    expected = bench_suite.estimate(PEERS, "llama-3.1-8b")
    assert set(expected) == set(bench_suite.suite_of("llama-3.1-8b"))
    assert expected["sharegpt_like"] == pytest.approx(1.3 * (19.9845 + 19.9333))
    assert expected["decode_b1"] == pytest.approx(1.3 * (0.6465 + 0.6463 + 0.0171 + 0.0165 + 0.6414 + 0.647 + 0.0322))
    assert bench_suite.estimate(PEERS, "tiny") == {}


def test_rows_are_written_as_they_come(tmp_path: Path) -> None:
    writer = RowWriter(tmp_path / "rows.jsonl")
    writer.write({"bench": "engine"})
    assert read_rows([tmp_path / "rows.jsonl"]) == [{"bench": "engine"}]
    writer.common = {"model": "tiny"}
    writer.write({"bench": "prefill"})
    assert read_rows([tmp_path / "rows.jsonl"])[1] == {"model": "tiny", "bench": "prefill"}
    writer.close()
    with pytest.raises(CommandError, match="cannot be written"):
        RowWriter(tmp_path)


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"{}\n{", "line 2 is no JSON"), (b"[1]\n", "line 1 is no JSON object"), (b"\xff", "cannot be read")],
)
def test_rows_that_cannot_be_read(content: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "peers.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=words):
        read_rows([path])
    with pytest.raises(ConfigurationError, match="No such file"):
        read_rows([tmp_path / "absent"])

"""Requests to simulate: distributions do as they say, traces are checked line by line."""

from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pytest

from octavo.scheduler.simulate.arrivals import Arrival, BadTraffic, Distribution, Lengths, parse_shares, read_trace


def distribution(
    *,
    num_requests: int = 20_000,
    rate: float = 50.0,
    process: str = "poisson",
    burstiness: float = 2.0,
    prefix_share: float = 0.0,
    max_tokens: int = 0,
    seed: int = 0,
    prompt: str = "lognormal:200,1.0",
) -> Distribution:
    return Distribution(
        num_requests=num_requests,
        rate=rate,
        process=process,
        burstiness=burstiness,
        prompt=Lengths.parse(prompt),
        output=Lengths.parse("uniform:10,30"),
        callers=parse_shares("a=3,b=1", "caller-"),
        priorities={0: 0.5, 2: 0.5},
        prefix_share=prefix_share,
        num_prefix_groups=4,
        num_prefix_tokens=100,
        max_tokens=max_tokens,
        seed=seed,
    )


@pytest.mark.parametrize(
    ("text", "least", "greatest", "mean"),
    [
        ("7", 7, 7, 7.0),
        ("uniform:3,5", 3, 5, 4.0),
        ("lognormal:200,0.5", 1, 2**20, 200.0),
        ("lognormal:200,0,4,100", 100, 100, 100.0),
    ],
)
def test_lengths_are_drawn_as_named(text: str, least: int, greatest: int, mean: float) -> None:
    drawn = Lengths.parse(text).draw(np.random.default_rng(1), 20_000)
    assert least <= drawn.min()
    assert drawn.max() <= greatest
    assert drawn.mean() == pytest.approx(mean, rel=0.02)


@pytest.mark.parametrize(
    "text", ["", "0", "-3", "x", "nan", "uniform:5", "uniform:5,3", "uniform:0,3", "lognormal:1", "lognormal:9,1,0,5"]
)
def test_lengths_that_mean_nothing_are_refused(text: str) -> None:
    with pytest.raises(BadTraffic, match="lengths"):
        Lengths.parse(text)


def test_shares() -> None:
    assert parse_shares("3", "caller-") == {"caller-0": 1.0, "caller-1": 1.0, "caller-2": 1.0}
    assert parse_shares("a=3,b=0.5", "caller-") == {"a": 3.0, "b": 0.5}


@pytest.mark.parametrize("text", ["0", "a", "a=x", "a=-1,b=3", "a=0", "a=inf", "a=nan"])
def test_shares_that_mean_nothing_are_refused(text: str) -> None:
    with pytest.raises(BadTraffic):
        parse_shares(text, "caller-")


@pytest.mark.parametrize("process", ["poisson", "gamma", "uniform"])
def test_arrivals_come_in_order_at_the_rate(process: str) -> None:
    times = [a.at_s for a in distribution(process=process).arrivals()]
    assert len(times) == 20_000
    assert all(a <= b for a, b in pairwise(times))
    assert len(times) / times[-1] == pytest.approx(50, rel=0.05)


@pytest.mark.parametrize(("process", "burstiness", "expected"), [("poisson", 9, 1), ("gamma", 3, 3), ("uniform", 9, 0)])
def test_gaps_vary_as_named(process: str, burstiness: float, expected: float) -> None:
    times = np.array([a.at_s for a in distribution(process=process, burstiness=burstiness).arrivals()])
    gaps = np.diff(times)
    assert gaps.std() / gaps.mean() == pytest.approx(expected, abs=0.15)


def test_an_infinite_rate_is_all_at_once() -> None:
    assert {a.at_s for a in distribution(rate=float("inf"), num_requests=100).arrivals()} == {0.0}


def test_the_same_seed_means_the_same_requests_however_many() -> None:
    few = list(distribution(num_requests=300).arrivals())
    assert few == list(islice(distribution().arrivals(), 300))
    assert few != list(distribution(num_requests=300, seed=1).arrivals())


def test_shares_of_callers_priorities_and_prefixes() -> None:
    arrivals = list(distribution(prefix_share=0.25, prompt="10", max_tokens=20).arrivals())
    assert sum(a.caller == "a" for a in arrivals) / len(arrivals) == pytest.approx(0.75, abs=0.02)
    assert sum(a.priority == 2 for a in arrivals) / len(arrivals) == pytest.approx(0.5, abs=0.02)
    shared = [a for a in arrivals if a.prefix_group]
    assert len(shared) / len(arrivals) == pytest.approx(0.25, abs=0.02)
    assert {a.prefix_group for a in shared} == {f"group-{i}" for i in range(4)}
    assert {(a.num_prompt_tokens, a.num_prefix_tokens) for a in shared} == {(110, 100)}
    assert {(a.num_prompt_tokens, a.num_prefix_tokens) for a in arrivals if not a.prefix_group} == {(10, 0)}
    assert all(a.max_tokens == max(20, a.num_output_tokens) for a in arrivals)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"rate": 0.0}, "rate is 0.0: it must be above 0"),
        ({"num_requests": 0}, "requests is 0: it must be at least 1"),
        ({"process": "x"}, "arrivals is x: it must be one of poisson, gamma, uniform"),
        ({"burstiness": 0.0}, "burstiness is 0.0: it must be above 0 and finite"),
        ({"prefix_share": 1.1}, "prefix-share is 1.1: it must be from 0 to 1"),
        ({"max_tokens": -1}, "max-tokens is -1: it must be at least 0"),
        ({"seed": -1}, "seed is -1: it must be at least 0"),
    ],
)
def test_distributions_out_of_range_are_refused(wrong: dict[str, object], reason: str) -> None:
    with pytest.raises(BadTraffic, match=f"^{reason}$"):
        distribution(**wrong)  # type: ignore[arg-type]


def test_a_trace_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"arrival_s": 0.5, "prompt_tokens": 20, "output_tokens": 3}\n\n'
        '{"arrival_s": 0.5, "prompt_ids": [5, 6, 7], "output_tokens": 3, "max_tokens": 9, "caller": "x",'
        ' "priority": -2, "num_choices": 2, "prefix_group": "g", "prefix_tokens": 2}\n'
    )
    assert list(read_trace(path)) == [
        Arrival(0.5, 20, 3, 3),
        Arrival(0.5, 3, 3, 9, "x", -2, "g", 2, 2, (5, 6, 7)),
    ]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "truncated"),
        ('{"arrival_s": 1, "output_tokens": 3}', "give prompt_tokens or prompt_ids"),
        ('{"arrival_s": 1, "prompt_tokens": 4, "prompt_ids": [1], "output_tokens": 3}', "give prompt_tokens or"),
        ('{"arrival_s": -1, "prompt_tokens": 4, "output_tokens": 3}', "arrival_s"),
        ('{"arrival_s": 1, "prompt_tokens": 0, "output_tokens": 3}', "prompt_tokens"),
        ('{"arrival_s": 1, "prompt_tokens": 4, "output_tokens": 3, "max_tokens": 2}', "exceed max_tokens 2"),
        ('{"arrival_s": 1, "prompt_tokens": 4, "output_tokens": 3, "prefix_tokens": 5}', "exceed the prompt's 4"),
        ('{"arrival_s": 1, "prompt_tokens": 4, "output_tokens": 3, "x": 5}', "unknown field"),
        ('{"arrival_s": 0.1, "prompt_tokens": 4, "output_tokens": 3}', "is before 0.2"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"arrival_s": 0.2, "prompt_tokens": 4, "output_tokens": 3}\n' + line + "\n")
    with pytest.raises(BadTraffic, match=rf"trace.jsonl:2: .*{reason}"):
        list(read_trace(path))


def test_a_missing_trace_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadTraffic, match="No such file"):
        list(read_trace(tmp_path / "none"))


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_a_trace_without_a_request_is_an_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(BadTraffic, match=r"trace\.jsonl: there is no request in it"):
        list(read_trace(path))

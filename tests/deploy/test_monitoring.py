"""The Grafana board shows what there is, from the source that is provisioned."""

import json
import re
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
BOARD: dict[str, Any] = json.loads((DEPLOY / "grafana" / "dashboards" / "octavo.json").read_text())
DOCS = (DEPLOY.parent / "docs" / "metrics.md").read_text(encoding="utf-8")


def known_metrics() -> dict[str, set[str]]:
    """Return the labels of every metric, by the name of its samples, as docs/metrics.md has them."""
    found: dict[str, set[str]] = {}
    for name, kind, words in re.findall(r"^\| `(octavo_\w+)` \| (counter|gauge|histogram) \| (.*) \|$", DOCS, re.M):
        by = re.search(r"By ((?:`\w+`(?:, )?)+)\.$", words)
        labels = {"model_name", *(re.findall(r"`(\w+)`", by[1]) if by else ())}
        if kind == "histogram":
            found |= {f"{name}_bucket": labels | {"le"}, f"{name}_sum": labels, f"{name}_count": labels}
        else:
            found[name] = labels
    return found


def test_every_metric_of_the_board_exists_with_its_labels() -> None:
    known = known_metrics()
    expressions = [target["expr"] for panel in BOARD["panels"] for target in panel["targets"]]
    expressions += [variable["query"]["query"] for variable in BOARD["templating"]["list"]]
    used = {name for expression in expressions for name in re.findall(r"\boctavo_\w+", expression)}
    assert used <= set(known)
    for expression in expressions:
        labels = set().union(*(known[name] for name in re.findall(r"\boctavo_\w+", expression)))
        groups = re.findall(r"by \(([\w, ]+)\)", expression)
        assert {label.strip() for group in groups for label in group.split(",")} <= labels, expression


def test_the_board_shows_what_it_promises() -> None:
    text = json.dumps([panel["targets"] for panel in BOARD["panels"]])
    for name in (
        "requests_total",
        "time_to_first_token_seconds_bucket",
        "request_time_per_output_token_seconds_bucket",
        "num_requests_waiting",
        "kv_cache_free_blocks",
        "prefix_cache_hits_total",
        "num_preemptions_total",
        "process_start_time_seconds",
        "scheduler_sessions_begun_total",
    ):
        assert f"octavo_{name}" in text


def test_panels_do_not_overlap_and_are_told_apart() -> None:
    panels = BOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken
        assert place["x"] + place["w"] <= 24
        taken |= cells


def test_the_source_is_provisioned_and_scrapes_the_frontend() -> None:
    provisioning = DEPLOY / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources" / "octavo.yaml").read_text())["datasources"]
    assert {panel["datasource"]["uid"] for panel in BOARD["panels"]} == {source["uid"]}
    assert source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "octavo.yaml").read_text())["providers"]
    compose = yaml.safe_load((DEPLOY.parent / "compose.yaml").read_text())
    assert f"./deploy/grafana/dashboards:{provider['options']['path']}:ro" in compose["services"]["grafana"]["volumes"]
    scraped = yaml.safe_load((DEPLOY / "prometheus.yaml").read_text())["scrape_configs"]
    targets = {target for job in scraped for one in job["static_configs"] for target in one["targets"]}
    command = compose["services"]["frontend"]["command"]
    (port,) = (word.partition("=")[2] for word in command if word.startswith("--health-port="))
    assert f"frontend:{port}" in targets

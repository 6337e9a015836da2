"""What README.md tells people to type."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer.main
from google.protobuf import json_format
from google.protobuf.message_factory import GetMessageClass

from octavo.cli.main import build
from octavo.scheduler.simulate import __main__ as simulate
from octavo.v1 import admin_pb2, generation_pb2, model_pb2, tokenizer_pb2

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def test_the_flags_of_the_table_are_those_of_serve() -> None:
    group = typer.main.get_command(build("serve"))
    found = group.get_command(typer.Context(group), "serve")  # type: ignore[attr-defined]
    known: dict[str, Any] = {flag: p.default for p in found.params for flag in (*p.opts, *p.secondary_opts)}
    rows = re.findall(r"^\| (`--.*?) \| ?(.*?) ?\| ", README, re.MULTILINE)
    shown = {flag.partition(" ")[0] for flags, _ in rows for flag in re.findall(r"`(.*?)`", flags)}
    assert [p.opts for p in found.params if not shown.intersection((*p.opts, *p.secondary_opts))] == [["model"]]
    for flags, defaults in rows:
        names = [flag.partition(" ")[0] for flag in re.findall(r"`(.*?)`", flags)]
        assert set(names) <= set(known)
        for name, default in zip(names, defaults.split(", "), strict=False):
            if default.partition(":")[0].isdigit():
                assert known[name] == int(default.partition(":")[0]), name


def grpcurl_calls() -> list[tuple[str, str]]:
    """Return method and JSON of each call."""
    found = []
    for line in re.findall(r"^grpcurl (?:.*\\\n)*.*$", README, re.MULTILINE):
        words = shlex.split(line.replace("\\\n", " "), comments=True)
        if "/" in words[-1]:
            found.append((words[-1], words[words.index("-d") + 1] if "-d" in words else "{}"))
    return found


def test_grpcurl_calls_what_there_is() -> None:
    calls = grpcurl_calls()
    assert {method.partition("/")[0] for method, _ in calls} == {
        f"octavo.v1.{name}Service" for name in ("Generation", "Model", "Tokenizer", "Admin")
    }
    services = {
        name: service
        for module in (admin_pb2, generation_pb2, model_pb2, tokenizer_pb2)
        for name, service in module.DESCRIPTOR.services_by_name.items()
    }
    for method, data in calls:
        service, _, name = method.removeprefix("octavo.v1.").partition("/")
        request = GetMessageClass(services[service].methods_by_name[name].input_type)()
        json_format.Parse(data, request)


def test_the_simulated_policies_differ(capsys: pytest.CaptureFixture[str]) -> None:
    (command,) = re.findall(r"octavo\.scheduler\.simulate (traffic (?:.*\\\n)*.*)\n", README)
    words = shlex.split(command.replace("\\\n", " "))
    words[words.index("--requests") + 1] = "400"
    assert simulate.main(words) == 0
    reports = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [report["policy"] for report in reports] == ["fcfs", "priority", "fair"]
    assert not any(report["refused"] for report in reports)
    assert len({json.dumps(report["queue_ms"]) for report in reports}) == 3
    _, priority, fair = reports
    assert priority["queue_ms_by_priority"]["0"]["mean"] < priority["queue_ms_by_priority"]["1"]["mean"] / 2
    assert fair["queue_ms_by_caller"]["c"]["mean"] < fair["queue_ms_by_caller"]["a"]["mean"] / 2

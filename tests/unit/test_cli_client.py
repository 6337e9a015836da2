"""octavo generate, chat, status and cache reset against a service that says what the test wants."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from typer.testing import CliRunner, Result

from octavo.cli.connection import failure
from octavo.cli.errors import CommandError
from octavo.cli.main import build
from octavo.v1 import admin_pb2, admin_pb2_grpc
from octavo.v1 import generation_pb2 as pb
from octavo.v1 import generation_pb2_grpc as rpc


class FakeService(rpc.GenerationServiceServicer, admin_pb2_grpc.AdminServiceServicer):
    """Keeps the requests, answers "yes", and reports `status`."""

    def __init__(self) -> None:
        self.inputs: list[pb.GenerationInput] = []
        self.num_resets = 0
        self.num_drains = 0
        self.num_tokens = 0
        self.num_cached = 42
        self.refusal = ""
        self.status = admin_pb2.GetStatusResponse(models=["tiny"], ready=True, max_model_len=64)
        self.history: list[admin_pb2.GetStatusResponse] = []
        self.watches: list[admin_pb2.WatchStatusRequest] = []
        self.address = ""
        self.usage: pb.Usage | None = None
        self.thought = self.failure = ""

    def Generate(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> pb.GenerateResponse:
        raise NotImplementedError  # the commands stream

    def GenerateStream(
        self, request: pb.GenerateStreamRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.GenerateStreamResponse]:
        self.inputs.append(request.input)
        if self.thought:
            yield pb.GenerateStreamResponse(delta=pb.Delta(reasoning=self.thought))
        yield pb.GenerateStreamResponse(delta=pb.Delta(text="yes"))
        if self.failure:
            context.abort(grpc.StatusCode.UNAVAILABLE, self.failure)
        yield pb.GenerateStreamResponse(finished=pb.Finished(usage=self.usage))

    def GetStatus(
        self, request: admin_pb2.GetStatusRequest, context: grpc.ServicerContext
    ) -> admin_pb2.GetStatusResponse:
        return self.status

    def WatchStatus(
        self, request: admin_pb2.WatchStatusRequest, context: grpc.ServicerContext
    ) -> Iterator[admin_pb2.WatchStatusResponse]:
        self.watches.append(request)
        for status in self.history:
            yield admin_pb2.WatchStatusResponse(status=status)
        if self.refusal:
            context.abort(grpc.StatusCode.UNAVAILABLE, self.refusal)

    def GetMetrics(
        self, request: admin_pb2.GetMetricsRequest, context: grpc.ServicerContext
    ) -> admin_pb2.GetMetricsResponse:
        if self.refusal:
            context.abort(grpc.StatusCode.UNAVAILABLE, self.refusal)
        self.num_tokens += 100
        return admin_pb2.GetMetricsResponse(text=f"octavo_generation_tokens_total {self.num_tokens}\n")

    def Drain(self, request: admin_pb2.DrainRequest, context: grpc.ServicerContext) -> admin_pb2.DrainResponse:
        self.num_drains += 1
        return admin_pb2.DrainResponse(running_requests=2)

    def ReplaceScheduler(
        self, request: admin_pb2.ReplaceSchedulerRequest, context: grpc.ServicerContext
    ) -> admin_pb2.ReplaceSchedulerResponse:
        if self.refusal:
            context.abort(grpc.StatusCode.UNAVAILABLE, self.refusal)
        return admin_pb2.ReplaceSchedulerResponse(running_requests=3)

    def ResetPrefixCache(
        self, request: admin_pb2.ResetPrefixCacheRequest, context: grpc.ServicerContext
    ) -> admin_pb2.ResetPrefixCacheResponse:
        if self.refusal:
            context.abort(grpc.StatusCode.UNAVAILABLE, self.refusal)
        self.num_resets += 1
        return admin_pb2.ResetPrefixCacheResponse(dropped_blocks=self.num_cached)


@pytest.fixture
def service() -> Iterator[FakeService]:
    running = FakeService()
    server = grpc.server(ThreadPoolExecutor(2))
    rpc.add_GenerationServiceServicer_to_server(running, server)
    admin_pb2_grpc.add_AdminServiceServicer_to_server(running, server)
    running.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield running
    server.stop(None).wait()


def run(service: FakeService, *arguments: str) -> Result:
    return CliRunner().invoke(build(arguments[0]), [*arguments, "--address", service.address])


def test_top_looks_twice(service: FakeService) -> None:
    done = run(service, "top", "--once", "--interval", "0.1")
    assert done.exit_code == 0, done.output
    assert re.search(r"tokens +[\d,]+\.\d /s out", done.output)
    service.refusal = "gone"
    assert run(service, "top", "--once").exit_code == 1


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_priority_and_salt_reach_the_service(service: FakeService, command: str) -> None:
    done = run(service, command, "is it so?", "--priority", "-3", "--cache-salt", "pepper", "--max-tokens", "7")
    assert (done.exit_code, done.output) == (0, "yes\n")
    (request,) = service.inputs
    assert (request.priority, request.cache_salt, request.stopping.max_tokens) == (-3, "pepper", 7)
    assert run(service, command, "is it so?").exit_code == 0
    assert (service.inputs[1].priority, service.inputs[1].cache_salt) == (0, "")


def test_thoughts_are_shown_beside_the_answer(service: FakeService) -> None:
    service.thought = "Hm."
    done = run(service, "chat", "is it so?")
    assert (done.exit_code, done.stdout, done.stderr) == (0, "yes\n", "Hm.\n")


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_an_error_amid_an_answer_has_a_line_of_its_own(service: FakeService, command: str) -> None:
    service.failure = "the worker is gone"
    done = run(service, command, "is it so?")
    assert done.stdout == "yes\n"
    assert isinstance(done.exception, CommandError)


def test_a_priority_that_no_request_can_have_is_refused(service: FakeService) -> None:
    done = run(service, "generate", "x", "--priority", str(2**31))
    assert done.exit_code == 2
    assert not service.inputs


def test_cache_reset_says_how_much_was_dropped(service: FakeService) -> None:
    done = run(service, "cache", "reset")
    assert (done.exit_code, done.output, service.num_resets) == (0, "the prefix cache is empty: it held 42 blocks\n", 1)
    service.num_cached = 0
    assert run(service, "cache", "reset").output == "the prefix cache was empty\n"


def test_a_cache_reset_that_failed_is_no_success(service: FakeService) -> None:
    service.refusal = "the scheduler is gone"
    done = run(service, "cache", "reset")
    assert isinstance(done.exception, CommandError)
    assert str(done.exception) == "UNAVAILABLE: the scheduler is gone"


def test_status_shows_the_hit_rate(service: FakeService) -> None:
    held = service.status.scheduler
    held.total_blocks, held.cached_blocks, held.recomputed_tokens = 64, 17, 31
    held.prefix_caching = True
    assert "prefix cache: 17 blocks, no prompt yet" in run(service, "status").output
    held.prompt_tokens, held.cached_prompt_tokens = 800, 100
    done = run(service, "status")
    assert done.exit_code == 0
    assert "prefix cache: 17 blocks, 12.5 % of 800 prompt tokens found" in done.output
    assert "31 tokens recomputed" in done.output
    assert "contradicted" not in done.output
    held.failed_checks = 2
    assert "contradicted itself 2 times" in run(service, "status").output


def test_status_as_json_has_every_field(service: FakeService) -> None:
    service.status.scheduler.limits.max_waiting_requests = 1024
    service.status.scheduler.cached_prompt_tokens = 5
    held = json.loads(run(service, "status", "--json").output)["scheduler"]
    assert set(held) == {field.name for field in admin_pb2.SchedulerStatus.DESCRIPTOR.fields}
    assert held["cached_prompt_tokens"] == "5"


def test_status_is_watched_until_the_service_has_drained(service: FakeService) -> None:
    first = admin_pb2.GetStatusResponse(models=["tiny"], ready=True, max_model_len=64)
    last = admin_pb2.GetStatusResponse(models=["tiny"], reason="draining: no new requests are taken")
    service.history = [first, last]
    done = run(service, "status", "--watch", "--interval", "0.5")
    shown = [line for line in done.output.splitlines() if line.startswith("tiny")]
    assert shown == ["tiny: ready, context 64 tokens", "tiny: not ready: draining: no new requests are taken"]
    assert (done.exit_code, done.output.count("---")) == (1, 2)
    assert service.watches[0].interval.ToMilliseconds() == 500
    lines = run(service, "status", "--watch", "--json").output.splitlines()
    assert [json.loads(line)["ready"] for line in lines] == [True, False]
    assert service.watches[1].interval.ToMilliseconds() == 1000


def test_a_watch_that_ends_badly_is_no_success(service: FakeService) -> None:
    service.history = [service.status]
    service.refusal = "the frontend has stopped"
    done = run(service, "status", "--watch")
    assert isinstance(done.exception, CommandError)
    assert str(done.exception) == "UNAVAILABLE: the frontend has stopped"
    assert done.output.splitlines()[1] == "tiny: ready, context 64 tokens"


def test_status_says_what_is_off_and_who_is_first(service: FakeService) -> None:
    held = service.status.scheduler
    held.scheduling_policy, held.max_num_seqs, held.prompt_tokens = "fair", 48, 100
    shown = run(service, "status").output
    assert "policy: fair; at most 48 sequences run at once\n" in shown
    assert "prefix cache: off\n" in shown
    assert "0.0 %" not in shown


def test_status_says_how_much_may_wait(service: FakeService) -> None:
    held = service.status.scheduler
    held.waiting_tokens, held.limits.max_waiting_requests, held.limits.max_waiting_tokens = 70, 1024, 5000
    assert (
        "queue: 70 tokens; at most 1024 requests, 5000 tokens; of each caller no limit\n"
        in run(service, "status").output
    )
    held.limits.max_requests_per_caller, held.limits.max_waiting_tokens_per_caller = 8, 900
    assert "of each caller 8 requests, 900 waiting tokens\n" in run(service, "status").output


def test_epochs_have_all_their_digits(service: FakeService) -> None:
    service.status.processes.add(role="worker", pid=7, state="ready", epoch=0xABC, boot_id="b1")
    service.status.processes.add(role="frontend", pid=8, state="connecting", boot_id="b2")
    lines = [line.split() for line in run(service, "status").output.splitlines()]
    assert ["worker", "7", "ready", "0000000000000abc", "b1"] in lines
    assert ["frontend", "8", "connecting", "-", "b2"] in lines


def test_a_context_that_is_not_known_yet_is_not_shown(service: FakeService) -> None:
    assert run(service, "status").output.startswith("tiny: ready, context 64 tokens\n")
    service.status.Clear()
    service.status.models.append("tiny")
    service.status.reason = "no worker is ready"
    done = run(service, "status")
    assert (done.exit_code, done.output.splitlines()[0]) == (1, "tiny: not ready: no worker is ready")


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_usage_is_shown_on_standard_error_where_it_is_wanted(service: FakeService, command: str) -> None:
    service.usage = pb.Usage(prompt_tokens=40, cached_prompt_tokens=32, completion_tokens=7)
    service.usage.queue_time.FromMicroseconds(1500)
    service.usage.decode_time.FromMilliseconds(250)
    done = run(service, command, "x", "--usage")
    assert done.stdout == "yes\n"
    assert done.stderr == "prompt 40 tokens (32 cached), output 7; queue 1.5 ms, prefill 0.0 ms, decode 250.0 ms\n"
    assert run(service, command, "x").stderr == ""


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("127.0.0.1:50051", "(HOST:PORT); 'octavo serve demo' starts one here"),
        ("localhost:51999", "(HOST:PORT); 'octavo serve demo --grpc-port 51999' starts one here"),
        ("[::1]:51999", "(HOST:PORT); 'octavo serve demo --host ::1 --grpc-port 51999' starts one here"),
        ("192.0.2.1:50051", "no service answers at 192.0.2.1:50051 (HOST:PORT)"),
        ("nonsense", "no service answers at nonsense (HOST:PORT)"),
    ],
)
def test_where_nothing_answers_the_hint_would_help(address: str, words: str) -> None:
    class Unreachable(grpc.RpcError):
        def code(self) -> grpc.StatusCode:
            return grpc.StatusCode.UNAVAILABLE

        def details(self) -> str:
            return "failed to connect to all addresses"

    assert str(failure(address, Unreachable())).endswith(words)


def test_drain_says_what_still_runs(service: FakeService) -> None:
    done = run(service, "drain")
    assert (done.exit_code, done.output) == (0, "the service drains; requests that have begun: 2\n")
    assert (service.num_drains, service.watches) == (1, [])


@pytest.mark.parametrize(("last", "exit_code", "words"), [("drained", 0, "drained\n"), ("draining", 1, "")])
def test_drain_waits_for_the_last_request(service: FakeService, last: str, exit_code: int, words: str) -> None:
    for running, state in ((2, "draining"), (0, last)):
        status = admin_pb2.GetStatusResponse(scheduler=admin_pb2.SchedulerStatus(running_requests=running))
        status.processes.add(role="frontend", state="drained")
        status.processes.add(role="frontend", state=state)
        service.history.append(status)
    done = run(service, "drain", "--wait")
    assert done.exit_code == exit_code
    assert done.output == "the service drains; requests that have begun: 2\n2 running, 0 waiting\n" + words


def test_the_scheduler_is_replaced(service: FakeService) -> None:
    words = "the scheduler leaves; requests that have begun: 3\n"
    done = run(service, "replace-scheduler")
    assert (done.exit_code, done.output, service.watches) == (0, words, [])
    service.status.processes.add(role="scheduler", boot_id="first")
    for ready, boot_id in ((True, "first"), (False, ""), (False, "second"), (True, "second")):
        status = admin_pb2.GetStatusResponse(ready=ready)
        status.processes.add(role="frontend", boot_id="f")
        if boot_id:
            status.processes.add(role="scheduler", boot_id=boot_id)
        service.history.append(status)
    done = run(service, "replace-scheduler", "--wait")
    assert done.exit_code == 0
    assert done.output.startswith(words + "the next one is there after ")
    del service.history[-1]
    assert run(service, "replace-scheduler", "--wait").exit_code == 1


def test_a_scheduler_that_is_not_there_is_not_replaced(service: FakeService) -> None:
    service.refusal = "the scheduler is gone"
    done = run(service, "replace-scheduler", "--wait")
    assert str(done.exception) == "UNAVAILABLE: the scheduler is gone"

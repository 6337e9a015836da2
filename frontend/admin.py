"""AdminService: what the service is made of, what it holds, what it is to forget, and that it is to end."""

import asyncio
import os
from collections.abc import Awaitable, Callable

import grpc

from octavo.frontend.config import FrontendConfig
from octavo.frontend.errors import LOADING, InvalidArgument, TooManyStreams, Unavailable
from octavo.frontend.lifecycle import Lifecycle
from octavo.frontend.rpc import Context, Incoming, answer, known, parse
from octavo.frontend.scheduler_client import SchedulerClient
from octavo.frontend.scrapes import Scrapes
from octavo.v1 import admin_pb2
from octavo.wire.requests import StatusReport

ADMIN_SERVICE = "octavo.v1.AdminService"

DEFAULT_INTERVAL_S, MIN_INTERVAL_S, MAX_INTERVAL_S = 1.0, 0.1, 60.0
"""Between two messages of a watch."""

MAX_WATCHES = 16
"""At one time. Each asks the scheduler once an interval, which answers in the time that a step needs."""


class AdminServicer:
    """Answers for the whole service, with what the scheduler reports.

    Args:
        config: names and patience.
        lifecycle: whether this frontend drains, and how it is made to.
        scrapes: makes the metrics.
    """

    def __init__(self, config: FrontendConfig, lifecycle: Lifecycle, scrapes: Scrapes) -> None:
        self._scrapes = scrapes
        self._config = config
        self._lifecycle = lifecycle
        self._client: SchedulerClient | None = None
        self._num_watches = 0

    def add_to(self, server: grpc.aio.Server) -> None:
        """Offer the service. What a GetStatusRequest holds, even bytes that are none, changes nothing."""
        handlers = {
            "GetStatus": grpc.unary_unary_rpc_method_handler(
                self.get_status, parse(admin_pb2.GetStatusRequest), admin_pb2.GetStatusResponse.SerializeToString
            ),
            "WatchStatus": grpc.unary_stream_rpc_method_handler(
                self.watch_status,
                parse(admin_pb2.WatchStatusRequest),
                admin_pb2.WatchStatusResponse.SerializeToString,
            ),
            "GetMetrics": grpc.unary_unary_rpc_method_handler(
                self.get_metrics, parse(admin_pb2.GetMetricsRequest), admin_pb2.GetMetricsResponse.SerializeToString
            ),
            "Drain": grpc.unary_unary_rpc_method_handler(
                self.drain, parse(admin_pb2.DrainRequest), admin_pb2.DrainResponse.SerializeToString
            ),
            "ResetPrefixCache": grpc.unary_unary_rpc_method_handler(
                self.reset_prefix_cache,
                parse(admin_pb2.ResetPrefixCacheRequest),
                admin_pb2.ResetPrefixCacheResponse.SerializeToString,
            ),
            "ReplaceScheduler": grpc.unary_unary_rpc_method_handler(
                self.replace_scheduler,
                parse(admin_pb2.ReplaceSchedulerRequest),
                admin_pb2.ReplaceSchedulerResponse.SerializeToString,
            ),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(ADMIN_SERVICE, handlers),))

    def attach(self, client: SchedulerClient) -> None:
        """Begin to ask the scheduler."""
        self._client = client

    async def get_status(
        self, _request: Incoming[admin_pb2.GetStatusRequest], context: Context
    ) -> admin_pb2.GetStatusResponse:
        """Return the state of the service; without the scheduler's part if it does not answer in time."""
        return await answer(context, self._status)

    async def watch_status(self, request: Incoming[admin_pb2.WatchStatusRequest], context: Context) -> None:
        """Send the state of the service whenever it has changed, until the service has drained."""

        async def work() -> None:
            interval_s = _interval_s(known(request, admin_pb2.WatchStatusRequest))
            if self._num_watches >= MAX_WATCHES:
                raise TooManyStreams(f"{MAX_WATCHES} watches of the status are running here, the limit")
            self._num_watches += 1
            try:
                await self._watch(context, interval_s)
            finally:
                self._num_watches -= 1

        await answer(context, work)

    async def get_metrics(
        self, request: Incoming[admin_pb2.GetMetricsRequest], context: Context
    ) -> admin_pb2.GetMetricsResponse:
        """Return all metrics as text; without the scheduler's and the worker's if the scheduler does not answer in time."""

        async def work() -> admin_pb2.GetMetricsResponse:
            known(request, admin_pb2.GetMetricsRequest)
            body, _ = await self._scrapes.make()
            return admin_pb2.GetMetricsResponse(text=body.decode())

        return await answer(context, work)

    async def drain(self, request: Incoming[admin_pb2.DrainRequest], context: Context) -> admin_pb2.DrainResponse:
        """Take no new requests from now on, here at once and in the other frontends when the scheduler tells them."""

        async def work() -> admin_pb2.DrainResponse:
            known(request, admin_pb2.DrainRequest)
            self._lifecycle.service_drains = True
            await self._lifecycle.drain()
            client = self._client
            num_running = await client.drain_service() if client is not None else None
            if num_running is None:
                # The next session of ours, or of another frontend, begins with it.
                num_running = len(client.streams) if client is not None else 0
            return admin_pb2.DrainResponse(running_requests=num_running)

        return await answer(context, work)

    async def _watch(self, context: Context, interval_s: float) -> None:
        loop = asyncio.get_running_loop()
        sent: admin_pb2.GetStatusResponse | None = None
        while True:
            due = loop.time() + interval_s
            # Looked at before the state is asked for: the last state is one of after the end.
            drained = self._lifecycle.drained
            status = await self._status()
            drained = drained and all(
                one.state == "drained" for one in status.processes if one.role == "frontend" and one.epoch
            )
            if status != sent:
                await context.write(admin_pb2.WatchStatusResponse(status=status))
                sent = status
            if drained:
                return
            await self._lifecycle.wait_over(due - loop.time())
            if self._lifecycle.stopped and not self._lifecycle.drained:
                raise Unavailable("the frontend has stopped")

    async def _status(self) -> admin_pb2.GetStatusResponse:
        client, draining = self._client, self._lifecycle.draining
        report = await client.status() if client is not None else None
        response = admin_pb2.GetStatusResponse(models=self._config.served_model_names)
        response.ready = client is not None and client.serving and not client.reason and not draining
        if not response.ready:
            reason = LOADING if client is None else client.reason
            response.reason = "draining: no new requests are taken" if draining else reason
        if client is not None and client.facts is not None:
            response.max_model_len = client.facts.max_model_len
        reported = {process.boot_id for process in report.processes} if report is not None else set()
        if client is None or client.boot_id not in reported:
            response.processes.append(self._own_status(client))
        if report is not None:
            _add_report(response, report)
            for process in response.processes:
                # The scheduler may not have heard of it yet.
                if client is not None and process.boot_id == client.boot_id:
                    process.state = self._lifecycle.state or process.state
            if client is not None and client.facts is not None:
                response.scheduler.scheduling_policy = client.facts.scheduling_policy
                response.scheduler.prefix_caching = client.facts.prefix_caching
                response.scheduler.max_num_seqs = client.facts.max_num_seqs
        return response

    async def reset_prefix_cache(
        self, request: Incoming[admin_pb2.ResetPrefixCacheRequest], context: Context
    ) -> admin_pb2.ResetPrefixCacheResponse:
        """Make the scheduler forget all cached prefixes; UNAVAILABLE if it does not say that it has."""

        async def work() -> admin_pb2.ResetPrefixCacheResponse:
            known(request, admin_pb2.ResetPrefixCacheRequest)
            num_dropped = await self._confirmed(SchedulerClient.reset_prefix_cache)
            return admin_pb2.ResetPrefixCacheResponse(dropped_blocks=num_dropped)

        return await answer(context, work)

    async def replace_scheduler(
        self, request: Incoming[admin_pb2.ReplaceSchedulerRequest], context: Context
    ) -> admin_pb2.ReplaceSchedulerResponse:
        """Make the scheduler leave, so that the next one is started; UNAVAILABLE if it does not say that it does."""

        async def work() -> admin_pb2.ReplaceSchedulerResponse:
            known(request, admin_pb2.ReplaceSchedulerRequest)
            num_running = await self._confirmed(SchedulerClient.replace_scheduler)
            return admin_pb2.ReplaceSchedulerResponse(running_requests=num_running)

        return await answer(context, work)

    async def _confirmed(self, ask: Callable[[SchedulerClient], Awaitable[int | None]]) -> int:
        """Ask the scheduler for something, and return the number with which it confirms that.

        Raises:
            Unavailable: it does not.
        """
        client = self._client
        if client is None:
            raise Unavailable(LOADING)
        number = await ask(client)
        if number is not None:
            return number
        reason = "" if client.epoch else client.reason
        wait = f"{self._config.status_timeout_s:g} s"
        raise Unavailable(reason or f"the scheduler did not confirm it within {wait}, or is asked too much at once")

    def _own_status(self, client: SchedulerClient | None) -> admin_pb2.ProcessStatus:
        if self._lifecycle.state is not None:
            state = self._lifecycle.state
        elif client is None:
            state = "loading"
        else:
            state = "ready" if client.epoch else "connecting"
        return admin_pb2.ProcessStatus(
            role="frontend",
            pid=os.getpid(),
            boot_id=client.boot_id if client is not None else "",
            epoch=client.epoch if client is not None else 0,
            state=state,
        )


def _interval_s(request: admin_pb2.WatchStatusRequest) -> float:
    if not request.HasField("interval"):
        return DEFAULT_INTERVAL_S
    asked = request.interval
    interval_s = asked.seconds + asked.nanos / 1e9
    if not MIN_INTERVAL_S <= interval_s <= MAX_INTERVAL_S:
        message = f"{interval_s:g} s must be from {MIN_INTERVAL_S:g} to {MAX_INTERVAL_S:g} s"
        raise InvalidArgument(message, field_path="interval")
    return interval_s


def _add_report(response: admin_pb2.GetStatusResponse, report: StatusReport) -> None:
    for process in report.processes:
        response.processes.add(
            role=process.role, pid=process.pid, boot_id=process.boot_id, epoch=process.epoch, state=process.state
        )
    scheduler = response.scheduler
    scheduler.running_requests = report.running
    scheduler.waiting_requests = report.waiting
    scheduler.total_blocks = report.total_blocks
    scheduler.free_blocks = report.free_blocks
    scheduler.block_size = report.block_size
    scheduler.steps = report.steps
    scheduler.preemptions = report.preemptions
    scheduler.cached_blocks = report.cached_blocks
    scheduler.prompt_tokens = report.prompt_tokens
    scheduler.cached_prompt_tokens = report.cached_prompt_tokens
    scheduler.recomputed_tokens = report.recomputed_tokens
    scheduler.adopted_rows = report.adopted_rows
    scheduler.adopted_tokens = report.adopted_tokens
    scheduler.failed_checks = report.failed_checks
    scheduler.waiting_reason = report.waiting_reason
    scheduler.waiting_tokens = report.waiting_tokens
    if (limits := report.limits) is not None:
        for name in limits.__struct_fields__:
            setattr(scheduler.limits, name, getattr(limits, name))
        scheduler.limits.SetInParent()

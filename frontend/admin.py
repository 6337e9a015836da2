"""AdminService: what the service is made of, what it holds, and what it is to forget."""

import os
from collections.abc import Callable

import grpc

from octavo.frontend.config import FrontendConfig
from octavo.frontend.errors import InvalidArgument, ServiceError, Unavailable, abort
from octavo.frontend.metadata import read_request_id
from octavo.frontend.rpc import parse
from octavo.frontend.scheduler_client import SchedulerClient
from octavo.v1 import admin_pb2
from octavo.wire.requests import StatusReport

ADMIN_SERVICE = "octavo.v1.AdminService"

Context = grpc.aio.ServicerContext[object, object]


class AdminServicer:
    """Answers for the whole service, with what the scheduler reports.

    Args:
        config: names and patience.
        is_draining: whether this frontend is about to stop.
    """

    def __init__(self, config: FrontendConfig, is_draining: Callable[[], bool]) -> None:
        self._config = config
        self._is_draining = is_draining
        self._client: SchedulerClient | None = None

    def add_to(self, server: grpc.aio.Server) -> None:
        """Offer the service. What a GetStatusRequest holds, even bytes that are none, changes nothing."""
        handlers = {
            "GetStatus": grpc.unary_unary_rpc_method_handler(
                self.get_status, parse(admin_pb2.GetStatusRequest), admin_pb2.GetStatusResponse.SerializeToString
            ),
            "ResetPrefixCache": grpc.unary_unary_rpc_method_handler(
                self.reset_prefix_cache,
                parse(admin_pb2.ResetPrefixCacheRequest),
                admin_pb2.ResetPrefixCacheResponse.SerializeToString,
            ),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(ADMIN_SERVICE, handlers),))

    def attach(self, client: SchedulerClient) -> None:
        """Begin to ask the scheduler."""
        self._client = client

    async def get_status(
        self, _request: admin_pb2.GetStatusRequest | None, _context: Context
    ) -> admin_pb2.GetStatusResponse:
        """Return the state of the service; without the scheduler's part if it does not answer in time."""
        client = self._client
        report = await client.status() if client is not None else None
        response = admin_pb2.GetStatusResponse(models=self._config.served_model_names)
        response.ready = client is not None and client.serving and not client.reason and not self._is_draining()
        if not response.ready:
            reason = "the model is being loaded" if client is None else client.reason
            response.reason = "the frontend is about to stop" if self._is_draining() else reason
        if client is not None and client.facts is not None:
            response.max_model_len = client.facts.max_model_len
        known = {process.boot_id for process in report.processes} if report is not None else set()
        if client is None or client.boot_id not in known:
            response.processes.append(self._own_status(client))
        if report is not None:
            _add_report(response, report)
            if client is not None and client.facts is not None:
                response.scheduler.scheduling_policy = client.facts.scheduling_policy
                response.scheduler.prefix_caching = client.facts.prefix_caching
                response.scheduler.max_num_seqs = client.facts.max_num_seqs
        return response

    async def reset_prefix_cache(
        self, request: admin_pb2.ResetPrefixCacheRequest | None, context: Context
    ) -> admin_pb2.ResetPrefixCacheResponse:
        """Make the scheduler forget all cached prefixes; UNAVAILABLE if it does not say that it has."""
        error: ServiceError
        if request is None:
            name = admin_pb2.ResetPrefixCacheRequest.DESCRIPTOR.full_name
            error = InvalidArgument(f"the bytes are no {name}", field_path="")
        elif self._client is None:
            error = Unavailable("the model is being loaded")
        else:
            num_dropped = await self._client.reset_prefix_cache()
            if num_dropped is not None:
                return admin_pb2.ResetPrefixCacheResponse(dropped_blocks=num_dropped)
            reason = "" if self._client.epoch else self._client.reason
            wait = f"{self._config.status_timeout_s:g} s"
            error = Unavailable(
                reason or f"the scheduler did not confirm it within {wait}, or is asked too much at once"
            )
        await abort(context, error, read_request_id(context.invocation_metadata()))

    def _own_status(self, client: SchedulerClient | None) -> admin_pb2.ProcessStatus:
        if self._is_draining():
            state = "draining"
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
    scheduler.failed_checks = report.failed_checks
    scheduler.waiting_reason = report.waiting_reason

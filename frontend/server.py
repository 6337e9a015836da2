"""A frontend's life: listen, read the model, serve, drain."""

import asyncio
import logging
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import grpc
import zmq
from grpc_reflection.v1alpha import reflection
from starlette.types import ASGIApp

from octavo.frontend.admin import ADMIN_SERVICE, AdminServicer
from octavo.frontend.calls import Calls
from octavo.frontend.config import FrontendConfig
from octavo.frontend.errors import Unavailable
from octavo.frontend.file_limit import max_grpc_connections
from octavo.frontend.health import GENERATION_SERVICE, Health
from octavo.frontend.http_server import HttpServer
from octavo.frontend.interceptor import HEALTH_SERVICE, KeyInterceptor
from octavo.frontend.lifecycle import Lifecycle
from octavo.frontend.listeners import CannotListen, listen_tcp, listen_unix
from octavo.frontend.metrics import Metrics
from octavo.frontend.metrics_calls import CallCounter
from octavo.frontend.model import ModelFiles, load_model_files
from octavo.frontend.models_service import MODEL_SERVICE, ModelServicer
from octavo.frontend.openai.app import make_app, make_private_app
from octavo.frontend.scheduler_client import SchedulerClient
from octavo.frontend.scrapes import Scrapes
from octavo.frontend.service import GenerationServicer
from octavo.frontend.tokenizer_service import TOKENIZER_SERVICE, TokenizerServicer
from octavo.frontend.tracing import CallTracer
from octavo.frontend.tracing_doors import GrpcTracer
from octavo.wire.codec import FromPeer
from octavo.wire.ids import new_boot_id
from octavo.wire.live import remove_socket
from octavo.wire.requests import DrainService, FrontendDrains

if TYPE_CHECKING:
    from octavo.wire.tracing_export import Tracing

MIN_CLIENT_PING_INTERVAL_MS = 500
"""Clients that ping more often are cut off by gRPC; its own default would cut those that ping every second."""

KEEPALIVE_INTERVAL_MS, KEEPALIVE_TIMEOUT_MS = 30_000, 20_000
"""How often a silent client is asked whether it is there, and how long its answer may take."""

MAX_PENDING_CALLS = 16384
"""Calls that gRPC has read and this process has not yet seen. Beyond it gRPC ends calls with a bare CANCELLED, which a
burst of its default of 1000 would meet."""

STOP_GRACE_S = 1.0
"""How long calls that were told to end may take for it."""

_log = logging.getLogger(__name__)


class Frontend:
    """One frontend: `await start()`, then `await load()`, in the end `await stop()`.

    Health answers from `start` on; requests are taken once `load` is done and the scheduler has welcomed us.

    Args:
        config: its settings.
        tracing: where it tells of its calls in spans; None: nowhere. Its owner closes it.

    Raises (on construction):
        MetricsError: the file of its metrics cannot be used.
    """

    def __init__(self, config: FrontendConfig, tracing: "Tracing | None" = None) -> None:
        self.config = config
        self.metrics = Metrics(config.metrics_file)
        self.port = 0
        self.http_port: int | None = None
        self.health_port: int | None = None
        self._http: list[HttpServer] = []
        self.client: SchedulerClient | None = None
        self.lifecycle = Lifecycle(self.begin_drain)
        self._drained: asyncio.Task[None] | None = None
        self._drain_asked: asyncio.Task[None] | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._executor = ThreadPoolExecutor(config.num_tokenizer_threads, thread_name_prefix="tokenizer")
        self._health = Health(config.served_model_names)
        self._calls = Calls(config, self._executor, self.metrics)
        self._service = GenerationServicer(self._calls)
        self._models = ModelServicer(self._calls, self.lifecycle)
        self._tokenizer = TokenizerServicer(self._calls, self.lifecycle)
        self._admin = AdminServicer(config, self.lifecycle, Scrapes(self._calls))
        has_keys = config.auth.needs_key or config.auth.needs_admin_key
        interceptors: list[grpc.aio.ServerInterceptor] = [CallCounter(self.metrics)]  # type: ignore[type-arg]
        if tracing is not None:
            self._calls.tracer = CallTracer(tracing, config.served_model_names[0])
            interceptors.append(GrpcTracer(self._calls.tracer))
        if has_keys:
            interceptors.append(KeyInterceptor(config.auth))
        self._server = grpc.aio.server(options=_server_options(config), interceptors=interceptors)

    async def start(self) -> None:
        """Listen.

        Raises:
            CannotListen: the port is taken, or the host is not ours.
            TlsError: certificate or key cannot be used.
        """
        self._service.add_to(self._server)
        self._models.add_to(self._server)
        self._tokenizer.add_to(self._server)
        self._admin.add_to(self._server)
        self._health.add_to(self._server)
        own = (GENERATION_SERVICE, MODEL_SERVICE, TOKENIZER_SERVICE, ADMIN_SERVICE)
        reflection.enable_server_reflection((*own, HEALTH_SERVICE, reflection.SERVICE_NAME), self._server)
        self._health.set(False)
        self._bind()
        if self.config.http_port is not None:
            listener = listen_tcp(self.config.host, self.config.http_port, self.config.reuse_port)
            self.http_port = listener.getsockname()[1]
            self._serve_http(make_app(self._calls, self._tokenizer), listener)
        await self._server.start()
        # Last: whoever asks there learns that the others are there.
        if self.config.private_socket:
            self._serve_http(make_private_app(self._calls), listen_unix(self.config.private_socket), has_tls=False)
        if self.config.health_port is not None:
            listener = listen_tcp(self.config.host, self.config.health_port)
            self.health_port = listener.getsockname()[1]
            self._serve_http(make_private_app(self._calls), listener, has_tls=False)

    async def load(self) -> None:
        """Read the model, and begin to look for the scheduler.

        Raises:
            ModelFilesError: a file of the model is missing or broken.
            WireError: the scheduler's address is malformed.
        """
        loop = asyncio.get_running_loop()
        config = self.config
        model = await loop.run_in_executor(
            self._executor,
            load_model_files,
            config.model_path,
            config.tool_call_parser,
            config.reasoning_parser,
            config.generation_config,
            config.override_generation_config,
        )
        client = SchedulerClient(self._context, self.config, model.digest, new_boot_id(), self._on_change)
        self.client = client
        self._calls.attach(model, client)
        self._models.attach(model, client)
        self._tokenizer.attach(model)
        self._admin.attach(client)
        client.on_drain = self._on_drain
        client.greetings = self._greetings
        client.check_facts = lambda facts: check_vocabulary(model, facts.vocab_size)
        client.start()

    async def begin_drain(self) -> None:
        """Take no new requests from now on, and say so; only a new process takes some again."""
        if not self.lifecycle.draining:
            self.lifecycle.draining = True
            self._calls.refuse_new()
            self._tell_drain()
            self._drained = asyncio.create_task(self._note_drained())
        await self._health.drain()

    async def drain(self) -> None:
        """Take no new requests and let the running ones end, for `grace_s`; then they end UNAVAILABLE."""
        await self.begin_drain()
        try:
            await asyncio.wait_for(self.wait_idle(), self.config.grace_s)
            self._set_drained()
        except TimeoutError:
            _log.warning("requests were still running after %g s of grace", self.config.grace_s)

    async def wait_idle(self) -> None:
        """Wait until no request is running."""
        await self._calls.wait_idle()
        await self._tokenizer.wait_idle()

    async def stop(self) -> None:
        """End what still runs with UNAVAILABLE, say Goodbye to the scheduler, close everything."""
        if self.lifecycle.stopped:
            return
        self.lifecycle.set_stopped()
        for task in (self._drained, self._drain_asked):
            if task is not None:
                task.cancel()
        self._calls.refuse_new()
        if self.client is not None:
            for stream in self.client.streams:
                stream.fail(Unavailable("the frontend has stopped"))
        await asyncio.gather(self._server.stop(STOP_GRACE_S), *(server.stop() for server in self._http))
        await self._calls.close()
        if self.config.private_socket:
            remove_socket(self.config.private_socket)
        if self.client is not None:
            self.client.leave("the frontend stops")
        self._executor.shutdown(wait=False, cancel_futures=True)
        # Waits for the Goodbye to be written, for the linger time at most.
        await asyncio.get_running_loop().run_in_executor(None, self._context.term)

    async def _note_drained(self) -> None:
        await self.wait_idle()
        self._set_drained()

    def _set_drained(self) -> None:
        if not self.lifecycle.drained:
            self.lifecycle.set_drained()
            self._tell_drain()

    def _on_drain(self) -> None:
        """The whole service drains: this frontend was asked, or another one."""
        if not self.lifecycle.service_drains:
            self.lifecycle.service_drains = True
            self._drain_asked = asyncio.create_task(self.begin_drain())

    def _greetings(self) -> list[FromPeer]:
        """Return what the scheduler must know of us; a new one has not heard of a drain."""
        lifecycle = self.lifecycle
        drains: list[FromPeer] = [FrontendDrains(lifecycle.drained)] if lifecycle.draining else []
        return [*drains, DrainService()] if lifecycle.service_drains else drains

    def _tell_drain(self) -> None:
        if self.client is not None:
            self.client.tell(FrontendDrains(self.lifecycle.drained))

    def _serve_http(self, app: ASGIApp, listener: socket.socket, has_tls: bool = True) -> None:
        server = HttpServer(self.config, app, STOP_GRACE_S, has_tls)
        self._http.append(server)
        server.start(listener)

    def _bind(self) -> None:
        config = self.config
        credentials = config.tls.credentials() if config.tls is not None else None
        address = f"{config.host}:{config.grpc_port}"
        try:
            if credentials is None:
                self.port = self._server.add_insecure_port(address)
            else:
                self.port = self._server.add_secure_port(address, credentials)
            if config.local_socket:
                address = f"unix:{config.local_socket}"
                self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise CannotListen(f"cannot listen on {address}: is the port taken, or the host another's?") from error
        if not self.port:
            raise CannotListen(f"cannot listen on {address}: is the port taken, or the host another's?")

    def _on_change(self) -> None:
        if self.client is not None and not self.lifecycle.draining:
            self._health.set(self.client.serving)


def check_vocabulary(model: ModelFiles, vocab_size: int) -> str | None:
    """Return why a model cannot be served whose tokenizer knows ids that its embedding lacks; None if it can."""
    if model.tokenizer.num_ids > vocab_size:
        return f"the tokenizer has ids up to {model.tokenizer.num_ids - 1}, the embedding only {vocab_size} rows"
    outside = [token_id for token_id in model.eos_ids if token_id >= vocab_size]
    if outside:
        return f"eos_token_id {outside[0]} lies outside the embedding's {vocab_size} rows"
    return None


def _server_options(config: FrontendConfig) -> list[tuple[str, int]]:
    return [
        ("grpc.max_allowed_incoming_connections", max_grpc_connections()),
        ("grpc.max_receive_message_length", config.max_message_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
        ("grpc.so_reuseport", int(config.reuse_port)),
        ("grpc.http2.min_ping_interval_without_data_ms", MIN_CLIENT_PING_INTERVAL_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.keepalive_time_ms", KEEPALIVE_INTERVAL_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ]

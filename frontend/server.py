"""A frontend's life: listen, read the model, serve, drain."""

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

import grpc
import zmq
from grpc_reflection.v1alpha import reflection

from octavo.frontend.admin import AdminServicer
from octavo.frontend.config import FrontendConfig
from octavo.frontend.errors import Unavailable
from octavo.frontend.health import GENERATION_SERVICE, Health
from octavo.frontend.model import ModelFiles, load_model_files
from octavo.frontend.scheduler_client import SchedulerClient
from octavo.frontend.service import GenerationServicer
from octavo.v1 import admin_pb2_grpc, generation_pb2_grpc
from octavo.wire.ids import new_boot_id

ADMIN_SERVICE = "octavo.v1.AdminService"
HEALTH_SERVICE = "grpc.health.v1.Health"

MIN_CLIENT_PING_INTERVAL_MS = 500
"""Clients that ping more often are cut off by gRPC; its own default would cut those that ping every second."""

KEEPALIVE_INTERVAL_MS, KEEPALIVE_TIMEOUT_MS = 30_000, 20_000
"""How often a silent client is asked whether it is there, and how long its answer may take."""

STOP_GRACE_S = 1.0
"""How long calls that were told to end may take for it."""

_log = logging.getLogger(__name__)


class CannotListen(Exception):
    """The address to listen on is taken or not ours."""


class Frontend:
    """One frontend: `await start()`, then `await load()`, in the end `await stop()`.

    Health answers from `start` on; requests are taken once `load` is done and the scheduler has welcomed us.

    Args:
        config: its settings.
    """

    def __init__(self, config: FrontendConfig) -> None:
        self.config = config
        self.port = 0
        self.client: SchedulerClient | None = None
        self._draining = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._executor = ThreadPoolExecutor(config.num_tokenizer_threads, thread_name_prefix="tokenizer")
        self._health = Health(config.served_model_names)
        self._service = GenerationServicer(config, self._executor)
        self._admin = AdminServicer(config, lambda: self._draining)
        self._server = grpc.aio.server(options=_server_options(config))

    async def start(self) -> None:
        """Listen.

        Raises:
            CannotListen: the port is taken, or the host is not ours.
        """
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(self._service, self._server)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(self._admin, self._server)
        self._server.add_registered_method_handlers
        _add_health(self._health, self._server)
        names = (GENERATION_SERVICE, ADMIN_SERVICE, HEALTH_SERVICE, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        self._health.set(False)
        address = f"{self.config.host}:{self.config.grpc_port}"
        try:
            self.port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise CannotListen(f"cannot listen on {address}: is the port taken, or the host another's?") from error
        if not self.port:
            raise CannotListen(f"cannot listen on {address}: is the port taken, or the host another's?")
        await self._server.start()

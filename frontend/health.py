"""Health by the standard protocol: of the whole service, and of each model by its name."""

import asyncio

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

GENERATION_SERVICE = "octavo.v1.GenerationService"


class Health:
    """Tells clients whether requests can be served; NOT_SERVING until told otherwise.

    Args:
        served_model_names: names that have a status of their own.
    """

    def __init__(self, served_model_names: tuple[str, ...]) -> None:
        self._servicer = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._names = ("", GENERATION_SERVICE, *served_model_names)
        self._serving: bool | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def add_to(self, server: grpc.aio.Server) -> None:
        """Offer the service."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    def set(self, serving: bool) -> None:
        """Set the status of the service and of its models."""
        if serving is not self._serving:
            self._serving = serving
            task = asyncio.get_running_loop().create_task(self._set(serving))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def drain(self) -> None:
        """Say NOT_SERVING from now on, whatever `set` is told."""
        await self._servicer.enter_graceful_shutdown()

    async def _set(self, serving: bool) -> None:
        response = health_pb2.HealthCheckResponse
        for name in self._names:
            await self._servicer.set(name, response.SERVING if serving else response.NOT_SERVING)

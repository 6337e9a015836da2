"""A frontend with an HTTP door in the test's own event loop, and clients of it: openai-python and plain HTTP."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
from openai import AsyncOpenAI

from tests.support.frontend_client import WAIT_S, Service, running_frontend


@dataclass(frozen=True)
class Doors:
    """A running frontend with a client at each door."""

    grpc: Service
    openai: AsyncOpenAI
    http: httpx2.AsyncClient

    @property
    def port(self) -> int:
        port = self.grpc.frontend.http_port
        assert port is not None
        return port

    async def error(self, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
        """Return status and error of a call that must fail."""
        response = await self.http.post(path, json=body)
        assert response.status_code >= 400, response.text
        assert response.headers["content-type"] == "application/json"
        error: dict[str, Any] = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return response.status_code, error

    async def until_idle(self) -> None:
        """Wait until no call is running, and see that nothing is held."""
        await self.grpc.until_idle()


@asynccontextmanager
async def running_doors(model: Path, address: str, key: str = "none", **settings: Any) -> AsyncIterator[Doors]:
    """Run a frontend with both doors, and connect to them."""
    async with running_frontend(model, address, http_port=0, **settings) as service:
        base = f"http://127.0.0.1:{service.frontend.http_port}"
        async with (
            AsyncOpenAI(base_url=f"{base}/v1", api_key=key, max_retries=0, timeout=WAIT_S) as client,
            httpx2.AsyncClient(base_url=base, timeout=WAIT_S) as http,
        ):
            yield Doors(service, client, http)


@dataclass
class Events:
    """What a stream of server-sent events brought."""

    chunks: list[dict[str, Any]] = field(default_factory=list)
    error: dict[str, Any] | None = None
    done: bool = False

    def add(self, line: str) -> None:
        """Take one line."""
        if not line:
            return
        assert line.startswith("data: ")
        assert not self.done
        assert self.error is None
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            self.done = True
        elif "error" in (chunk := json.loads(data)):
            self.error = chunk["error"]
        else:
            self.chunks.append(chunk)


async def read_events(http: httpx2.AsyncClient, path: str, **body: Any) -> Events:
    """Return the events of a stream that begins well."""
    events = Events()
    async with asyncio.timeout(WAIT_S), http.stream("POST", path, json={"stream": True, **body}) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        async for line in response.aiter_lines():
            events.add(line)
    return events


def raw_request(path: str, **body: Any) -> bytes:
    """Return a request as it goes over the wire."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    return head.encode() + data

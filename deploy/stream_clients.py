"""Clients of a service in containers: a streamed completion at each door."""

import http.client
import json
import threading
import time
from dataclasses import dataclass, field

import grpc

from octavo.v1 import generation_pb2 as pb
from octavo.v1 import generation_pb2_grpc as rpc

PROMPT = "Once upon a time"
NUM_TOKENS = 40
ENOUGH_PIECES = 6
"""So many pieces, and a stream is well under way."""
STREAM_TIMEOUT_S = 300.0


@dataclass
class Stream:
    """A streamed completion, read by a thread of its own.

    Attributes:
        text: what has come.
        times: when each piece came, on the monotonic clock.
        end: finish reason or error, '' while it runs.
    """

    text: str = ""
    times: list[float] = field(default_factory=list)
    end: str = ""
    enough: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)

    def add(self, text: str) -> None:
        """Take a piece."""
        self.text += text
        self.times.append(time.monotonic())
        if len(self.times) >= ENOUGH_PIECES:
            self.enough.set()

    def close(self, end: str) -> None:
        """Take the end."""
        self.end = end
        self.enough.set()
        self.ended.set()

    @property
    def longest_pause_s(self) -> float:
        """Between two pieces."""
        return max((b - a for a, b in zip(self.times, self.times[1:], strict=False)), default=0.0)


class Clients:
    """Calls the service at both doors."""

    def __init__(self, grpc_port: int, http_port: int, key: str) -> None:
        self._http_port = http_port
        self._key = key
        self._channel = grpc.insecure_channel(f"127.0.0.1:{grpc_port}")

    def start(self, num_tokens: int = NUM_TOKENS) -> dict[str, Stream]:
        """Begin a stream at each door."""
        streams = {"grpc": Stream(), "http": Stream()}
        for read, stream in zip((self._read_grpc, self._read_http), streams.values(), strict=True):
            threading.Thread(target=read, args=(stream, num_tokens), daemon=True).start()
        return streams

    def _read_grpc(self, stream: Stream, num_tokens: int) -> None:
        request = pb.GenerateStreamRequest(
            input=pb.GenerationInput(
                text=PROMPT,
                sampling=pb.SamplingParams(temperature=0),
                stopping=pb.StoppingParams(max_tokens=num_tokens, ignore_eos=True),
            )
        )
        metadata = (("authorization", f"Bearer {self._key}"),) if self._key else ()
        end = "closed"
        try:
            for event in rpc.GenerationServiceStub(self._channel).GenerateStream(
                request, metadata=metadata, timeout=STREAM_TIMEOUT_S, wait_for_ready=True
            ):
                if event.HasField("delta"):
                    stream.add(event.delta.text)
                elif event.HasField("finished"):
                    end = "length"
        except grpc.RpcError as error:
            end = error.code().name
        stream.close(end)

    def _read_http(self, stream: Stream, num_tokens: int) -> None:
        body = {
            "model": "",
            "prompt": PROMPT,
            "temperature": 0,
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "stream": True,
        }
        headers = {"content-type": "application/json"}
        if self._key:
            headers["authorization"] = f"Bearer {self._key}"
        end = "closed"
        connection = http.client.HTTPConnection("127.0.0.1", self._http_port, timeout=STREAM_TIMEOUT_S)
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            response = connection.getresponse()
            if response.status != 200:
                raise ConnectionError(f"HTTP {response.status}")
            for line in response:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    end = str(event["error"]["code"])
                    break
                (choice,) = event["choices"]
                if choice["text"]:
                    stream.add(choice["text"])
                end = choice["finish_reason"] or end
        except (OSError, http.client.HTTPException) as error:
            end = f"broken: {error!r}"
        connection.close()
        stream.close(end)

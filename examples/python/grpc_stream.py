"""Stream a chat over gRPC, with grpc.aio and the stubs that are installed with Octavo.

python examples/python/grpc_stream.py [--address 127.0.0.1:50051] "What is the capital of France?"

OCTAVO_ADDRESS gives the address as well, OCTAVO_API_KEY the key where the service asks for one.
"""

import argparse
import asyncio
import os
import sys

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from octavo.v1 import generation_pb2 as pb
from octavo.v1 import generation_pb2_grpc as rpc


async def stream(address: str, question: str, max_tokens: int) -> None:
    request = pb.GenerateStreamRequest(
        input=pb.GenerationInput(
            chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content=question)]),
            sampling=pb.SamplingParams(temperature=0.7, seed=7),
            stopping=pb.StoppingParams(max_tokens=max_tokens),
        )
    )
    metadata = [("x-request-id", "an-example")]
    if key := os.environ.get("OCTAVO_API_KEY"):
        metadata.append(("authorization", f"Bearer {key}"))
    async with grpc.aio.insecure_channel(address) as channel:
        stub = rpc.GenerationServiceStub(channel)
        # The deadline travels with the call: when it is over, the service stops working on the request.
        async for event in stub.GenerateStream(request, timeout=120, metadata=metadata):
            match event.WhichOneof("event"):
                case "started":
                    print(f"[{event.started.request_id}: {event.started.prompt_tokens} tokens]", file=sys.stderr)
                case "delta":
                    print(event.delta.text, end="", flush=True)
                case "finished":
                    usage = event.finished.usage
                    reason = pb.FinishReason.Name(event.finished.finish_reason)
                    print(f"\n[{reason}: {usage.completion_tokens} tokens]", file=sys.stderr)


def explain(error: grpc.aio.AioRpcError) -> str:
    """Return what a status says, with the wait that it asks for or the field that it refuses."""
    lines = [f"{error.code().name}: {error.details()}"]
    status = rpc_status.from_call(error)
    for detail in status.details if status else ():
        retry, bad = error_details_pb2.RetryInfo(), error_details_pb2.BadRequest()
        if detail.Unpack(retry):
            lines.append(f"try again in {retry.retry_delay.ToTimedelta()}")
        elif detail.Unpack(bad):
            lines += [f"{violation.field}: {violation.description}" for violation in bad.field_violations]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question")
    parser.add_argument("--address", default=os.environ.get("OCTAVO_ADDRESS", "127.0.0.1:50051"))
    parser.add_argument("--max-tokens", type=int, default=128)
    arguments = parser.parse_args()
    try:
        asyncio.run(stream(arguments.address, arguments.question, arguments.max_tokens))
    except grpc.aio.AioRpcError as error:
        sys.exit(explain(error))


if __name__ == "__main__":
    main()

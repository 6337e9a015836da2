"""Random and spoilt bytes into every method of the gRPC door: an answer, or a typed error that names no place or class."""

from typing import Any

import grpc
import pytest
from google.protobuf import json_format
from google.rpc import error_details_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.v1 import admin_pb2, generation_pb2, model_pb2, tokenizer_pb2
from tests.support.answering import WAIT_S, Running
from tests.support.fuzzing import refuse_leaks, spoilt

Code = grpc.StatusCode
FINE = {Code.OK, Code.INVALID_ARGUMENT, Code.NOT_FOUND}

CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "", "name": "a"}],
    "tools": [{"name": "f", "parametersJsonSchema": "{}"}],
    "toolChoice": {"mode": "TOOL_CHOICE_MODE_AUTO"},
    "templateKwargsJson": '{"enable_thinking": true}',
}
INPUTS: list[dict[str, Any]] = [
    {"text": "hello"},
    {"tokenIds": {"ids": [1, 2, 299]}, "output": {"tokenIds": True, "logprobs": 2}},
    {"chat": {"messages": CHAT["messages"]}, "model": "alias", "cacheSalt": "pepper"},
    {"chat": CHAT},
    {
        "text": "x",
        "sampling": {
            "n": 3,
            "temperature": 0.5,
            "topP": 0.9,
            "topK": -1,
            "minP": 0.1,
            "presencePenalty": 1.0,
            "frequencyPenalty": -1.0,
            "repetitionPenalty": 1.1,
            "seed": "18446744073709551615",
            "logitBias": {"5": 1.5, "6": -100},
            "allowedTokenIds": [1, 2, 3],
            "badWords": ["a", "b c"],
        },
        "stopping": {
            "maxTokens": 5,
            "minTokens": 1,
            "stopStrings": ["z", "yy"],
            "stopTokenIds": [4],
            "includeStopString": True,
            "ignoreEos": True,
            "timeLimit": "1.5s",
        },
        "output": {"skipSpecialTokens": False, "detokenize": True},
    },
    {"text": "x", "constraint": {"regex": "a+"}, "priority": 3},
    {"text": "x", "sampling": {"beamSearch": {"width": 2, "lengthPenalty": 1.0}}},
    {"text": "x", "output": {"promptLogprobs": 1, "echo": True}},
]


def _inputs(kind: Any) -> list[bytes]:
    return [json_format.ParseDict({"input": fields}, kind()).SerializeToString() for fields in INPUTS]


def _seeds(kind: Any, *fields: dict[str, Any]) -> list[bytes]:
    return [json_format.ParseDict(one, kind()).SerializeToString() for one in fields]


METHODS: dict[str, list[bytes]] = {
    "GenerationService/Generate": _inputs(generation_pb2.GenerateRequest),
    "GenerationService/GenerateStream": _inputs(generation_pb2.GenerateStreamRequest),
    "TokenizerService/Tokenize": _seeds(
        tokenizer_pb2.TokenizeRequest, {"text": "hello", "withTokens": True}, {"chat": CHAT}, {"addSpecialTokens": True}
    ),
    "TokenizerService/Detokenize": _seeds(
        tokenizer_pb2.DetokenizeRequest, {"ids": [1, 2, 299]}, {"skipSpecialTokens": True}
    ),
    "TokenizerService/RenderChat": _seeds(
        tokenizer_pb2.RenderChatRequest, {"chat": INPUTS[2]["chat"]}, {"chat": CHAT}, {"model": "tiny"}
    ),
    "ModelService/ListModels": _seeds(model_pb2.ListModelsRequest, {"pageSize": 1}, {"pageSize": 1, "pageToken": "x"}),
    "ModelService/GetModel": _seeds(model_pb2.GetModelRequest, {"model": "tiny"}),
    "AdminService/WatchStatus": _seeds(admin_pb2.WatchStatusRequest, {"interval": "1s"}),
}


STREAMS = ("GenerationService/GenerateStream", "AdminService/WatchStatus")


async def call(running: Running, method: str, data: bytes) -> grpc.StatusCode:
    """Make a call and see that it ends well, or badly in good order; return its status."""
    channel, path = running.doors.grpc.channel, f"/octavo.v1.{method}"
    try:
        if method not in STREAMS:
            await channel.unary_unary(path, None, None)(data, timeout=WAIT_S)
            return Code.OK
        asking = channel.unary_stream(path, None, None)(data, timeout=WAIT_S)
        async for _ in asking:
            if method == "AdminService/WatchStatus":
                asking.cancel()
                break
    except grpc.aio.AioRpcError as error:
        assert error.code() in FINE, (error.code(), error.details())  # noqa: PT017 (what else it is, is the point)
        refuse_leaks(error.details() or "")
        status = rpc_status.from_call(error)  # type: ignore[arg-type]
        assert status is not None
        info = error_details_pb2.ErrorInfo()
        assert any(detail.Unpack(info) for detail in status.details)
        assert info.domain == "octavo"
        return error.code()
    return Code.OK


@pytest.mark.parametrize("method", METHODS)
@settings(settings.get_profile("fuzz"))
@given(data=st.data())
def test_spoilt_messages(running: Running, method: str, data: st.DataObject) -> None:
    running.do(call(running, method, data.draw(spoilt(METHODS[method]))))


@pytest.mark.parametrize("method", METHODS)
@settings(settings.get_profile("fuzz"))
@given(data=st.binary(max_size=300))
def test_random_bytes(running: Running, method: str, data: bytes) -> None:
    running.do(call(running, method, data))


@pytest.mark.parametrize("method", METHODS)
def test_whole_messages(running: Running, method: str) -> None:
    """What is spoilt above means something to begin with."""
    assert running.do(call(running, method, METHODS[method][0])) is Code.OK
    for data in METHODS[method]:
        running.do(call(running, method, data))


@pytest.mark.parametrize("method", METHODS)
def test_large_messages(running: Running, method: str) -> None:
    for data in METHODS[method][:3]:
        for large in (data * (300_000 // max(1, len(data))), data + b"\xff" * 100_000, b"\x0a\x00" * 200_000):
            running.do(call(running, method, large))

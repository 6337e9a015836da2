"""ModelService: what is served, under which names, page by page."""

import base64
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2  # type: ignore[import-untyped]
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from octavo.frontend.errors import InvalidArgument
from octavo.frontend.models_service import DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE, page_of
from octavo.v1 import admin_pb2, model_pb2_grpc
from octavo.v1 import model_pb2 as pb
from tests.support.frontend_client import WAIT_S, Service, read, refusal, running_frontend
from tests.support.scripted_scheduler import FACTS, ScriptedScheduler
from tests.support.tiny_tokenizers import write_model_folder

Code = grpc.StatusCode
WHOLE = pb.Model(
    id="tiny",
    aliases=["alias"],
    max_model_len=FACTS.max_model_len,
    vocab_size=FACTS.vocab_size,
    has_chat_template=True,
    serving=True,
)


def stub(service: Service) -> Any:
    return model_pb2_grpc.ModelServiceStub(service.channel)


async def list_models(service: Service, **fields: Any) -> pb.ListModelsResponse:
    answer: pb.ListModelsResponse = await stub(service).ListModels(pb.ListModelsRequest(**fields), timeout=WAIT_S)
    return answer


async def get_model(service: Service, name: str = "") -> pb.Model:
    answer: pb.GetModelResponse = await stub(service).GetModel(pb.GetModelRequest(model=name), timeout=WAIT_S)
    return answer.model


@pytest.mark.parametrize("page_size", [0, 1, 1000, 2**31 - 1])
async def test_the_model_is_listed(service: Service, page_size: int) -> None:
    assert await list_models(service, page_size=page_size) == pb.ListModelsResponse(models=[WHOLE])


@pytest.mark.parametrize("name", ["", "tiny", "alias"])
async def test_a_model_is_found_by_each_of_its_names(service: Service, name: str) -> None:
    assert await get_model(service, name) == WHOLE


async def test_an_unknown_model_is_not_found(service: Service) -> None:
    call = stub(service).GetModel(pb.GetModelRequest(model="other"), timeout=WAIT_S)
    found = await refusal(call)
    assert (found.code, found.reason) == (Code.NOT_FOUND, "MODEL_NOT_FOUND")
    resource = found.unpack(error_details_pb2.ResourceInfo)
    assert (resource.resource_type, resource.resource_name) == ("model", "other")
    assert "tiny, alias" in found.message


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"page_size": -1}, "page_size"),
        ({"page_token": "x"}, "page_token"),
        ({"page_token": "é"}, "page_token"),
        ({"page_token": "x" * 10_000}, "page_token"),
        ({"page_token": base64.urlsafe_b64encode(b"before:tiny").decode()}, "page_token"),
        ({"page_token": base64.urlsafe_b64encode(b"after:\xff").decode()}, "page_token"),
    ],
)
async def test_bad_pages_are_refused(service: Service, fields: dict[str, Any], path: str) -> None:
    found = await refusal(stub(service).ListModels(pb.ListModelsRequest(**fields), timeout=WAIT_S))
    assert (found.code, found.reason, found.field) == (Code.INVALID_ARGUMENT, "INVALID_ARGUMENT", path)


def test_pages_join_to_the_whole_list() -> None:
    names = [f"model-{i:04}" for i in range(MAX_PAGE_SIZE + 7)]
    models = [pb.Model(id=name) for name in reversed(names)]
    for size, longest in ((1, 1), (0, DEFAULT_PAGE_SIZE), (2 * MAX_PAGE_SIZE, MAX_PAGE_SIZE), (7, 7)):
        found: list[str] = []
        token = ""
        while True:
            page, token = page_of(models, size, token)
            assert 0 < len(page) <= longest
            found += [model.id for model in page]
            if not token:
                break
        assert found == names


def test_a_page_shifts_nothing_when_models_come_and_go() -> None:
    models = [pb.Model(id=name) for name in "abcd"]
    _, token = page_of(models, 2, "")
    page, _ = page_of([pb.Model(id=name) for name in ("_", "a", "c", "d")], 2, token)
    assert [model.id for model in page] == ["c", "d"]
    with pytest.raises(InvalidArgument):
        page_of(models, 2, token + "=")


async def test_before_a_worker_is_ready_its_figures_are_unset(tiny_model: Path, address: str) -> None:
    async with running_frontend(tiny_model, address) as service:
        model = await get_model(service)
        assert (model.id, model.has_chat_template, model.serving) == ("tiny", True, False)
        assert model.reason == "the scheduler cannot be reached yet"
        assert not model.HasField("max_model_len")
        assert not model.HasField("vocab_size")


async def test_a_model_without_a_chat_template(tmp_path: Path, scheduler: ScriptedScheduler, address: str) -> None:
    folder = write_model_folder(tmp_path, chat_template=None)
    async with running_frontend(folder, address) as service:
        model = await get_model(service)
        assert model.HasField("has_chat_template")
        assert not model.has_chat_template


async def test_a_draining_service_lists_its_model_as_not_serving(service: Service) -> None:
    await service.admin.Drain(admin_pb2.DrainRequest(), timeout=WAIT_S)
    (model,) = (await list_models(service)).models
    assert (model.serving, model.reason) == (False, "draining: no new requests are taken")


@pytest.mark.parametrize("method", ["ListModels", "GetModel"])
async def test_request_ids_are_echoed(service: Service, method: str) -> None:
    kind = getattr(pb, f"{method}Request")
    call = getattr(stub(service), method)(kind(), timeout=WAIT_S, metadata=(("x-request-id", "r-9"),))
    await call
    assert dict(await call.initial_metadata())["x-request-id"] == "r-9"


@pytest.mark.parametrize("method", ["ListModels", "GetModel"])
@pytest.mark.parametrize(("data", "words"), [(b"\xff" * 9, "the bytes are no octavo.v1."), (b"\xc8\x3e\x01", "1001")])
async def test_what_is_no_request_is_refused(service: Service, method: str, data: bytes, words: str) -> None:
    call = service.channel.unary_unary(f"/octavo.v1.ModelService/{method}", None, None)(data, timeout=WAIT_S)
    found = await refusal(call)
    assert (found.code, found.reason) == (Code.INVALID_ARGUMENT, "INVALID_ARGUMENT")
    assert words in found.message


async def test_reflection_lists_and_describes_every_service(service: Service) -> None:
    reflection = reflection_pb2_grpc.ServerReflectionStub(service.channel)

    async def ask(**fields: str) -> Any:
        request = reflection_pb2.ServerReflectionRequest(**fields)
        return await read(reflection.ServerReflectionInfo(iter([request]), timeout=WAIT_S))

    names = {entry.name for entry in (await ask(list_services="")).list_services_response.service}
    own = {f"octavo.v1.{name}Service" for name in ("Generation", "Model", "Tokenizer", "Admin")}
    assert names == own | {"grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
    for name in own:
        answer = await ask(file_containing_symbol=name)
        assert answer.file_descriptor_response.file_descriptor_proto, name

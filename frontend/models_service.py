"""ModelService: what is served, under which names."""

import base64
import binascii
from collections.abc import Sequence

import grpc

from octavo.frontend.calls import Calls
from octavo.frontend.errors import LOADING, InvalidArgument
from octavo.frontend.lifecycle import Lifecycle
from octavo.frontend.model import ModelFiles
from octavo.frontend.rpc import Context, Incoming, answer, known, parse
from octavo.frontend.scheduler_client import SchedulerClient
from octavo.v1 import model_pb2 as pb

MODEL_SERVICE = "octavo.v1.ModelService"

DEFAULT_PAGE_SIZE = 50
MAX_PAGE_SIZE = 1000

_TOKEN_PREFIX = b"after:"


class ModelServicer:
    """Answers with what is known of the one model of this frontend.

    Args:
        calls: the served names.
        lifecycle: whether new requests are taken.
    """

    def __init__(self, calls: Calls, lifecycle: Lifecycle) -> None:
        self._calls = calls
        self._lifecycle = lifecycle
        self._model: ModelFiles | None = None
        self._client: SchedulerClient | None = None

    def add_to(self, server: grpc.aio.Server) -> None:
        """Offer the service."""
        handlers = {
            "ListModels": grpc.unary_unary_rpc_method_handler(
                self.list_models, parse(pb.ListModelsRequest), pb.ListModelsResponse.SerializeToString
            ),
            "GetModel": grpc.unary_unary_rpc_method_handler(
                self.get_model, parse(pb.GetModelRequest), pb.GetModelResponse.SerializeToString
            ),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(MODEL_SERVICE, handlers),))

    def attach(self, model: ModelFiles, client: SchedulerClient) -> None:
        """Know the model: its files have been read."""
        self._model, self._client = model, client

    async def list_models(self, request: Incoming[pb.ListModelsRequest], context: Context) -> pb.ListModelsResponse:
        """Return a page of the models."""

        async def work() -> pb.ListModelsResponse:
            checked = known(request, pb.ListModelsRequest)
            models, next_token = page_of([self._describe()], checked.page_size, checked.page_token)
            return pb.ListModelsResponse(models=models, next_page_token=next_token)

        return await answer(context, work)

    async def get_model(self, request: Incoming[pb.GetModelRequest], context: Context) -> pb.GetModelResponse:
        """Return the model of a name."""

        async def work() -> pb.GetModelResponse:
            self._calls.check_model(known(request, pb.GetModelRequest).model)
            return pb.GetModelResponse(model=self._describe())

        return await answer(context, work)

    def _describe(self) -> pb.Model:
        name, *aliases = self._calls.config.served_model_names
        model, client = self._model, self._client
        facts = client.facts if client is not None else None
        if self._lifecycle.draining:
            reason = "draining: no new requests are taken"
        else:
            reason = LOADING if client is None else client.reason
        return pb.Model(
            id=name,
            aliases=aliases,
            max_model_len=facts.max_model_len if facts is not None else None,
            vocab_size=facts.vocab_size if facts is not None else None,
            has_chat_template=model.chat_template is not None if model is not None else None,
            serving=client is not None and client.serving and not self._lifecycle.draining,
            reason=reason,
        )


def page_of(models: Sequence[pb.Model], page_size: int, page_token: str) -> tuple[list[pb.Model], str]:
    """Return a page of models, by id, and the token of the next one ('' after the last).

    A token names the last id of its page, so that models which come and go between two calls shift nothing.

    Raises:
        InvalidArgument: the size is negative, or the token is none of ours.
    """
    if page_size < 0:
        raise InvalidArgument(f"{page_size} must be at least 0", field_path="page_size")
    size = min(page_size or DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE)
    after = _read_token(page_token) if page_token else None
    left = sorted((m for m in models if after is None or m.id > after), key=lambda m: m.id)
    page = left[:size]
    return page, _write_token(page[-1].id) if len(left) > size else ""


def _write_token(last_id: str) -> str:
    return base64.urlsafe_b64encode(_TOKEN_PREFIX + last_id.encode()).decode()


def _read_token(token: str) -> str:
    refusal = InvalidArgument("this is no next_page_token of an earlier answer", field_path="page_token")
    try:
        data = base64.b64decode(token, altchars=b"-_", validate=True)
        last_id = data.removeprefix(_TOKEN_PREFIX).decode()
    except (binascii.Error, ValueError):  # not base64, not ASCII, not UTF-8
        raise refusal from None
    if not data.startswith(_TOKEN_PREFIX) or _write_token(last_id) != token:
        raise refusal
    return last_id

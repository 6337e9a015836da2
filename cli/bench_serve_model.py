"""What a running service says of its model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import grpc

from octavo.cli.connection import connected
from octavo.cli.errors import CommandError
from octavo.v1 import model_pb2, model_pb2_grpc

_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class ServedModel:
    """A model by the name that requests carry."""

    name: str
    vocab_size: int


def ask_model(parameters: Mapping[str, Any]) -> ServedModel:
    """Return the model that requests of a command go to.

    Args:
        parameters: of the command: address, key, certificates, and `model`, None for the service's default.

    Raises:
        CommandError: the service does not answer, or is not ready.
    """
    options = ("api_key", "tls_ca", "tls_cert", "tls_key")
    with connected(parameters["address"], **{name: parameters[name] for name in options}) as connection:
        stub = model_pb2_grpc.ModelServiceStub(connection.channel)
        request = model_pb2.GetModelRequest(model=parameters["model"] or "")
        try:
            model = stub.GetModel(request, timeout=_TIMEOUT_S, metadata=connection.metadata).model
        except grpc.RpcError as error:
            raise connection.failure(error) from error
    if not model.serving or not model.HasField("vocab_size"):
        raise CommandError(f"the service at {parameters['address']} is not ready: {model.reason or 'it loads'}")
    return ServedModel(model.id, model.vocab_size)

"""What can go wrong with a call, named by what the caller can do about it, and the one table to gRPC statuses.

    ServiceError
      InvalidArgument             change the named field
        ContextLengthExceeded     shorten the prompt or ask for fewer tokens
      ModelNotFound               ask for a served model
      Unauthenticated             send a key of this service
      QueueFull                   come back later: the scheduler's queue is full
      CallerLimitExceeded         come back when less of yours is running or waiting
      TooManyStreams              come back later: this frontend holds its most requests
      TooManyBytes                come back later: requests being read here are as large together as they may be
      SlowReader                  read faster
      Unavailable                 come back later: loading, no worker, recovery took too long
        Draining                  go to another frontend
      DeadlineExceeded            allow more time
      InternalError               report it with the request id

Each status carries google.rpc details: always ErrorInfo{reason, domain, metadata}, and what the table adds.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

ERROR_DOMAIN = "octavo"

DETAILS_METADATA_KEY = "grpc-status-details-bin"
"""Trailing metadata in which gRPC carries a google.rpc.Status; grpc_status reads it at the client."""

MAX_ERROR_BYTES = 1000
"""Of a status message: it travels percent-encoded and twice more in the details, within 8 KiB of metadata."""

DEFAULT_RETRY_S = 1.0

LOADING = "this frontend reads the model's tokenizer, and has no session with the scheduler yet"
"""Why it serves nothing at its start; the worker may long be ready."""

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class ServiceError(Exception):
    """Base of every error that a caller sees. The message is for people and holds no secrets, paths or prompts."""

    message: str
    metadata: dict[str, str] = field(default_factory=dict, kw_only=True)

    def __str__(self) -> str:
        return self.message


@dataclass(eq=False)
class InvalidArgument(ServiceError):
    """The named field cannot be what it is, whatever the state of the service.

    Attributes:
        field_path: path of the field from the request message, as `input.sampling.top_p`; empty where it is all of it.
    """

    field_path: str = field(kw_only=True)

    def __str__(self) -> str:
        return f"{self.field_path}: {self.message}" if self.field_path else self.message


@dataclass(eq=False)
class ContextLengthExceeded(InvalidArgument):
    """Prompt, or prompt and max_tokens together, do not fit the model's context."""


@dataclass(eq=False)
class ModelNotFound(ServiceError):
    """No such model is served here."""

    model: str = field(kw_only=True)


class Unauthenticated(ServiceError):
    """The call holds no key of this service, or a wrong one; the message does not repeat it."""


@dataclass(eq=False)
class RetryableError(ServiceError):
    """Base of what may succeed later."""

    retry_after_s: float = field(default=DEFAULT_RETRY_S, kw_only=True)


class QueueFull(RetryableError):
    """The scheduler's waiting queue is full."""


class CallerLimitExceeded(RetryableError):
    """The caller has as many requests, or waiting tokens, as one caller may have; the metadata says which, and both numbers."""


class TooManyStreams(RetryableError):
    """This frontend holds as many requests as it may."""


class TooManyBytes(RetryableError):
    """The requests that this frontend is reading are, together, as large as they may be."""


class SlowReader(RetryableError):
    """The client left more tokens unread than a stream may hold."""


class Unavailable(RetryableError):
    """Nobody can do the work at the moment."""


class Draining(Unavailable):
    """This frontend drains: it takes no new requests any more."""


class DeadlineExceeded(ServiceError):
    """The caller's time is over."""


class InternalError(ServiceError):
    """This request failed inside; others are not affected."""


DetailMaker = Callable[[ServiceError, str], Any]


@dataclass(frozen=True)
class _Rule:
    code: grpc.StatusCode
    reason: str
    details: tuple[DetailMaker, ...] = ()


def _bad_request(error: ServiceError, _request_id: str) -> Any:
    path = error.field_path if isinstance(error, InvalidArgument) else ""
    violation = error_details_pb2.BadRequest.FieldViolation(field=path, description=bounded(error.message))
    return error_details_pb2.BadRequest(field_violations=[violation])


def _resource_info(error: ServiceError, _request_id: str) -> Any:
    name = error.model if isinstance(error, ModelNotFound) else ""
    return error_details_pb2.ResourceInfo(resource_type="model", resource_name=bounded(name, 200))


def _retry_info(error: ServiceError, _request_id: str) -> Any:
    info = error_details_pb2.RetryInfo()
    seconds = error.retry_after_s if isinstance(error, RetryableError) else DEFAULT_RETRY_S
    info.retry_delay.FromMilliseconds(max(1, round(seconds * 1000)))
    return info


def _request_info(_error: ServiceError, request_id: str) -> Any:
    return error_details_pb2.RequestInfo(request_id=request_id)


RULES: dict[type[ServiceError], _Rule] = {
    InvalidArgument: _Rule(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT", (_bad_request,)),
    ContextLengthExceeded: _Rule(grpc.StatusCode.INVALID_ARGUMENT, "CONTEXT_LENGTH_EXCEEDED", (_bad_request,)),
    ModelNotFound: _Rule(grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND", (_resource_info,)),
    Unauthenticated: _Rule(grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED"),
    QueueFull: _Rule(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", (_retry_info,)),
    CallerLimitExceeded: _Rule(grpc.StatusCode.RESOURCE_EXHAUSTED, "CALLER_LIMIT_EXCEEDED", (_retry_info,)),
    TooManyStreams: _Rule(grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_STREAMS", (_retry_info,)),
    TooManyBytes: _Rule(grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_BYTES", (_retry_info,)),
    SlowReader: _Rule(grpc.StatusCode.RESOURCE_EXHAUSTED, "SLOW_READER", (_retry_info,)),
    Unavailable: _Rule(grpc.StatusCode.UNAVAILABLE, "UNAVAILABLE", (_retry_info,)),
    Draining: _Rule(grpc.StatusCode.UNAVAILABLE, "DRAINING", (_retry_info,)),
    DeadlineExceeded: _Rule(grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED"),
    InternalError: _Rule(grpc.StatusCode.INTERNAL, "INTERNAL", (_request_info,)),
}
"""Every error that is raised, by its exact class."""

ABSTRACT_ERRORS: frozenset[type[ServiceError]] = frozenset({ServiceError, RetryableError})
"""Bases that are never raised themselves."""


def to_status(error: ServiceError, request_id: str) -> status_pb2.Status:
    """Return the status of an error, with its google.rpc details."""
    rule = RULES[type(error)]
    info = error_details_pb2.ErrorInfo(reason=rule.reason, domain=ERROR_DOMAIN, metadata=error.metadata)
    details = [_pack(info), *(_pack(make(error, request_id)) for make in rule.details)]
    return status_pb2.Status(code=rule.code.value[0], message=bounded(str(error)), details=details)


async def abort(context: "grpc.aio.ServicerContext[Any, Any]", error: ServiceError, request_id: str) -> NoReturn:
    """End a call with the status of an error.

    Raises:
        grpc.aio.AbortError: it must reach the server.
        asyncio.CancelledError: the call is over already (its deadline has passed, say), there is nobody to tell.
    """
    status = to_status(error, request_id)
    trailing = ((DETAILS_METADATA_KEY, status.SerializeToString()),)
    try:
        await context.abort(RULES[type(error)].code, status.message, trailing)
    except grpc.aio.InternalError as late:
        _log.debug("request %s was over before its status could be sent: %s", request_id, late)
        raise asyncio.CancelledError from late


def internal_error(request_id: str) -> InternalError:
    """Log the exception being handled and return what the caller is told of it: nothing but the request id."""
    _log.exception("request %s failed", request_id)
    return InternalError(f"internal error; the log names it by request id {request_id}")


def _pack(message: Any) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


def bounded(text: str, limit: int = MAX_ERROR_BYTES) -> str:
    """Return a text cut to so many bytes."""
    data = text.encode("utf-8", "replace")
    return text if len(data) <= limit else data[: limit - 3].decode("utf-8", "ignore") + "..."

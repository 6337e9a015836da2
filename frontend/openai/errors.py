"""What goes wrong, as HTTP status and in OpenAI's shape."""

import math
import re
from dataclasses import dataclass, field

import grpc
import msgspec

from octavo.frontend.errors import RULES, InvalidArgument, ModelNotFound, RetryableError, ServiceError, bounded

INVALID_REQUEST = "invalid_request_error"

MAX_PARAM_BYTES = 200
"""Of a field's name: that of an unknown field is the client's own."""


@dataclass(eq=False)
class HttpError(Exception):
    """An answer that is an error.

    Attributes:
        status: of HTTP.
        type, code, param: as OpenAI has them; param is the JSON name of a field.
        message: for people.
        headers: more headers of the answer.
    """

    status: int
    message: str
    type: str = INVALID_REQUEST
    code: str | None = None
    param: str | None = None
    headers: tuple[tuple[bytes, bytes], ...] = field(default=())

    def __str__(self) -> str:
        return self.message

    def body(self) -> bytes:
        """Return the error in OpenAI's shape."""
        param = None if self.param is None else bounded(self.param, MAX_PARAM_BYTES)
        error = {"message": bounded(self.message), "type": self.type, "param": param, "code": self.code}
        return msgspec.json.encode({"error": error})


@dataclass(frozen=True)
class _Rule:
    status: int
    type: str
    code: str | None = None  # None: the reason of the gRPC door in lower case


HTTP_RULES: dict[grpc.StatusCode, _Rule] = {
    grpc.StatusCode.INVALID_ARGUMENT: _Rule(400, INVALID_REQUEST),
    grpc.StatusCode.UNAUTHENTICATED: _Rule(401, INVALID_REQUEST, "invalid_api_key"),
    grpc.StatusCode.PERMISSION_DENIED: _Rule(403, INVALID_REQUEST),
    grpc.StatusCode.NOT_FOUND: _Rule(404, INVALID_REQUEST),
    grpc.StatusCode.RESOURCE_EXHAUSTED: _Rule(429, "rate_limit_error"),
    grpc.StatusCode.INTERNAL: _Rule(500, "server_error"),
    grpc.StatusCode.UNAVAILABLE: _Rule(503, "server_error"),
    grpc.StatusCode.DEADLINE_EXCEEDED: _Rule(504, "server_error"),
}
"""Each status of the gRPC door as one of HTTP: the table of errors there (`RULES`) is the only one."""


def to_http(error: ServiceError, param: str | None = None) -> HttpError:
    """Return an error as HTTP has it.

    Args:
        error: what went wrong.
        param: JSON name of the field that an InvalidArgument names, None if it is none of the body's.
    """
    rule = RULES[type(error)]
    http = HTTP_RULES[rule.code]
    message = error.message
    if isinstance(error, InvalidArgument) and param:
        message = f"{param}: {message}"
    if isinstance(error, ModelNotFound):
        param = "model"
    headers: tuple[tuple[bytes, bytes], ...] = ()
    if isinstance(error, RetryableError):
        headers = ((b"retry-after", b"%d" % max(1, math.ceil(error.retry_after_s))),)
    elif http.status == 401:
        headers = ((b"www-authenticate", b"Bearer"),)
    return HttpError(http.status, message, http.type, http.code or rule.reason.lower(), param, headers)


def bad_field(param: str, message: str) -> HttpError:
    """Return the refusal of a field."""
    return HttpError(400, f"{param}: {message}", param=param, code="invalid_argument")


_AT = re.compile(r"(?P<what>.*?) - at (?:`key` in )?`\$\.?(?P<path>.*)`", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<name>.*)`", re.DOTALL)


def from_msgspec(error: Exception) -> HttpError:
    """Return what is wrong with a body that msgspec, or the encoding of its texts, refuses."""
    if isinstance(error, RecursionError):
        return HttpError(400, "the body is nested too deeply", code="invalid_json")
    if isinstance(error, UnicodeError):
        return HttpError(400, "a text holds half of a surrogate pair", code="invalid_json")
    if not isinstance(error, msgspec.ValidationError):
        return HttpError(400, f"the body is no valid JSON: {error}", code="invalid_json")
    found = _AT.fullmatch(str(error))
    what, path = (found["what"], found["path"]) if found else (str(error), "")
    for pattern, words in ((_UNKNOWN, "is not known"), (_MISSING, "is required")):
        if match := pattern.fullmatch(what):
            return bad_field(f"{path}.{match['name']}" if path else match["name"], words)
    return (
        bad_field(path, _lower(what)) if path else HttpError(400, f"the body: {_lower(what)}", code="invalid_argument")
    )


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]

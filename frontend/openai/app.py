"""The routes of the HTTP door."""

from collections.abc import Callable
from http import HTTPStatus

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from octavo.frontend.calls import Calls
from octavo.frontend.metadata import read_request_id
from octavo.frontend.metrics_layout import OTHER
from octavo.frontend.openai.call import Endpoint, Handler
from octavo.frontend.openai.endpoints import Endpoints
from octavo.frontend.openai.errors import HttpError
from octavo.frontend.openai.generation import Generation
from octavo.frontend.openai.own import Own
from octavo.frontend.tokenizer_service import TokenizerServicer


def make_app(calls: Calls, tokenizer: TokenizerServicer) -> Starlette:
    """Return the HTTP door as an ASGI application.

    Args:
        calls: checks requests and holds their streams.
        tokenizer: tokenises for both doors.
    """
    generation, others, own = Generation(calls), Endpoints(calls, tokenizer), Own(calls)

    def route(method: str, path: str, handler: Handler, needs_key: bool = True) -> Route:
        name = path.replace(":path", "")
        return Route(path, Endpoint(calls, handler, needs_key, name), methods=[method])

    routes = [
        route("GET", "/health", own.health, needs_key=False),
        route("GET", "/ready", own.ready, needs_key=False),
        route("GET", "/metrics", own.metrics),
        route("GET", "/version", others.version),
        route("GET", "/v1/models", others.models),
        route("GET", "/v1/models/{model:path}", others.model),
        route("POST", "/v1/completions", generation.complete),
        route("POST", "/v1/chat/completions", generation.chat),
        route("POST", "/tokenize", others.tokenize),
        route("POST", "/detokenize", others.detokenize),
    ]
    return _app(routes, lambda status: calls.metrics.count_call("http", OTHER, str(status)))


def make_private_app(calls: Calls) -> Starlette:
    """Return what one process answers of itself, to whoever keeps it alive."""
    own = Own(calls)
    return _app(
        [
            Route("/health", Endpoint(calls, own.health, needs_key=False), methods=["GET"]),
            Route("/ready", Endpoint(calls, own.ready, needs_key=False), methods=["GET"]),
            Route("/metrics", Endpoint(calls, own.metrics), methods=["GET"]),
        ],
        lambda status: None,
    )


def _app(routes: list[Route], count: Callable[[int], None]) -> Starlette:
    async def refuse(request: Request, error: Exception) -> Response:
        response = await _refuse(request, error)
        count(response.status_code)
        return response

    app = Starlette(routes=routes, exception_handlers={HTTPException: refuse})
    app.router.redirect_slashes = False
    return app


async def _refuse(request: Request, error: Exception) -> Response:
    """Answer calls of what is not there."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    headers["x-request-id"] = read_request_id(request.headers.items())
    code = HTTPStatus(status).phrase.lower().replace(" ", "_")
    refusal = HttpError(status, f"{request.method} {request.url.path[:200]}: {code.replace('_', ' ')}", code=code)
    return Response(refusal.body(), status, headers, "application/json")

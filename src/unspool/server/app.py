"""The ASGI application: routes, and the door in front of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from unspool.errors import UnspoolError
from unspool.server.bodies import ClientGoneError, JsonResponse
from unspool.server.chat import ChatDialect
from unspool.server.completions import CompletionDialect
from unspool.server.compress_route import CompressRoute
from unspool.server.dialect import Dialect
from unspool.server.generating import make_endpoint
from unspool.server.logs import RequestRecord, choose_id, current
from unspool.server.messages import MessageDialect
from unspool.server.ollama import OllamaDialect, OllamaRoutes
from unspool.server.openapi import describe_routes
from unspool.server.pages import send_asset, show_studio
from unspool.server.plain_routes import NOT_SERVED, PlainRoutes, make_refusal
from unspool.server.refusals import RequestError
from unspool.server.responses import ResponseDialect
from unspool.server.security import check_host, check_origin, is_open
from unspool.server.state import ServerState
from unspool.server.systemone import SystemOneRoute
from unspool.server.tracing import TraceDialect
from unspool.server.transcriptions import AudioRoutes


def make_app(state: ServerState, *, closes: bool = False) -> Starlette:
    """The application of a server; with `closes` its models are closed when it shuts down."""
    plain, ollama, audio = PlainRoutes(state), OllamaRoutes(state), AudioRoutes(state)

    async def page(_: Request) -> Response:
        return JsonResponse(describe_routes())

    routes: list[BaseRoute] = [
        Route("/v1/chat/completions", make_endpoint(state, ChatDialect()), methods=["POST"]),
        Route("/v1/completions", make_endpoint(state, CompletionDialect()), methods=["POST"]),
        Route("/v1/responses", make_endpoint(state, ResponseDialect()), methods=["POST"]),
        Route("/v1/messages", make_endpoint(state, MessageDialect()), methods=["POST"]),
        Route("/v1/trace", make_endpoint(state, TraceDialect(), state.gate.enter_trace), methods=["POST"]),
        Route("/v1/messages/count_tokens", plain.count_tokens, methods=["POST"]),
        Route("/v1/compress", CompressRoute(state).answer, methods=["POST"]),
        Route("/v1/systemone", SystemOneRoute(state).answer, methods=["POST"]),
        Route("/v1/audio/transcriptions", audio.transcribe, methods=["POST"]),
        Route("/v1/audio/translations", audio.translate, methods=["POST"]),
        Route("/api/chat", make_endpoint(state, OllamaDialect(is_chat=True)), methods=["POST"]),
        Route("/api/generate", make_endpoint(state, OllamaDialect(is_chat=False)), methods=["POST"]),
        Route("/api/tags", ollama.tags),
        Route("/api/ps", ollama.running),
        *(Route(path, make_refusal(why), methods=["POST", "DELETE"]) for path, why in NOT_SERVED.items()),
        Route("/api/show", ollama.show, methods=["POST"]),
        Route("/api/version", ollama.version),
        Route("/v1/models", plain.models),
        Route("/v1/parameters", plain.parameters),
        Route("/v1/models/{name:path}", plain.model),
        Route("/tokenize", plain.tokenize, methods=["POST"]),
        Route("/detokenize", plain.detokenize, methods=["POST"]),
        Route("/apply-template", plain.apply_template, methods=["POST"]),
        Route("/health", plain.health),
        Route("/ready", plain.ready),
        Route("/version", plain.version),
        Route("/metrics", plain.metrics),
        Route("/openapi.json", page),
        Route("/", show_studio),
        Route("/studio/{name:path}", send_asset),
    ]

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        state.is_ready = True
        watching = asyncio.create_task(state.models.watch())
        yield
        state.is_ready = False
        watching.cancel()
        if closes:
            state.models.close()

    app = Starlette(
        routes=routes,
        lifespan=lifespan,
        exception_handlers={RequestError: _answer_refusal, HTTPException: _answer_http},
    )
    app.router.redirect_slashes = False  # to an address that the Host header says
    app.add_middleware(Door, state=state)
    app.state.unspool = state
    return app


def _write_refusal(scope: Any, error: RequestError) -> Response:
    """An error in the form of the clients that ask for its path."""
    path = scope["path"].removeprefix(scope.get("root_path", ""))
    dialect = next((one for start, one in _FORMS.items() if path.startswith(start)), _FORMS["/"])
    return JsonResponse(dialect.write_error(error), error.status, error.headers)


async def _answer_refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return _write_refusal(request.scope, error)


async def _answer_http(request: Request, error: Exception) -> Response:
    """Starlette's own errors: no such route, a method that a route does not have."""
    assert isinstance(error, HTTPException)
    path = request.scope["path"][:128]  # `request.url` would be made of the Host header too
    reasons = {404: f"there is no {path!r} here; /openapi.json lists the routes"}
    reasons[405] = f"{request.method} is not a method of {path!r}"
    answer = _write_refusal(
        request.scope, RequestError(error.status_code, reasons.get(error.status_code, error.detail))
    )
    answer.headers.update(error.headers or {})
    return answer


class Door:
    """Checks who asks before any route is reached, gives every request an id, and logs its end."""

    def __init__(self, app: Callable[..., Any], state: ServerState) -> None:
        self._app, self._state = app, state

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Let a request through, or refuse it."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            elif scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            return
        peer = scope.get("client")
        sent = Headers(scope=scope).get("x-request-id")
        record = RequestRecord(choose_id(sent), scope["method"], scope["path"], client=peer[0] if peer else "")
        current.set(record)
        scope["unspool.record"] = record
        extra = [(b"x-request-id", record.id.encode()), (b"x-content-type-options", b"nosniff")]

        async def answer(message: Any) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message = {**message, "headers": [*message["headers"], *extra]}
            await send(message)

        try:
            refused = self._check(scope, record, extra)
            if refused is not None:
                await refused(scope, receive, answer)
            else:
                await self._app(scope, receive, answer)
        except ClientGoneError:
            record.is_gone, record.status = True, record.status or 499
        except asyncio.CancelledError:
            if not self._state.gate.is_draining:
                raise
            record.error = "ended"  # by a second signal: the server does not wait for its requests
            if not record.status:
                await _write_refusal(scope, _ENDED)(scope, receive, answer)
        except Exception as error:
            if isinstance(error, OSError) and not isinstance(error, UnspoolError) and record.status:
                record.is_gone = True  # it is the connection's
                return
            record.error = type(error).__name__
            record.bug = error
            if not record.status:
                await _write_refusal(scope, _BUG)(scope, receive, answer)
        finally:
            route = scope.get("route")
            self._state.note_end(record, getattr(route, "path", "unknown"))

    def _check(self, scope: Any, record: RequestRecord, extra: list[tuple[bytes, bytes]]) -> Response | None:
        """The answer to a request that may not come in."""
        state, headers = self._state, Headers(scope=scope)
        try:
            check_host(headers, state.options)
            origin = check_origin(headers, state.options)
            if origin is not None:
                extra += [(b"access-control-allow-origin", origin.encode()), (b"vary", b"origin")]
                if scope["method"] == "OPTIONS":
                    return Response(status_code=204, headers=_PREFLIGHT)
            if not is_open(scope["path"].removeprefix(scope.get("root_path", ""))):
                record.key = state.keys.find(headers)
        except RequestError as error:
            record.error = error.code
            return _write_refusal(scope, error)
        return None


_PREFLIGHT = {
    "access-control-allow-methods": "GET, POST",
    "access-control-allow-headers": "authorization, content-type, x-api-key, anthropic-version",
    "access-control-max-age": "600",
}
_ENDED = RequestError(503, "the server was ended; send it again", code="ended")
_BUG = RequestError(500, "something went wrong in the server; its log says what")
_FORMS: Mapping[str, Dialect] = {
    "/v1/messages": MessageDialect(),
    "/api/": OllamaDialect(is_chat=True),
    "/": ChatDialect(),
}

"""Bodies of requests, within bounds, and answers in JSON."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from unspool.server.fields import refuse_deep
from unspool.server.logs import RequestRecord
from unspool.server.refusals import RequestError
from unspool.server.sse import wait_until_gone

T = TypeVar("T")


class ClientGoneError(Exception):
    """The client has closed its connection: no answer would be read."""


class JsonResponse(Response):
    """A value as JSON."""

    media_type = "application/json"

    def __init__(self, value: Any, status_code: int = 200, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(msgspec.json.encode(value), status_code, headers)


def get_record(request: Request) -> RequestRecord:
    """What is known of the request."""
    record: RequestRecord = request.scope["unspool.record"]
    return record


def find_claim(request: Request) -> int | None:
    """The bytes that a body is said to have; None if that is not said, or is no number."""
    claimed = request.headers.get("content-length", "").lstrip("0") or "0"
    if not (claimed.isascii() and claimed.isdecimal()):
        return None
    return int(claimed) if len(claimed) <= 18 else 1 << 62


async def read_body(request: Request, most: int, seconds: float) -> bytes:
    """A body of at most so many bytes, sent within so many seconds."""
    too_large = RequestError(413, f"the body has more than {most} bytes; send a smaller one", code="body_too_large")
    claimed = find_claim(request)
    if claimed is not None and claimed > most:
        raise too_large
    parts, size = [], 0
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                size += len(part)
                if size > most:
                    raise too_large
                parts.append(part)
    except TimeoutError as error:
        raise RequestError(408, f"the body did not come within {seconds:g} seconds", code="timeout") from error
    except ClientDisconnect as error:
        raise ClientGoneError from error
    return b"".join(parts)


async def read_json(request: Request, most: int, seconds: float) -> dict[str, Any]:
    """A body that is a JSON object."""
    return parse_object(await read_body(request, most, seconds))


def parse_object(raw: bytes) -> dict[str, Any]:
    """A JSON object, not too deep."""
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, UnicodeError, ValueError, RecursionError) as error:
        raise RequestError(400, f"the body is not JSON: {error}", code="invalid_json") from error
    if not isinstance(value, dict):
        raise RequestError(400, "the body must be a JSON object with the fields of the request", code="invalid_json")
    refuse_deep(value)
    return value


async def until_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of some work, unless the client closes the connection before it is there."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(wait_until_gone(request.receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)

"""`/v1/compress`: texts in, what is left of them out, with every token's loss and whether it stays."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from unspool.errors import UnspoolError, excerpt
from unspool.server.bodies import JsonResponse, get_record
from unspool.server.errands import Errand
from unspool.server.names import COMPRESS_OPTIONS
from unspool.server.orders import Target
from unspool.server.refusals import RequestError, read_error, refuse_field
from unspool.server.short_prompts import compress_texts
from unspool.server.state import ServerState

_FIELDS: Final = ("context", "instruction", *COMPRESS_OPTIONS)


def describe_compress() -> dict[str, Any]:
    """The body, for the description of the interface."""
    text = {"type": "string"}
    context = {"anyOf": [text, {"type": "array", "items": text, "minItems": 1}]}
    properties = {"model": text, "context": context, "instruction": text, **COMPRESS_OPTIONS}
    return {"type": "object", "required": ["context"], "properties": properties, "additionalProperties": False}


class CompressRoute:
    """The endpoint, over one server's state."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def answer(self, request: Request) -> Response:
        """Shorten the texts of a request."""
        state, record = self._state, get_record(request)
        with ExitStack() as stack:
            stack.enter_context(state.gate.enter(record.key))
            errand = stack.enter_context(Errand(state, request))
            body = await errand.read_json()
            served = await state.models.borrow(body.pop("model", None))
            stack.callback(state.models.give_back, served)
            record.model = served.name
            if served.engine is None:
                raise RequestError(400, f"{served.name} reads sound, not text", param="model")
            target = state.models.target(served, state.options.limits)
            try:
                return await errand.run(partial(_answer, body, target))
            except UnspoolError as error:
                raise read_error(error) from error


def _answer(body: dict[str, Any], target: Target) -> Response:
    unknown = [name for name in body if name not in _FIELDS]
    if unknown:
        raise refuse_field(unknown[0], f"{excerpt(unknown[0])} is not one of {', '.join(_FIELDS)}")
    context, instruction = body.pop("context", None), body.pop("instruction", "")
    texts = [context] if isinstance(context, str) else context
    if not isinstance(texts, list) or not texts or not all(isinstance(one, str) and one for one in texts):
        raise refuse_field("context", "`context` is a text or a list of texts, of which none is empty")
    return JsonResponse(compress_texts(texts, instruction, body, target).as_dict())

"""Routes that generate nothing: models, tokens, templates, health, metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from unspool._version import __version__
from unspool.errors import UnspoolError, excerpt
from unspool.server.bodies import JsonResponse
from unspool.server.chat import read_messages
from unspool.server.completions import read_prompts
from unspool.server.errands import Errand
from unspool.server.messages import count_tokens
from unspool.server.models import Served
from unspool.server.orders import Target
from unspool.server.pictures import has_parts
from unspool.server.refusals import RequestError, read_error, refuse_field
from unspool.server.state import ServerState
from unspool.server.tracing import list_parameters

_NO_VECTORS: Final = (
    "models here write text and have no embeddings; use a server of embedding models for them, or /v1/systemone for "
    "the probabilities of answers to questions about a text"
)
_NO_CHANGES: Final = "models are chosen when the server is started: `unspool serve NAME`, after `unspool pull NAME`"
NOT_SERVED: Final = {
    **dict.fromkeys(("/v1/embeddings", "/api/embed", "/api/embeddings", "/embedding", "/embeddings"), _NO_VECTORS),
    **dict.fromkeys(("/api/pull", "/api/push", "/api/create", "/api/copy", "/api/delete"), _NO_CHANGES),
}
"""Routes of other servers, and why they are not here."""


def make_refusal(why: str) -> Callable[[Request], Any]:
    """The endpoint of a route that is not offered."""

    async def refuse(_: Request) -> Response:
        raise RequestError(400, why, code="unsupported")

    return refuse


class PlainRoutes:
    """The endpoints, over one server's state."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    # --- the server ----------------------------------------------------------------------------------------------
    async def health(self, _: Request) -> Response:
        """200 while every engine works."""
        failed = [one.name for one in self._state.models.all if one.has_failed]
        if failed:
            body = {"status": "failed", "message": f"the engine of {', '.join(failed)} has stopped by a fault"}
            return JsonResponse(body, 503)
        return JsonResponse({"status": "ok"})

    async def ready(self, _: Request) -> Response:
        """200 while requests are taken."""
        state = self._state
        is_ready = state.is_ready and not state.gate.is_draining
        word = "ready" if is_ready else "draining" if state.gate.is_draining else "loading"
        return JsonResponse({"status": word}, 200 if is_ready else 503)

    async def version(self, _: Request) -> Response:
        """The library's version."""
        return JsonResponse({"version": __version__})

    async def metrics(self, _: Request) -> Response:
        """Prometheus' page."""
        state = self._state
        page = await asyncio.to_thread(state.metrics.write, state.models, state.gate.num_active)
        return PlainTextResponse(page, media_type="text/plain; version=0.0.4")

    async def parameters(self, _: Request) -> Response:
        """The settings that a request may carry."""
        return JsonResponse(list_parameters())

    # --- models --------------------------------------------------------------------------------------------------
    async def models(self, _: Request) -> Response:
        """All served models."""
        return JsonResponse({"object": "list", "data": [describe_model(one) for one in self._state.models.all]})

    async def model(self, request: Request) -> Response:
        """One of them."""
        return JsonResponse(describe_model(self._state.models.find(request.path_params["name"])))

    # --- tokens --------------------------------------------------------------------------------------------------
    async def tokenize(self, request: Request) -> Response:
        """A text's, or a chat's, token ids."""
        return await self._with_model(request, _tokenize)

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids."""
        return await self._with_model(request, _detokenize)

    async def apply_template(self, request: Request) -> Response:
        """The text that a chat template makes of messages."""
        return await self._with_model(request, _apply_template)

    async def count_tokens(self, request: Request) -> Response:
        """Tokens of a message, in Anthropic's form."""
        return await self._with_model(request, lambda body, target: {"input_tokens": count_tokens(body, target)})

    async def _with_model(self, request: Request, answer: Callable[[dict[str, Any], Target], Any]) -> Response:
        state = self._state
        limits = state.options.limits
        with Errand(state, request) as errand:
            body = await errand.read_json()
            served = await state.models.borrow(body.pop("model", None))
            try:
                target = state.models.target(served, limits)
                return await errand.run(lambda: JsonResponse(answer(body, target)))
            except UnspoolError as error:
                raise read_error(error) from error
            finally:
                state.models.give_back(served)


def describe_model(served: Served) -> dict[str, Any]:
    """A model as /v1/models lists it."""
    made: dict[str, Any] = {
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "unspool",
        "aliases": list(served.aliases),
        "loaded": served.is_loaded,
    }
    if served.lm is not None:
        info = served.lm.model.info
        made["max_model_len"] = info.max_context
        made["meta"] = {
            "family": info.family,
            "vocab_size": info.vocab_size,
            "layers": info.num_layers,
            "size": served.size,
            "speech": info.features is not None,
        }
    return made


def _take(body: dict[str, Any], known: dict[str, type], required: str) -> dict[str, Any]:
    """The fields of a small body, checked."""
    for name, value in body.items():
        if name not in known:
            raise refuse_field(
                name[:64], f"unknown field {excerpt(name)}; known are {', '.join(known)}", "unknown_parameter"
            )
        if value is not None and not isinstance(value, known[name]):
            raise refuse_field(name, f"`{name}` must be {known[name].__name__}, not {excerpt(value)}", "invalid_type")
    found = {name: value for name, value in body.items() if value is not None}
    if required not in found:
        raise refuse_field(required, f"the field {required!r} is required", "missing_required_parameter")
    return found


def _tokenize(body: dict[str, Any], target: Target) -> dict[str, Any]:
    if "content" in body:  # llama-server's name
        body["prompt"] = body.pop("content")
    known: dict[str, type] = {
        "prompt": str,
        "messages": list,
        "tools": list,
        "add_special_tokens": bool,
        "add_generation_prompt": bool,
        "chat_template_kwargs": dict,
        "return_token_strs": bool,
    }
    given = _take(body, known, "messages" if "messages" in body else "prompt")
    if "messages" in given:
        if "prompt" in given:
            raise refuse_field("prompt", "`prompt` and `messages` are two texts; give one of them")
        adds = given.get("add_special_tokens", False)
        ids = target.encode_text(_render(given, target), add_special_tokens=adds, field="messages")
    elif not given["prompt"]:
        ids = []
    else:
        adds = given.get("add_special_tokens", True)
        ids = read_prompts(given["prompt"], target, add_special_tokens=adds, counts=True)[0]
    made: dict[str, Any] = {"count": len(ids), "max_model_len": target.context, "tokens": ids}
    if given.get("return_token_strs"):
        made["token_strs"] = target.tokenizer.convert_ids_to_tokens(ids)
    return made


def _detokenize(body: dict[str, Any], target: Target) -> dict[str, Any]:
    given = _take(body, {"tokens": list, "skip_special_tokens": bool}, "tokens")
    size, most = target.lm.model.info.vocab_size, target.limits.token_ids
    if len(given["tokens"]) > most:
        raise refuse_field(
            "tokens", f"{len(given['tokens'])} token ids; at most {most} are taken, so send parts of them"
        )
    if not all(isinstance(one, int) and not isinstance(one, bool) and 0 <= one < size for one in given["tokens"]):
        raise refuse_field("tokens", f"`tokens` are ids from 0 to {size - 1}")
    text = target.tokenizer.decode(given["tokens"], given.get("skip_special_tokens", False))
    return {"prompt": text, "content": text}


def _apply_template(body: dict[str, Any], target: Target) -> dict[str, Any]:
    known: dict[str, type] = {
        "messages": list,
        "tools": list,
        "add_generation_prompt": bool,
        "chat_template_kwargs": dict,
    }
    return {"prompt": _render(_take(body, known, "messages"), target)}


def _render(given: dict[str, Any], target: Target) -> str:
    messages = read_messages(given["messages"], target)
    if has_parts(messages):
        raise refuse_field("messages", "pictures are no part of a prompt's text; leave them out")
    variables = given.get("chat_template_kwargs") or {}
    if {"messages", "tools", "chat_template", "tokenize", "return_tensors", "return_dict", "documents"} & set(
        variables
    ):
        raise RequestError(
            400, "`chat_template_kwargs` are variables of the template's own", param="chat_template_kwargs"
        )
    text: str = target.tokenizer.apply_chat_template(
        messages,
        tokenize=False,
        tools=given.get("tools") or None,
        **{"add_generation_prompt": given.get("add_generation_prompt", True), **variables},
    )
    return text

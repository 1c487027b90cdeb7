"""Ollama's dialect: `/api/chat`, `/api/generate`, `/api/tags`, `/api/show`, `/api/version`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from unspool._version import __version__
from unspool.server.bodies import JsonResponse, read_json
from unspool.server.chat import read_chat
from unspool.server.completions import read_prompts
from unspool.server.dialect import Reply
from unspool.server.fields import Found, read_fields
from unspool.server.models import Served
from unspool.server.names import OLLAMA_CHAT, OLLAMA_GENERATE
from unspool.server.orders import Order, Target, make_order, put_effort, put_format
from unspool.server.refusals import RequestError, refuse_field
from unspool.server.state import ServerState
from unspool.server.work import Choice, Delta, Work
from unspool.thoughts.kinds import find_kind


class OllamaDialect:
    """Ollama's chats, or its generations from a prompt: lines of JSON."""

    media_type = "application/x-ndjson"

    def __init__(self, *, is_chat: bool) -> None:
        self._is_chat = is_chat

    def read(self, body: Any, target: Target) -> Order:
        """The order that a body asks for; its options are fields like others."""
        options = body.get("options") or {}
        if not isinstance(options, dict):
            raise refuse_field("options", "`options` is an object")
        for name in ("model", "stream"):
            if options.get(name) is not None:
                raise refuse_field(name, f"`{name}` stands beside the options, not among them")
        flat = {name: value for name, value in body.items() if name != "options"}
        if twice := set(flat) & set(options):
            raise refuse_field(min(twice), f"`{min(twice)}` stands in the request and in its options; give it once")
        table, required = (OLLAMA_CHAT, "messages") if self._is_chat else (OLLAMA_GENERATE, "prompt")
        found = read_fields({**flat, **options}, table, [required])
        form = found.take("format")
        if form is not None:
            kind = {"type": "json_object"} if form == "json" else {"type": "json_object", "schema": form}
            put_format(found, "format", kind)
        think = found.take("think")
        if think is not None:
            put_effort(found, "think", {True: "medium", False: "none"}.get(think, think))
        order = self._read_chat(found, target) if self._is_chat else self._read_prompt(found, target)
        order.stream = body.get("stream") is not False  # on unless it is switched off
        return order

    def _read_chat(self, found: Found, target: Target) -> Order:
        messages = found.values["messages"]
        if not all(isinstance(message, dict) for message in messages):
            raise refuse_field("messages", "`messages` is a list of messages, each with a role and a content")
        found.put("messages", [_name_calls(message) for message in messages])
        return read_chat(found, target, "ollama-")

    def _read_prompt(self, found: Found, target: Target) -> Order:
        prompt, system = found.take("prompt"), found.take("system")
        found.names["messages"] = "prompt"
        if found.take("raw", False):
            if found.take("images"):
                raise refuse_field("images", "`images` go into the chat template, which `raw` leaves out")
            if system is not None:
                raise refuse_field("system", "`system` goes into the chat template, which `raw` leaves out")
            wanted, top = found.take("logprobs", False), found.take("top_logprobs", 0)
            if found.take("reasoning_effort", "none") != "none":
                raise refuse_field("think", "`think` goes into the chat template, which `raw` leaves out")
            order = make_order(found, read_prompts(prompt, target), target, "ollama-")
            if wanted:
                order.logprobs = order.settings["logprobs"] = top
            return order
        messages = [] if system is None else [{"role": "system", "content": system}]
        images = found.take("images")
        pictured = {} if images is None else {"images": images}
        found.put("messages", [*messages, {"role": "user", "content": prompt, **pictured}])
        return read_chat(found, target, "ollama-")

    def write(self, reply: Reply, choices: list[Choice], work: Work) -> dict[str, Any]:
        """The body of a whole answer."""
        choice = choices[0]
        return self._write_line(reply, choice) | _write_end(work, choice.finish_reason)

    async def events(self, reply: Reply, work: Work) -> AsyncIterator[bytes]:
        """Lines, the last with the counts."""
        reason: str | None = None
        async for deltas in work.deltas():
            for delta in deltas:
                reason = delta.finish_reason or reason
                if delta.text or delta.thought or delta.calls or delta.logprobs:
                    yield _line({**self._write_line(reply, delta), "done": False})
        last = Delta(0, reason=reason)
        yield _line(self._write_line(reply, last) | _write_end(work, reason or "stop"))

    def _write_line(self, reply: Reply, part: Choice | Delta) -> dict[str, Any]:
        made: dict[str, Any] = {"model": reply.order.model, "created_at": _now()}
        if self._is_chat:
            message: dict[str, Any] = {"role": "assistant", "content": part.text}
            if part.thought:
                message["thinking"] = part.thought
            if part.calls:
                message["tool_calls"] = [
                    {"function": {"name": call.name, "arguments": call.arguments}} for call in part.calls
                ]
            made["message"] = message
        else:
            made["response"] = part.text
            if part.thought:
                made["thinking"] = part.thought
        if reply.order.logprobs is not None and part.logprobs:
            made["logprobs"] = reply.texts.write_chat(part.logprobs, reply.order.logprobs)["content"]
        return made

    def write_error(self, error: RequestError) -> dict[str, Any]:
        """The body of an error."""
        return {"error": str(error)}

    def write_late_error(self, error: RequestError, _: int) -> bytes:
        """An error after a stream's beginning."""
        return _line(self.write_error(error))


def _name_calls(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose calls have what OpenAI's have."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return {name: value for name, value in message.items() if name not in ("thinking", "tool_calls") or value}
    named = [
        {"id": f"call_{place}", "type": "function", **call} if isinstance(call, dict) else call
        for place, call in enumerate(calls)
    ]
    return {**message, "tool_calls": named}


def _write_end(work: Work, reason: str) -> dict[str, Any]:
    """The counts; durations are in nanoseconds."""
    order, stats = work.order, work.requests[0].stats
    first = int(stats.first_token_seconds * 1e9)
    whole = int(stats.total_seconds * 1e9)
    return {
        "done": True,
        "done_reason": "length" if reason == "length" else "stop",
        "total_duration": whole,
        "load_duration": 0,
        "prompt_eval_count": order.num_prompt_tokens,
        "prompt_eval_duration": first,
        "eval_count": work.num_new,
        "eval_duration": max(0, whole - first),
    }


def _line(value: dict[str, Any]) -> bytes:
    return msgspec.json.encode(value) + b"\n"


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


class OllamaRoutes:
    """Routes about models, in Ollama's form."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def version(self, _: Request) -> Response:
        """The library's version."""
        return JsonResponse({"version": __version__})

    async def tags(self, _: Request) -> Response:
        """All served models."""
        return JsonResponse({"models": [_describe(one) for one in self._state.models.all]})

    async def running(self, _: Request) -> Response:
        """The models that are loaded."""
        loaded = [one for one in self._state.models.all if one.is_loaded]
        return JsonResponse({"models": [_describe_loaded(one) for one in loaded]})

    async def show(self, request: Request) -> Response:
        """One of them."""
        limits = self._state.options.limits
        body = await read_json(request, limits.body_bytes, limits.body_seconds)
        if unknown := set(body) - {"model", "name", "verbose"}:
            return JsonResponse({"error": f"unknown field {min(unknown)!r}"}, 400)
        served = self._state.models.find(body.get("model", body.get("name")))
        return JsonResponse(await asyncio.to_thread(_show, served))


def _show(served: Served) -> dict[str, Any]:
    """All that is known of a model. Whoever has a chat template can call tools, in its form or in the generic one."""
    made = _describe(served)
    info: dict[str, Any] = {}
    template, has_chats = "", False
    if served.lm is not None:
        about = served.lm.model.info
        info = {"general.architecture": about.family, f"{about.family}.context_length": about.max_context}
        found = None if served.lm.tokenizer is None else served.lm.tokenizer.chat_template
        template, has_chats = found if isinstance(found, str) else "", bool(found)
    thinks = has_chats and served.lm is not None and find_kind(served.lm.tokenizer) is not None
    can = ["completion", *(["tools"] if has_chats else []), *(["thinking"] if thinks else [])]
    shown = {"details": made["details"], "model_info": info, "template": template, "capabilities": can}
    return {"modelfile": "", "parameters": "", "modified_at": made["modified_at"], **shown}


def _describe_loaded(served: Served) -> dict[str, Any]:
    """A loaded model, which stays while there is room: for ever, as far as is known."""
    made = {name: value for name, value in _describe(served).items() if name != "modified_at"}
    assert served.lm is not None
    on_card = served.size if served.lm.device.type != "cpu" else 0
    context = served.lm.model.info.max_context
    return {**made, "expires_at": "9999-12-31T23:59:59Z", "size_vram": on_card, "context_length": context}


def _describe(served: Served) -> dict[str, Any]:
    when = datetime.fromtimestamp(served.created, UTC).isoformat().replace("+00:00", "Z")
    family = "" if served.lm is None else served.lm.model.info.family
    details = {"format": "", "family": family, "families": [family], "parameter_size": "", "quantization_level": ""}
    return {
        "name": served.name,
        "model": served.name,
        "modified_at": when,
        "size": served.size,
        "digest": served.fingerprint,
        "details": {"parent_model": "", **details},
    }

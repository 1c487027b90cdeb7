"""`/v1/trace`: one prompt in, what decoding does out, as events; and `/v1/parameters`, the settings of a request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final

from unspool.config import PARAMETERS
from unspool.server.chat import read_chat
from unspool.server.completions import read_prompts
from unspool.server.dialect import Reply
from unspool.server.fields import make_setting, read_fields
from unspool.server.frames import frame
from unspool.server.names import OF_CHATS, TRACE
from unspool.server.orders import Order, Target, make_order
from unspool.server.refusals import RequestError, read_error, refuse_field
from unspool.server.work import Choice, Work
from unspool.trace import Trace, Tracer

TRACE_TOKENS: Final = 256  # the most that are written if a request does not say
_DEFAULTS: Final = {"max_new_tokens": TRACE_TOKENS, "top_k": 0, "do_sample": None}  # where requests differ from Python


class TraceDialect:
    """The events of a traced call, as the trace room makes them."""

    media_type = "text/event-stream"

    def read(self, body: Any, target: Target) -> Order:
        """The order that a body asks for."""
        found = read_fields(body, TRACE)
        given = [name for name in ("prompt", "messages") if name in found.values]
        if len(given) != 1:
            why = (
                "the field 'prompt' or 'messages' is required" if not given else "give `prompt` or `messages`, not both"
            )
            raise refuse_field("prompt", why, None if given else "missing_required_parameter")
        of_others = ("add_special_tokens",) if given == ["messages"] else OF_CHATS
        for name in of_others:
            if name in found.values:
                raise refuse_field(name, f"`{name}` does not go with `{given[0]}`; leave it out", "without_effect")
        written, adds = found.take("prefix_ids", []), found.take("add_special_tokens", True)
        size = target.lm.model.info.vocab_size
        if any(token >= size for token in written):
            raise refuse_field("prefix_ids", f"`prefix_ids` are token ids, which go from 0 to {size - 1}")
        if "max_length" not in found.settings:
            found.settings.setdefault("max_new_tokens", TRACE_TOKENS)
        if given == ["messages"]:
            order = read_chat(found, target, "trace-")
            if order.pictured is not None:
                raise refuse_field("messages", "a trace follows a text; leave the pictures out")
        else:
            prompts = read_prompts(found.take("prompt"), target, add_special_tokens=adds)
            if len(prompts) > 1:
                raise refuse_field("prompt", "a trace follows one prompt; send one request for each")
            order = make_order(found, prompts, target, "trace-")
        if order.num_choices > 1 and order.settings.get("num_beams", 1) == 1:
            raise refuse_field("n", "a trace follows one text; several come from a search with num_beams")
        order.stream = True
        order.settings |= {"observer": Tracer(), "prefix_ids": written}
        return order

    def write(self, reply: Reply, choices: list[Choice], work: Work) -> dict[str, Any]:
        """A trace is always a stream."""
        raise NotImplementedError

    async def events(self, reply: Reply, work: Work) -> AsyncIterator[bytes]:
        """The events of the trace."""
        order, request = reply.order, work.requests[0]
        trace = Trace(request.answer, order.settings["observer"], model=order.model, name=order.id)
        yield frame(await asyncio.to_thread(trace.start))  # a long prompt has many tokens to spell
        try:
            async for emitted in request.turns():
                work.note_tokens(sum(map(len, emitted.tokens.values())))
                for event in trace.read(emitted):
                    yield frame(event)
            work.check_ended()
        except Exception as error:
            raise read_error(error, order.names, is_submitted=True) from error
        yield frame(trace.end())

    def write_error(self, error: RequestError) -> dict[str, Any]:
        """The body of an error."""
        return error.as_openai()

    def write_late_error(self, error: RequestError, _: int) -> bytes:
        """An error after a stream's beginning."""
        return frame({"type": "error", "message": str(error), "code": error.code})


def list_parameters() -> list[dict[str, Any]]:
    """The settings that a request may carry, from the one table of parameters."""
    offered = [one for one in PARAMETERS.values() if make_setting(one).use == "setting"]
    return [
        {
            "name": one.name,
            "type": one.kind,
            "default": _DEFAULTS.get(one.name, one.default),
            "minimum": one.at_least,
            "maximum": one.at_most,
            "choices": list(one.all_choices) or None,
            "help": one.help,
            "group": one.group,
            "off": list(one.off),
            "needs": list(one.needs),
        }
        for one in offered
    ]

"""A request for text over HTTP: read, submitted, answered whole or as a stream, in any dialect."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from unspool.grammar.haste import SlowGrammarError
from unspool.server.bodies import JsonResponse, get_record, until_gone
from unspool.server.dialect import Dialect, Reply
from unspool.server.errands import Errand
from unspool.server.logs import RequestRecord
from unspool.server.models import Served
from unspool.server.orders import Order
from unspool.server.refusals import RequestError, read_error
from unspool.server.sse import PING, EventStream
from unspool.server.state import ServerState
from unspool.server.work import Work


def make_endpoint(
    state: ServerState, dialect: Dialect, enter: Callable[[], AbstractContextManager[None]] = nullcontext
) -> Callable[[Request], Any]:
    """The endpoint of a dialect; `enter` counts its requests, and may refuse one."""

    async def endpoint(request: Request) -> Response:
        try:
            return await generate(state, dialect, request, enter)
        except RequestError as error:
            get_record(request).error = error.code
            return JsonResponse(dialect.write_error(error), error.status, error.headers)

    return endpoint


async def generate(
    state: ServerState,
    dialect: Dialect,
    request: Request,
    enter: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Response:
    """Answer a request for text."""
    record, limits = get_record(request), state.options.limits
    with ExitStack() as stack:
        stack.enter_context(state.gate.enter(record.key))
        stack.enter_context(enter())
        with Errand(state, request) as errand:
            body = await errand.read_json()
            served = await state.models.borrow(body.get("model"))
            stack.callback(state.models.give_back, served)
            record.model = served.name
            with nullcontext() if served.engine is None else served.engine.expecting():
                submit = partial(_submit, state, dialect, served, body, record)
                order, work = await errand.run(submit, lambda made: made[1].close())
            del body, submit  # it may be large, and a stream goes on for long
        stack.callback(_note, state, record, work)
        stack.callback(work.close)
        stack.enter_context(state.gate.ending(work.end))
        reply = Reply(order, served.texts, served.fingerprint)
        if order.stream:
            options, kept = state.options, stack.pop_all()
            return EventStream(
                _guard(dialect, reply, work, record),
                kept.close,
                media_type=dialect.media_type,
                ping=PING if dialect.media_type == "text/event-stream" else None,
                ping_seconds=options.ping_seconds,
                send_seconds=limits.send_seconds,
            )
        choices = await until_gone(request, work.choices())
        return JsonResponse(dialect.write(reply, choices, work))


def _submit(
    state: ServerState, dialect: Dialect, served: Served, body: dict[str, Any], record: RequestRecord
) -> tuple[Order, Work]:
    """Read a body and hand it to the engine, in a thread: templates, tokenizers and grammars take their time."""
    if served.engine is None:
        raise RequestError(400, f"{served.name} writes what it hears; use /v1/audio/transcriptions", param="model")
    try:
        order = dialect.read(body, state.models.target(served, state.options.limits))
    except SlowGrammarError:
        raise
    except Exception as error:
        raise _explain(error, record) from error
    order.tenant = state.keys.make_tenant(record.key, order.tenant)
    record.prompt_tokens = order.num_prompt_tokens
    try:
        tokenizer = None if served.lm is None else served.lm.tokenizer
        return order, Work(served.engine, order, tokenizer, state.options.limits.request_seconds)
    except SlowGrammarError:
        raise
    except Exception as error:
        raise _explain(error, record) from error


def _explain(error: Exception, record: RequestRecord) -> RequestError:
    refused = read_error(error)
    if refused.status == 500:
        record.error = type(error).__name__
        record.bug = error
    return refused


async def _guard(dialect: Dialect, reply: Reply, work: Work, record: RequestRecord) -> AsyncIterator[bytes]:
    """A stream's events; an error becomes the last one."""
    num_sent = 0
    try:
        async for event in dialect.events(reply, work):
            yield event
            num_sent += 1
    except Exception as error:
        refused = _explain(error, record)
        record.error = record.error or refused.code
        yield dialect.write_late_error(refused, num_sent)


def _note(state: ServerState, record: RequestRecord, work: Work) -> None:
    """Enter what a request has cost."""
    metrics, now = state.metrics, time.monotonic()
    record.new_tokens = work.num_new
    record.is_gone = record.is_gone or not work.is_done
    model = record.model or ""
    metrics.tokens[model, "prompt"] += work.order.num_prompt_tokens
    metrics.tokens[model, "new"] += work.num_new
    metrics.whole.add(model, now - work.started)
    if work.first_at is not None:
        record.first_token_seconds = work.first_at - work.started
        metrics.first.add(model, record.first_token_seconds)
        steps = work.num_new / max(1, len(work.order.prompts) * work.order.num_choices) - 1
        if steps > 0:
            metrics.between.add(model, (now - work.first_at) / steps)

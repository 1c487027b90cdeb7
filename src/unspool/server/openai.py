"""What OpenAI's chat completions and completions have in common."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

from unspool.server.dialect import Reply
from unspool.server.frames import DONE, frame
from unspool.server.refusals import RequestError
from unspool.server.usage import count_usage
from unspool.server.work import Delta, Work


class OpenAIErrors:
    """Errors as both write them."""

    def write_error(self, error: RequestError) -> dict[str, Any]:
        """The body of an error."""
        return error.as_openai()

    def write_late_error(self, error: RequestError, _: int) -> bytes:
        """An error after a stream's beginning."""
        return frame(error.as_openai())


def make_head(reply: Reply, kind: str) -> dict[str, Any]:
    """The fields that an answer, and every chunk of a streamed one, begins with."""
    order = reply.order
    return {
        "id": order.id,
        "object": kind,
        "created": order.created,
        "model": order.model,
        "system_fingerprint": reply.fingerprint,
    }


async def send_chunks(
    reply: Reply, work: Work, head: dict[str, Any], write: Callable[[Delta], dict[str, Any]]
) -> AsyncIterator[bytes]:
    """A chunk for every delta, the usage if it was asked for, and the end."""
    order = reply.order
    async for deltas in work.deltas():
        for delta in deltas:
            chunk = {**head, "choices": [write(delta)]}
            yield frame({**chunk, "usage": count_usage(work)} if order.repeats_usage else chunk)
    if order.sends_usage:
        yield frame({**head, "choices": [], "usage": count_usage(work)})
    yield DONE

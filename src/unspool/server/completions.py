"""`/v1/completions`: texts or token ids in, their continuations out."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from unspool.errors import UnspoolError, excerpt
from unspool.server.dialect import Reply
from unspool.server.fields import read_fields
from unspool.server.frames import frame
from unspool.server.names import COMPLETIONS
from unspool.server.openai import OpenAIErrors, make_head, send_chunks
from unspool.server.orders import COMPLETION, COMPLETION_TOKENS, Order, Target, make_order
from unspool.server.refusals import RequestError, refuse_field
from unspool.server.short_prompts import shorten_prompts
from unspool.server.usage import count_usage
from unspool.server.work import Choice, Delta, Work


class CompletionDialect(OpenAIErrors):
    """OpenAI's completions."""

    media_type = "text/event-stream"

    def read(self, body: Any, target: Target) -> Order:
        """The order that a body asks for."""
        found = read_fields(body, COMPLETIONS, ["prompt"])
        adds = found.take("add_special_tokens", True)
        given = shorten_prompts(found.take("prompt"), found.take("compress"), target)
        prompts = read_prompts(given, target, add_special_tokens=adds)
        logprobs, echo = found.take("logprobs"), found.take("echo", False)
        if logprobs is not None and logprobs > target.limits.top_logprobs:
            raise refuse_field("logprobs", f"at most {target.limits.top_logprobs} likeliest tokens are returned")
        if "max_length" not in found.settings:
            found.settings.setdefault("max_new_tokens", COMPLETION_TOKENS)
        order = make_order(found, prompts, target, COMPLETION)
        order.logprobs, order.echo = logprobs, echo
        if order.num_drawn > order.num_choices and order.stream:
            raise refuse_field("best_of", "`best_of` is known at the end, and a stream can't wait for it")
        is_ranked = order.num_drawn > order.num_choices and order.settings.get("num_beams", 1) == 1
        if logprobs is not None or is_ranked:
            order.settings["logprobs"] = logprobs or 0
        if echo and logprobs is not None:
            if order.stream:
                raise refuse_field("echo", "`echo` with logprobs is known when the prompt is read; leave out stream")
            order.names.setdefault("prompt_logprobs", "echo")
            order.settings["prompt_logprobs"] = max(logprobs, order.settings.get("prompt_logprobs", 0))
        return order

    def write(self, reply: Reply, choices: list[Choice], work: Work) -> dict[str, Any]:
        """The body of a whole answer."""
        made = [_write_choice(reply, choice) for choice in choices]
        return {**make_head(reply, "text_completion"), "choices": made, "usage": count_usage(work)}

    async def events(self, reply: Reply, work: Work) -> AsyncIterator[bytes]:
        """Chunks, the usage if it was asked for, and the end."""
        order, head = reply.order, make_head(reply, "text_completion")
        offsets: dict[int, int] = {}
        if order.echo:
            for index, text in enumerate(_list_echoes(reply)):
                offsets[index] = len(text)
                chunk = {"index": index, "text": text, "logprobs": None, "finish_reason": None}
                yield frame({**head, "choices": [chunk]})
        async for event in send_chunks(reply, work, head, lambda delta: _write_delta(reply, delta, offsets)):
            yield event


def _list_echoes(reply: Reply) -> list[str]:
    """Each choice's prompt as text."""
    return [_echo(reply, prompt) for prompt in reply.order.prompts for _ in range(reply.order.num_choices)]


def _echo(reply: Reply, prompt: list[int]) -> str:
    return reply.texts.decode(prompt, skip_special_tokens=reply.order.skips_specials)


def _write_choice(reply: Reply, choice: Choice) -> dict[str, Any]:
    order, texts = reply.order, reply.texts
    text, logprobs = choice.text, None
    echoed = _echo(reply, choice.prompt_ids) if order.echo else ""
    if order.logprobs is not None and choice.logprobs is not None:
        listed: list[Any] = list(choice.logprobs)
        ids = [one.token_id for one in choice.logprobs]
        if order.echo and choice.prompt_logprobs is not None:
            listed, ids = [*choice.prompt_logprobs, *listed], [*choice.prompt_ids, *ids]
        logprobs = texts.write_completion(
            listed, ids, order.logprobs, 0, skip_special_tokens=reply.order.skips_specials
        )
    made = {
        "index": choice.index,
        "text": echoed + text,
        "logprobs": logprobs,
        "finish_reason": choice.finish_reason,
    }
    if choice.prompt_logprobs is not None and not (order.echo and order.logprobs is not None):
        made["prompt_logprobs"] = texts.write_prompt(choice.prompt_logprobs)
    if order.returns_ids:
        made |= {"token_ids": choice.token_ids, "prompt_token_ids": choice.prompt_ids}
    return made


def _write_delta(reply: Reply, delta: Delta, offsets: dict[int, int]) -> dict[str, Any]:
    order, logprobs = reply.order, None
    text, ids = ("", []) if order.writes_nothing else (delta.text, delta.token_ids)
    if order.logprobs is not None and delta.logprobs and not order.writes_nothing:
        scored, skips = [one.token_id for one in delta.logprobs], order.skips_specials
        begin = offsets.get(delta.index, 0)
        logprobs = reply.texts.write_completion(
            delta.logprobs, scored, order.logprobs, begin, skip_special_tokens=skips
        )
        offsets[delta.index] = begin + sum(
            reply.texts.count_characters(token, skip_special_tokens=skips) for token in scored
        )
    reason = "length" if order.writes_nothing and delta.finish_reason else delta.finish_reason
    made = {"index": delta.index, "text": text, "logprobs": logprobs, "finish_reason": reason}
    if order.returns_ids:
        made["token_ids"] = ids
    return made


def read_prompts(
    given: Any, target: Target, *, add_special_tokens: bool = True, counts: bool = False
) -> list[list[int]]:
    """Prompts as token ids: of a text, of ids, or of a list of either. They need not fit if they are only counted."""
    if isinstance(given, str):
        return [_encode(given, target, add_special_tokens, counts)]
    if not isinstance(given, list):
        raise refuse_field("prompt", f"`prompt` is a text, token ids, or a list of either, not {excerpt(given)}")
    if all(isinstance(one, int) for one in given):
        return [_check_ids(given, target)]
    if len(given) > target.limits.prompts:
        raise refuse_field("prompt", f"{len(given)} prompts in one request; at most {target.limits.prompts} are taken")
    made = []
    for one in given:
        if isinstance(one, str):
            made.append(_encode(one, target, add_special_tokens, counts))
        elif isinstance(one, list) and one:
            made.append(_check_ids(one, target))
        else:
            raise refuse_field("prompt", f"a prompt is a text or a list of token ids, not {excerpt(one)}")
    return made


def _encode(text: str, target: Target, add_special_tokens: bool, counts: bool) -> list[int]:
    encode = target.encode_text if counts else target.encode_prompt
    try:
        ids = encode(text, add_special_tokens=add_special_tokens, field="prompt")
    except UnspoolError as error:
        raise error if isinstance(error, RequestError) else refuse_field("prompt", str(error)) from error
    if not ids:
        raise refuse_field("prompt", "a prompt is empty: there is nothing to continue")
    return ids


def _check_ids(ids: list[Any], target: Target) -> list[int]:
    size, longest = target.lm.model.info.vocab_size, target.longest_prompt
    if longest is not None and len(ids) > longest:
        raise target.refuse_long("prompt", f"{len(ids)} tokens")
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < size:
            raise refuse_field("prompt", f"{excerpt(token)} is not a token id; ids go from 0 to {size - 1}")
    return ids

"""`/v1/responses`, without anything stored: items in, items out."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from unspool.errors import excerpt
from unspool.server.calls import Call, make_id
from unspool.server.chat import read_chat
from unspool.server.contents import join_content, join_parts
from unspool.server.dialect import Reply
from unspool.server.fields import Found, read_fields
from unspool.server.frames import frame
from unspool.server.names import RESPONSES
from unspool.server.orders import Order, Target, put_effort, put_format
from unspool.server.refusals import RequestError, refuse_field
from unspool.server.work import Choice, Work

_ECHOED = ("instructions", "tools", "tool_choice", "parallel_tool_calls", "temperature", "top_p", "text", "metadata")


class ResponseDialect:
    """OpenAI's responses."""

    media_type = "text/event-stream"

    def read(self, body: Any, target: Target) -> Order:
        """The order that a body asks for."""
        found = read_fields(body, RESPONSES, ["input"])
        instructions = found.take("instructions")
        messages = [] if instructions is None else [{"role": "system", "content": instructions}]
        found.put("messages", messages + _read_input(found.take("input")))
        found.names["messages"] = "input"
        found.put("tools", _read_tools(found.take("tools")))
        found.put("tool_choice", _read_choice(found.take("tool_choice")))
        _read_text(found, found.take("text", {}))
        wanted = found.take("include", [])
        if any(one != "message.output_text.logprobs" for one in wanted):
            raise refuse_field("include", "`include` has message.output_text.logprobs alone")
        if wanted or "top_logprobs" in found.values:
            found.put("logprobs", True)
        _read_reasoning(found)
        order = read_chat(found, target, "resp_")
        order.echoed = {name: body.get(name) for name in _ECHOED} | {"max_output_tokens": body.get("max_output_tokens")}
        return order

    def write(self, reply: Reply, choices: list[Choice], work: Work) -> dict[str, Any]:
        """The body of a whole answer."""
        choice = choices[0]
        status = "incomplete" if choice.finish_reason == "length" else "completed"
        output = [] if choice.calls and not choice.text else [_write_message(reply, choice, status)]
        output += [_write_call(call) for call in choice.calls]
        return _write_response(reply, work, status, output)

    async def events(self, reply: Reply, work: Work) -> AsyncIterator[bytes]:
        """The answer as it grows."""
        writer = _Writer(reply, work)
        for kind in ("response.created", "response.in_progress"):
            yield writer.event(kind, response=_write_response(reply, work, "in_progress", []))
        async for deltas in work.deltas():
            for delta in deltas:
                if reply.order.logprobs is not None:
                    writer.hold_logprobs(_write_logprobs(reply, delta.logprobs))
                if delta.text:
                    for event in writer.add_text(delta.text):
                        yield event
                for call in delta.calls:
                    for event in writer.add_call(call):
                        yield event
                if delta.reason is not None:
                    for event in writer.end("incomplete" if delta.finish_reason == "length" else "completed"):
                        yield event

    def write_error(self, error: RequestError) -> dict[str, Any]:
        """The body of an error."""
        return error.as_openai()

    def write_late_error(self, error: RequestError, num_sent: int) -> bytes:
        """An error after a stream's beginning."""
        body = {"type": "error", "code": error.code, "message": str(error), "param": error.param}
        return frame({**body, "sequence_number": num_sent}, "error")


class _Writer:
    """The events of one response: items open, grow and close."""

    def __init__(self, reply: Reply, work: Work) -> None:
        self._reply, self._work = reply, work
        self._number = -1
        self._output: list[dict[str, Any]] = []
        self._text: list[str] | None = None  # of the open message
        self._logprobs: list[dict[str, Any]] = []
        self._held: list[dict[str, Any]] = []  # log-probabilities of tokens whose text has not come yet
        self._id = ""

    def event(self, kind: str, **values: Any) -> bytes:
        """One event, numbered."""
        self._number += 1
        return frame({"type": kind, "sequence_number": self._number, **values}, kind)

    @property
    def _place(self) -> dict[str, Any]:
        return {"output_index": len(self._output)}

    def hold_logprobs(self, logprobs: list[dict[str, Any]]) -> None:
        """Log-probabilities that go with the next text; those of a call have no place."""
        self._held += logprobs

    def add_text(self, text: str) -> list[bytes]:
        """Text that is said."""
        made = []
        logprobs, self._held = self._held, []
        if self._text is None:
            self._text, self._id = [], make_id("msg", self._reply.order.id, len(self._output))
            self._logprobs = []
            item = {"id": self._id, "type": "message", "role": "assistant", "status": "in_progress", "content": []}
            made.append(self.event("response.output_item.added", **self._place, item=item))
            made.append(self.event("response.content_part.added", **self._part, part=_write_part("", [])))
        self._text.append(text)
        self._logprobs += logprobs
        made.append(self.event("response.output_text.delta", **self._part, delta=text, logprobs=logprobs))
        return made

    @property
    def _part(self) -> dict[str, Any]:
        return {**self._place, "item_id": self._id, "content_index": 0}

    def _close_text(self, status: str) -> list[bytes]:
        if self._text is None:
            return []
        text, self._text = "".join(self._text), None
        part = _write_part(text, self._logprobs)
        item = {"id": self._id, "type": "message", "role": "assistant", "status": status, "content": [part]}
        made = [
            self.event("response.output_text.done", **self._part, text=text, logprobs=self._logprobs),
            self.event("response.content_part.done", **self._part, part=part),
            self.event("response.output_item.done", **self._place, item=item),
        ]
        self._output.append(item)
        return made

    def add_call(self, call: Call) -> list[bytes]:
        """A call that is made."""
        made = self._close_text("completed")
        self._held = []
        item = _write_call(call)
        about = {**self._place, "item_id": item["id"]}
        opened = {**item, "arguments": "", "status": "in_progress"}
        made.append(self.event("response.output_item.added", **self._place, item=opened))
        made.append(self.event("response.function_call_arguments.delta", **about, delta=item["arguments"]))
        made.append(
            self.event("response.function_call_arguments.done", **about, name=item["name"], arguments=item["arguments"])
        )
        made.append(self.event("response.output_item.done", **self._place, item=item))
        self._output.append(item)
        return made

    def end(self, status: str) -> list[bytes]:
        """The last events."""
        made = []
        if (self._text is None and not self._output) or (self._text is not None and self._held):
            made += self.add_text("")
        made += self._close_text(status)
        whole = _write_response(self._reply, self._work, status, self._output)
        return [*made, self.event(f"response.{status}", response=whole)]


def _write_response(reply: Reply, work: Work, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
    order = reply.order
    usage = None
    if status != "in_progress":
        prompt = order.num_prompt_tokens
        usage = {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": work.num_cached, "cache_write_tokens": 0},
            "output_tokens": work.num_new,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + work.num_new,
        }
    echoed = order.echoed
    return {
        "id": order.id,
        "object": "response",
        "created_at": order.created,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "model": order.model,
        "output": output,
        "usage": usage,
        "store": False,
        "previous_response_id": None,
        "truncation": "disabled",
        **echoed,
        "parallel_tool_calls": echoed["parallel_tool_calls"] is not False,
        "tools": echoed["tools"] or [],
        "tool_choice": echoed["tool_choice"] or "auto",
        "text": echoed["text"] or {"format": {"type": "text"}},
        "metadata": echoed["metadata"] or {},
    }


def _write_message(reply: Reply, choice: Choice, status: str) -> dict[str, Any]:
    logprobs = [] if choice.logprobs is None else _write_logprobs(reply, choice.logprobs)
    part = _write_part(choice.text, logprobs)
    name = make_id("msg", reply.order.id, 0)
    return {"id": name, "type": "message", "role": "assistant", "status": status, "content": [part]}


def _write_part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _write_logprobs(reply: Reply, logprobs: Any) -> list[dict[str, Any]]:
    written: list[dict[str, Any]] = reply.texts.write_chat(logprobs, reply.order.logprobs or 0)["content"]
    return written


def _write_call(call: Call) -> dict[str, Any]:
    return {
        "id": make_id("fc", call.id),
        "type": "function_call",
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments_text,
        "status": "completed",
    }


def _read_input(given: Any) -> list[dict[str, Any]]:
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    return [_read_item(item, f"input[{place}]") for place, item in enumerate(given)]


def _read_item(item: Any, where: str) -> dict[str, Any]:
    """An item as a message of a chat."""
    if not isinstance(item, dict):
        raise refuse_field(where, f"{where} must be an item, not {excerpt(item)}")
    kind = item.get("type", "message")
    if kind == "message":
        if not isinstance(item.get("role"), str) or item.get("content") is None:
            raise refuse_field(where, f"{where} must have a role, such as user, and a content")
        return {"role": item["role"], "content": join_content(item["content"], where)}
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    if kind == "function_call_output":
        content = join_parts(item.get("output"), where)
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": content}
    raise refuse_field(where, f"{where}: items of type {excerpt(kind)} are not offered; use message and function_call")


def _read_tools(given: Any) -> Any:
    """Functions, which stand flat here, as chats have them."""
    made = []
    for tool in given or []:
        if not isinstance(tool, dict) or tool.get("type") != "function":
            kind = tool.get("type") if isinstance(tool, dict) else tool
            raise refuse_field("tools", f"tools of type {excerpt(kind)} are not offered; use functions")
        made.append(
            {"type": "function", "function": {name: tool[name] for name in tool if name not in ("type", "strict")}}
        )
    return made


def _read_choice(given: Any) -> Any:
    if isinstance(given, dict) and given.get("type") == "function":
        return {"type": "function", "function": {"name": given.get("name")}}
    return given


def _read_reasoning(found: Found) -> None:
    given = found.take("reasoning", {})
    others = [name for name in given if name != "effort" and given[name] is not None]
    if others:
        raise refuse_field("reasoning", f"`reasoning` has an effort alone, not {excerpt(others[0])}; leave it out")
    put_effort(found, "reasoning", given.get("effort"))


def _read_text(found: Found, text: dict[str, Any]) -> None:
    unknown = set(text) - {"format", "verbosity"}
    if unknown or text.get("verbosity") not in (None, "medium"):
        raise refuse_field("text", "`text` has a format alone")
    form = text.get("format")
    if form is None:
        return
    if not isinstance(form, dict):
        raise refuse_field("text", f"`text.format` is an object with a type, not {excerpt(form)}")
    put_format(found, "text", form)

"""`/v1/responses`, without anything stored: items in, items out."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from unspool.errors import excerpt
from unspool.server.calls import Call, CallPart, make_id
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
        output = [_write_thought(reply, choice.thought, 0)] if choice.thought else []
        if choice.text or not choice.calls:
            output.append(_write_message(reply, choice, status, len(output)))
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
                if delta.thought:
                    for event in writer.add_thought(delta.thought):
                        yield event
                if delta.text:
                    for event in writer.add_text(delta.text):
                        yield event
                ended = {call.index: call for call in delta.calls}
                for part in delta.parts:
                    for event in writer.add_part(part, ended.get(part.index)):
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
        self._thought: list[str] | None = None  # of the open reasoning
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

    def add_thought(self, thought: str) -> list[bytes]:
        """What is thought."""
        made = []
        if self._thought is None:
            made += self._close_text("completed")
            self._thought, self._id = [], make_id("rs", self._reply.order.id, len(self._output))
            item = {"id": self._id, "type": "reasoning", "status": "in_progress", "summary": [], "content": []}
            made.append(self.event("response.output_item.added", **self._place, item=item))
            part = {"type": "reasoning_text", "text": ""}
            made.append(self.event("response.content_part.added", **self._part, part=part))
        self._thought.append(thought)
        self._held = []  # their log-probabilities have no place
        made.append(self.event("response.reasoning_text.delta", **self._part, delta=thought))
        return made

    def _close_thought(self) -> list[bytes]:
        if self._thought is None:
            return []
        text, self._thought = "".join(self._thought), None
        item = _write_thought(self._reply, text, len(self._output))
        made = [
            self.event("response.reasoning_text.done", **self._part, text=text),
            self.event("response.content_part.done", **self._part, part=item["content"][0]),
            self.event("response.output_item.done", **self._place, item=item),
        ]
        self._output.append(item)
        return made

    def add_text(self, text: str) -> list[bytes]:
        """Text that is said."""
        made = self._close_thought()
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

    def add_part(self, part: CallPart, call: Call | None) -> list[bytes]:
        """What is added to a call; the whole call once it ends."""
        made = []
        about = {**self._place, "item_id": make_id("fc", part.id)}
        if part.begins:
            made = self._close_thought() + self._close_text("completed")
            about = {**self._place, "item_id": make_id("fc", part.id)}
            opened = {**_write_call(Call(part.index, part.name, "", part.id)), "status": "in_progress"}
            made.append(self.event("response.output_item.added", **self._place, item=opened))
        self._held = []
        if part.text:
            made.append(self.event("response.function_call_arguments.delta", **about, delta=part.text))
        if call is not None and part.ends:
            item = _write_call(call)
            done = {"name": item["name"], "arguments": item["arguments"]}
            made.append(self.event("response.function_call_arguments.done", **about, **done))
            made.append(self.event("response.output_item.done", **self._place, item=item))
            self._output.append(item)
        return made

    def end(self, status: str) -> list[bytes]:
        """The last events."""
        made = self._close_thought()
        if (self._text is None and not any(item["type"] != "reasoning" for item in self._output)) or (
            self._text is not None and self._held
        ):
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
            "output_tokens_details": {"reasoning_tokens": work.num_thinking},
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


def _write_thought(reply: Reply, thought: str, place: int) -> dict[str, Any]:
    part = {"type": "reasoning_text", "text": thought}
    name = make_id("rs", reply.order.id, place)
    return {"id": name, "type": "reasoning", "status": "completed", "summary": [], "content": [part]}


def _write_message(reply: Reply, choice: Choice, status: str, place: int) -> dict[str, Any]:
    logprobs = [] if choice.logprobs is None else _write_logprobs(reply, choice.logprobs)
    part = _write_part(choice.text, logprobs)
    name = make_id("msg", reply.order.id, place)
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
    made: list[dict[str, Any]] = []
    thought = ""
    for place, item in enumerate(given):
        where = f"input[{place}]"
        if isinstance(item, dict) and item.get("type") == "reasoning":
            thought += _read_thought(item, where)
            continue
        message = _read_item(item, where)
        if thought and message["role"] == "assistant":
            message["reasoning_content"], thought = thought, ""
        made.append(message)
    if thought:
        raise refuse_field("input", "reasoning stands before what was said or called after it, and nothing follows")
    return made


def _read_thought(item: dict[str, Any], where: str) -> str:
    """The text of an item of reasoning."""
    parts = item.get("content") or item.get("summary") or []
    if not isinstance(parts, list) or not all(
        isinstance(one, dict) and isinstance(one.get("text"), str) for one in parts
    ):
        raise refuse_field(where, f"{where}: a content of reasoning is a list of {{type: reasoning_text, text}}")
    return "".join(part["text"] for part in parts)


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

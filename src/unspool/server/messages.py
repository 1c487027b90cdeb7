"""`/v1/messages`: Anthropic's form of a conversation."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from unspool.config.parameter import LARGEST_COUNT
from unspool.errors import excerpt
from unspool.numeric import is_whole
from unspool.server.calls import Call, CallPart
from unspool.server.chat import count_prompt, read_chat
from unspool.server.contents import join_content, join_parts
from unspool.server.dialect import Reply
from unspool.server.fields import Found, read_fields
from unspool.server.frames import frame
from unspool.server.names import MESSAGES
from unspool.server.orders import Order, Target, put_effort, put_format
from unspool.server.refusals import RequestError, refuse_field
from unspool.server.work import Choice, Delta, Work

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_KINDS = {413: "request_too_large", 500: "api_error", 503: "overloaded_error", 501: "api_error"}


class MessageDialect:
    """Anthropic's messages."""

    media_type = "text/event-stream"

    def read(self, body: Any, target: Target) -> Order:
        """The order that a body asks for."""
        found = read_fields(body, MESSAGES, ["messages"])
        if "max_new_tokens" not in found.settings:
            raise refuse_field("max_tokens", "the field 'max_tokens' is required", "missing_required_parameter")
        return _read_order(found, target)

    def write(self, reply: Reply, choices: list[Choice], work: Work) -> dict[str, Any]:
        """The body of a whole answer."""
        choice = choices[0]
        content: list[dict[str, Any]] = [_write_thought(choice.thought)] if choice.thought else []
        if choice.text or not choice.calls:
            content.append({"type": "text", "text": choice.text, "citations": None})
        content += [_write_call(call, call.arguments) for call in choice.calls]
        return {
            **_head(reply),
            "content": content,
            "stop_reason": _explain_end(choice),
            "stop_sequence": choice.stop,
            "usage": {"input_tokens": reply.order.num_prompt_tokens, "output_tokens": work.num_new},
        }

    async def events(self, reply: Reply, work: Work) -> AsyncIterator[bytes]:
        """Blocks that open, grow and close."""
        usage = {"input_tokens": reply.order.num_prompt_tokens, "output_tokens": 0}
        start = {**_head(reply), "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        yield _event("message_start", message=start)
        place, open_kind = -1, ""
        async for deltas in work.deltas():
            for delta in deltas:
                kind = "thinking" if delta.thought else "text" if delta.text else open_kind
                if kind != open_kind:
                    if open_kind:
                        yield _event("content_block_stop", index=place)
                    place, open_kind = place + 1, kind
                    block = _write_thought("") if kind == "thinking" else {"type": "text", "text": ""}
                    yield _event("content_block_start", index=place, content_block=block)
                if delta.thought or delta.text:
                    added = {"type": f"{kind}_delta", kind: delta.thought or delta.text}
                    yield _event("content_block_delta", index=place, delta=added)
                for part in delta.parts:
                    if part.begins:
                        if open_kind:
                            yield _event("content_block_stop", index=place)
                        place, open_kind = place + 1, ""
                        yield _event("content_block_start", index=place, content_block=_write_call(part, {}))
                    if part.text:
                        added = {"type": "input_json_delta", "partial_json": part.text}
                        yield _event("content_block_delta", index=place, delta=added)
                    if part.ends:
                        yield _event("content_block_stop", index=place)
                if delta.reason is not None:
                    if open_kind:
                        yield _event("content_block_stop", index=place)
                    end = {"stop_reason": _explain_end(delta), "stop_sequence": delta.stop}
                    yield _event("message_delta", delta=end, usage={"output_tokens": work.num_new})
                    yield _event("message_stop")

    def write_error(self, error: RequestError) -> dict[str, Any]:
        """The body of an error."""
        return {"type": "error", "error": {"type": _KINDS.get(error.status, error.kind), "message": str(error)}}

    def write_late_error(self, error: RequestError, _: int) -> bytes:
        """An error after a stream's beginning."""
        return frame(self.write_error(error), "error")


def _event(kind: str, **values: Any) -> bytes:
    return frame({"type": kind, **values}, kind)


def _head(reply: Reply) -> dict[str, Any]:
    return {"id": reply.order.id, "type": "message", "role": "assistant", "model": reply.order.model}


def _explain_end(ended: Choice | Delta) -> str:
    return "stop_sequence" if ended.stop is not None else _REASONS[ended.finish_reason or "stop"]


def _write_thought(thought: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": thought, "signature": ""}


def _write_call(call: Call | CallPart, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id.replace("call_", "toolu_"), "name": call.name, "input": arguments}


def count_tokens(body: Any, target: Target) -> int:
    """Tokens of the prompt that a body asks for."""
    found = read_fields(body, MESSAGES, ["messages"])
    _translate(found)
    return count_prompt(found, target)


def _translate(found: Found) -> None:
    """Fields of this form as those of a chat."""
    messages: list[dict[str, Any]] = []
    system = found.take("system")
    if system is not None:
        messages.append({"role": "system", "content": join_parts(system, "system")})
    for place, message in enumerate(found.take("messages")):
        messages += _read_message(message, f"messages[{place}]")
    found.put("messages", messages)
    found.put("tools", [_read_tool(tool) for tool in found.take("tools", [])])
    _read_choice(found)
    _read_output(found)
    _read_thinking(found)
    if messages[-1].get("role") == "assistant" and not messages[-1].get("tool_calls"):
        found.put("continue_final_message", True)  # the answer's beginning


def _read_order(found: Found, target: Target) -> Order:
    _translate(found)
    return read_chat(found, target, "msg_")


def _read_message(message: Any, where: str) -> list[dict[str, Any]]:
    """A message, and the results of tools in it, as a chat's messages."""
    if not isinstance(message, dict):
        raise refuse_field(where, f"{where} must be a message, not {excerpt(message)}")
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise refuse_field(where, f"{where}: a role is user, assistant or system, not {excerpt(role)}")
    if content is None:
        raise refuse_field(where, f"{where} has no content")
    if not isinstance(content, list):
        return [{"role": role, "content": join_parts(content, where)}]
    texts: list[Any] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "thinking" and role == "assistant":
            thoughts.append(str(part.get("thinking") or ""))
        elif kind == "tool_use":
            function = {"name": part.get("name"), "arguments": part.get("input") or {}}
            calls.append({"id": part.get("id"), "type": "function", "function": function})
        elif kind == "tool_result":
            result = join_parts(part.get("content"), where)
            results.append({"role": "tool", "tool_call_id": part.get("tool_use_id"), "content": result})
        else:
            texts.append(part)
    made = list(results)
    if texts or calls or not results:
        said: dict[str, Any] = {"role": role, "content": join_content(texts, where)}
        said |= {"reasoning_content": "".join(thoughts)} if any(thoughts) else {}
        made.append(said | ({"tool_calls": calls} if calls else {}))
    return made


def _read_tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type", "custom") != "custom":
        raise refuse_field("tools", f"a tool is {{name, description, input_schema}}, not {excerpt(tool)}")
    function = {name: tool[name] for name in ("name", "description") if name in tool}
    return {"type": "function", "function": {**function, "parameters": tool.get("input_schema")}}


def _read_thinking(found: Found) -> None:
    """How long the model thinks, and whether the answer shows it."""
    given = found.take("thinking")
    if given is None:
        return
    kind, budget, shown = given.get("type"), given.get("budget_tokens"), given.get("display")
    unknown = set(given) - {"type", "budget_tokens", "display"}
    if kind not in ("enabled", "adaptive", "disabled") or unknown or shown not in (None, "summarized", "omitted"):
        raise refuse_field(
            "thinking", "`thinking` is {type: enabled, budget_tokens: …}, {type: adaptive} or {type: disabled}"
        )
    if (kind == "enabled") != (budget is not None):
        raise refuse_field("thinking", "`thinking.budget_tokens` goes with the type enabled, and that needs it")
    if budget is not None:
        if not is_whole(budget) or not 0 <= budget <= LARGEST_COUNT:
            raise refuse_field("thinking", f"`thinking.budget_tokens` is a number of tokens, not {excerpt(budget)}")
        found.settings["max_thinking_tokens"] = budget
        found.names["max_thinking_tokens"] = "thinking"
    if kind == "disabled":
        put_effort(found, "thinking", "none")
    if shown == "omitted":
        found.put("include_reasoning", False)


def _read_output(found: Found) -> None:
    config = found.take("output_config", {})
    form = config.get("format")
    if config.keys() - {"format", "effort"} or config.get("effort") is not None:
        raise refuse_field("output_config", "`output_config` has a format alone")
    if form is None:
        return
    if not isinstance(form, dict):
        raise refuse_field("output_config", f"`output_config.format` is an object with a type, not {excerpt(form)}")
    put_format(found, "output_config", form)


def _read_choice(found: Found) -> None:
    choice = found.take("tool_choice")
    if choice is None:
        return
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if kind == "tool":
        found.put("tool_choice", {"type": "function", "function": {"name": choice.get("name")}})
    elif isinstance(kind, str) and kind in _CHOICES:
        found.put("tool_choice", _CHOICES[kind])
    else:
        raise refuse_field("tool_choice", f"`tool_choice` has the types auto, any, tool and none, not {excerpt(kind)}")
    if isinstance(choice, dict) and choice.get("disable_parallel_tool_use"):
        found.values["parallel_tool_calls"] = False

"""Tools for chat templates that know of none: described in a message, and called in a form that stands for itself."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from unspool.errors import UnspoolError
from unspool.grammar.call_forms import CallFormat, ToolForm
from unspool.grammar.tools import find_format

GENERIC: Final = CallFormat('<tool_call>{"name": "', '", "arguments": ', "}</tool_call>")
_DESCRIPTION: Final = (
    "You can call tools. These are the tools, each with a JSON schema of its arguments:\n{tools}\n"
    'To call one, answer with <tool_call>{{"name": "the tool\'s name", "arguments": {{…}}}}</tool_call>. What it '
    "returns comes back between <tool_response> and </tool_response>."
)


def choose_format(tokenizer: Any, tools: Sequence[Mapping[str, Any]]) -> tuple[ToolForm, bool]:
    """The format of tool calls, and whether it is the generic one, as the chat template has none that can be found."""
    try:
        return find_format(tokenizer, tools), False
    except UnspoolError:
        return GENERIC, True


def is_silent(tokenizer: Any) -> bool:
    """Whether a chat template says nothing of tools."""
    template = getattr(tokenizer, "chat_template", None)
    return bool(template) and "tools" not in str(template)


def write_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
) -> list[dict[str, Any]]:
    """Messages in which tools are described, and calls and results are texts."""
    made = [dict(message) for message in _merge_results(messages)]
    if tools:
        listed = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
        described = _DESCRIPTION.format(tools=listed)
        if made and made[0].get("role") == "system":
            made[0]["content"] = f"{made[0].get('content') or ''}\n\n{described}".lstrip()
        else:
            made.insert(0, {"role": "system", "content": described})
    return made


def is_described(message: Mapping[str, Any]) -> bool:
    """Whether a message is the system's, with tools described in it."""
    return message.get("role") == "system" and _DESCRIPTION.partition("\n")[0] in str(message.get("content"))


def move_system(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages for a template that has no system message: what it says begins the first user's."""
    made = [dict(message) for message in messages]
    if len(made) > 1 and made[0].get("role") == "system" and made[1].get("role") == "user":
        system = made.pop(0)
        made[0]["content"] = f"{system['content']}\n\n{made[0].get('content') or ''}"
    return made


def _merge_results(messages: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Calls as the texts that make them, and results, those in a row together, as a user's message."""
    results: list[str] = []
    for message in messages:
        if message.get("role") == "tool":
            results.append(f"<tool_response>{message.get('content') or ''}</tool_response>")
            continue
        if results and message.get("role") == "user":  # templates want users and assistants to take turns
            message = {**message, "content": "\n".join([*results, str(message.get("content") or "")])}
            results = []
        if results:
            yield {"role": "user", "content": "\n".join(results)}
            results = []
        calls = message.get("tool_calls")
        if calls:
            texts = [_write_call(call["function"]) for call in calls]
            said = [message["content"]] if message.get("content") else []
            message = {name: value for name, value in message.items() if name != "tool_calls"}
            message["content"] = "\n".join([*said, *texts])
        yield message
    if results:
        yield {"role": "user", "content": "\n".join(results)}


def _write_call(function: Mapping[str, Any]) -> str:
    arguments = function.get("arguments")
    written = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
    return f"{GENERIC.begin}{function['name']}{GENERIC.middle}{written}{GENERIC.end}"

"""Hostile messages, tools and variables for a sound template."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz.mutate import hostile_value, mutate_json
from unspool.text.chat import render_chat

NAME = "chat_messages"
SHARE = 2.0
SHORT = 40

_TEMPLATE = (
    "{%- if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}{{ mode }}{{ documents }}"
    "{%- for m in messages %}{{ m.role }}{% if m.content is string %}{{ m.content | trim }}{% else %}{{ m.content }}"
    "{% endif %}{% for call in m.tool_calls or [] %}{{ call | tojson(indent=2) }}{% endfor %}{{ m | dictsort }}"
    "{% endfor %}"
)
_MESSAGES: list[Any] = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": [{"type": "text", "text": "Why?"}]},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"a": [1, 2.5]}}}]},
]
_TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
]


_TEXTS = ("", "Hi <there> & co\n", "é" * 2000, "\x00", "<|im_end|>{{ 1 }}", "\u202e", "日本", "</think>" * 40)
_VALUES = (None, True, 0, -1, 2**100, 2.5, 1e300, "x", [], {}, [1, [2, [3]]], {"a": {"b": "c"}})


def make(rng: Random) -> dict[str, Any]:
    """A usual conversation with texts and values exchanged; sometimes with something hostile in it."""
    messages = [_make_message(rng) for _ in range(rng.choice((1, 2, 5, 40)))]
    given: dict[str, Any] = {"messages": mutate_json(rng, messages, 1) if rng.random() < 0.4 else messages}
    if rng.random() < 0.05:
        given["messages"] = hostile_value(rng)
    if rng.random() < 0.3:
        given["tools"] = mutate_json(rng, _TOOLS, 1) if rng.random() < 0.5 else _TOOLS * rng.choice((1, 9))
    if rng.random() < 0.3:
        given["mode"] = hostile_value(rng) if rng.random() < 0.3 else rng.choice(_VALUES)
    if rng.random() < 0.2:
        given["documents"] = hostile_value(rng) if rng.random() < 0.3 else [{"title": rng.choice(_TEXTS)}]
    return given


def _make_message(rng: Random) -> dict[str, Any]:
    message = {**rng.choice(_MESSAGES)}
    if isinstance(message["content"], str):
        message["content"] = rng.choice(_TEXTS)
    if "tool_calls" in message:
        arguments = {rng.choice(("a", "é", "")): rng.choice(_VALUES) for _ in range(3)}
        message["tool_calls"] = [{"function": {"name": "f", "arguments": arguments}}]
    if rng.random() < 0.2:
        message[rng.choice(("name", "reasoning_content", "x"))] = rng.choice(_VALUES)
    return message


def run(given: dict[str, Any], folder: Path) -> None:
    render_chat(_TEMPLATE, add_generation_prompt=False, special_tokens={}, **given)

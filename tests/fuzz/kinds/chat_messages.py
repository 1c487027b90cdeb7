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


def make(rng: Random) -> dict[str, Any]:
    given: dict[str, Any] = {"messages": mutate_json(rng, _MESSAGES, rng.choice((1, 2, 3)))}
    if rng.random() < 0.1:
        given["messages"] = hostile_value(rng)
    if rng.random() < 0.3:
        given["tools"] = mutate_json(rng, _TOOLS, 1)
    if rng.random() < 0.3:
        given["mode"] = hostile_value(rng)
    if rng.random() < 0.2:
        given["documents"] = hostile_value(rng)
    return given


def run(given: dict[str, Any], folder: Path) -> None:
    render_chat(_TEMPLATE, add_generation_prompt=False, special_tokens={}, **given)

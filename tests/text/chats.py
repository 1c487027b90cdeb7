"""A small chat, and how tests render one."""

from __future__ import annotations

from typing import Any

from unspool.text.chat import render_chat

USER = [{"role": "user", "content": "Hi"}]


def render(template: str, messages: Any = USER, **kwargs: Any) -> str:
    kwargs.setdefault("add_generation_prompt", False)
    kwargs.setdefault("special_tokens", {})
    return render_chat(template, messages, **kwargs)

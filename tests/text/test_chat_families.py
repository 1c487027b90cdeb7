"""Chat templates in the manner of the families in use, beside transformers' rendering of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tests.text.test_chat import TOOLS, render

CALL = {"type": "function", "id": "call12345", "function": {"name": "f", "arguments": {"a": [1, 2.5], "é": None}}}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one turn": [{"role": "user", "content": "  Hi & <you>\n"}],
    "system": [
        {"role": "system", "content": "Be <brief>. "},
        {"role": "user", "content": "What's 1+1? 日本"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\n2 "},
        {"role": "user", "content": "Sure?\n"},
    ],
    "tools": [
        {"role": "user", "content": "Look it up"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": '{"x": 1}', "tool_call_id": "call12345", "name": "f"},
        {"role": "tool", "content": "2", "tool_call_id": "call12345", "name": "f"},
        {"role": "assistant", "content": "It is 1."},
        {"role": "user", "content": "Thanks"},
    ],
}

# In the manner of what the families in use ship.
FAMILIES = {
    path.stem.replace("_", " "): path.read_text(encoding="utf-8")
    for path in sorted((Path(__file__).parent / "data" / "chat_templates").glob("*.jinja"))
}


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("family", FAMILIES)
def test_families_render_as_transformers(family: str, chat: str) -> None:
    _compare(FAMILIES[family], CHATS[chat])


@pytest.mark.parametrize("chat", ["one turn", "system"])
def test_the_template_that_transformers_brings(chat: str) -> None:
    from transformers.models.llama4 import processing_llama4

    _compare(processing_llama4.chat_template, CHATS[chat])


def _compare(template: str, messages: list[dict[str, Any]]) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    for has_prompt in (True, False):
        for tools in (None, TOOLS) if re.search(r"(?<!')\btools\b(?!')", template) else (None,):
            options: dict[str, Any] = {"tools": tools, "add_generation_prompt": has_prompt}
            for name, value in (("enable_thinking", False), ("documents", [{"title": "T", "text": "D"}])):
                options |= {name: value} if name in template and has_prompt else {}
            (expected,), _ = render_jinja_template([messages], chat_template=template, **options, **tokens)
            assert render(template, messages, special_tokens=tokens, **options) == expected
            assert len(expected) > 10


def test_large_numbers_and_namespaces_in_tools() -> None:
    call = {"function": {"name": "f", "arguments": {"n": 2**100, "x": 1e300, "deep": [[[{}]]], "t": True}}}
    _compare(FAMILIES["qwen 3"], [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": [call]}])
    _compare(
        "{{ messages[0].n }}{{ messages[0].n | string + '!' }}{{ messages[0] }}-----",
        [{"role": "user", "content": "", "n": 2**100}],
    )

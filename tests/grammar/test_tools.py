"""Tool calls in the templates' own formats: asked for, kept to, read back."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from tests.grammar.tiny import load_tiny
from tests.text.test_chat_families import FAMILIES
from unspool.errors import InputError, SettingError, UnsupportedError
from unspool.grammar.call_forms import CallFormat
from unspool.grammar.tools import find_format
from unspool.outputs import ToolCall

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "adds",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}, "b": {"type": "boolean"}},
                "required": ["a", "b"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "additionalProperties": False}}},
]
HERMES = """{%- if tools %}{{ tools | length }}{% endif %}{%- for message in messages %}<|{{ message.role }}|>
{%- if message.tool_calls %}{% for call in message.tool_calls %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}{% else %}
{{ message.content }}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% endif %}"""
QUESTION = [{"role": "user", "content": "a"}]


def load_chatty(template: str = HERMES) -> Any:
    lm = copy.copy(load_tiny("llama"))
    lm.tokenizer = copy.copy(lm.tokenizer)
    lm.tokenizer.chat_template = template
    return lm


def test_the_format_is_found_by_rendering_a_call() -> None:
    form = find_format(load_chatty().tokenizer, TOOLS)
    assert form == CallFormat('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>")
    text = 'Well.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": true}}\n</tool_call> <tool_call>\n{"name": "'
    assert form.read_calls(text) == [ToolCall("add", {"a": 1, "b": True})]


def test_families_with_calls_have_a_format() -> None:
    found = []
    for name, template in FAMILIES.items():
        try:
            form = find_format(load_chatty(template).tokenizer, TOOLS)
        except UnsupportedError:
            continue
        call = f"{form.begin}add{form.middle}{json.dumps({'a': 1})}{form.end}"
        assert form.read_calls(call) == [ToolCall("add", {"a": 1})], name
        found.append(name)
    assert len(found) >= 2, found


@pytest.mark.parametrize("choice", ["required", "add", {"type": "function", "function": {"name": "now"}}])
@pytest.mark.parametrize("strategy", [{}, {"num_beams": 2}, {"do_sample": True, "seed": 4}])
def test_a_call_that_is_asked_for_is_made(choice: Any, strategy: dict[str, Any]) -> None:
    lm = load_chatty()
    answer = lm.generate(QUESTION, tools=TOOLS, tool_choice=choice, max_new_tokens=95, eos_token_id=2, **strategy)
    assert answer.finish_reasons == ["eos"]
    (call,) = answer.tool_calls
    assert call.name in {"required": ("add", "now"), "add": ("add",)}.get(str(choice), ("now",))
    assert set(call.arguments) == ({"a", "b"} if call.name == "add" else set())


def test_a_call_in_free_text_keeps_its_format() -> None:
    lm = load_chatty()
    answer = lm.generate(QUESTION, tools=TOOLS, tool_choice="auto", max_new_tokens=30, eos_token_id=2)
    assert answer.calls is not None
    plain = lm.generate(QUESTION, tools=TOOLS, tool_choice="none", max_new_tokens=30, eos_token_id=2)
    assert plain.readers is None


def test_what_can_not_be_is_refused() -> None:
    lm = load_chatty()
    with pytest.raises(SettingError, match="tool_choice"):
        lm.generate(QUESTION, tools=TOOLS, tool_choice="sub")
    with pytest.raises(SettingError, match="there are none"):
        lm.generate(QUESTION, tool_choice="auto")
    with pytest.raises(SettingError, match="give one of them"):
        lm.generate(QUESTION, tools=TOOLS, tool_choice="required", regex="a", eos_token_id=2)
    with pytest.raises(InputError, match="a tool is"):
        lm.generate(QUESTION, tools=[{"function": {"name": "a b"}}], tool_choice="required")
    plain = "{% for message in messages %}{{ message.content }}{% endfor %}{{ tools }}"
    with pytest.raises(UnsupportedError, match="tool calls"):
        load_chatty(plain).generate(QUESTION, tools=TOOLS, tool_choice="required")


def test_a_template_that_says_nothing_of_tools_has_the_generic_form() -> None:
    lm = load_chatty("{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}")
    answer = lm.generate(QUESTION, tools=TOOLS, tool_choice="required", max_new_tokens=200, eos_token_id=2)
    assert answer.text.startswith('<tool_call>{"name": "') and len(answer.tool_calls) == 1
    assert lm.tokenizer is not None
    prompt = lm.tokenizer.decode(answer.prompt_token_ids[0])
    assert all(tool["function"]["name"] in prompt for tool in TOOLS) and "<tool_call>" in prompt


def test_arguments_that_nest_without_end_are_no_call() -> None:
    form = CallFormat("<call>", '", "arguments": ', "}</call>")
    text = '<call>add", "arguments": ' + '{"a": ' * 200_000
    assert form.read_calls(text) == []

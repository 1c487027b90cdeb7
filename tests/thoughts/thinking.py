"""Tiny models whose chat templates write thoughts of every kind."""

from __future__ import annotations

import copy
from typing import Any

from tests.grammar.tiny import load_tiny
from unspool.thoughts.entry import ThoughtEntry
from unspool.thoughts.kinds import THOUGHTS

QUESTION = [{"role": "user", "content": "hello"}]
KINDS = ("think", "harmony", "gemma", "mistral", "command", "granite", "response", "seed", "thought")  # in ASCII


def make_template(kind: ThoughtEntry, *, opens: bool = False) -> str:
    """A template of a kind; with `opens` it begins the thought itself, as DeepSeek's does."""
    begun = f"{kind.begin}\n" if opens else ""
    marks = " ".join((kind.begin, kind.end, *kind.found_by))
    return (
        f"{{# {marks} #}}{{% for message in messages %}}{{{{ message.role }}}}: "
        f"{{% if message.reasoning_content %}}({{{{ message.reasoning_content }}}}) {{% endif %}}"
        "{{ message.content }}</s>\n{% endfor %}{% if add_generation_prompt %}assistant: "
        f"{begun}{{% endif %}}"
    )


def load_thinking(name: str = "think", *, opens: bool = False) -> Any:
    """A tiny model with the tokenizer of the tests and a template of a kind."""
    lm = copy.copy(load_tiny("llama"))
    lm.tokenizer = copy.copy(lm.tokenizer)
    lm.tokenizer.chat_template = make_template(THOUGHTS[name], opens=opens)
    return lm

"""The kinds of thoughts, and which of them a tokenizer's chat template writes."""

from __future__ import annotations

from typing import Any, Final

from unspool.registry import Table
from unspool.registry.tables import count_changes
from unspool.thoughts.entry import ThoughtEntry, check_entry

_BUILT_IN: tuple[ThoughtEntry, ...] = (
    # gpt-oss: messages in channels, one of which is for thoughts.
    ThoughtEntry(
        name="harmony",
        begin="<|channel|>analysis<|message|>",
        end="<|end|>",
        found_by=("<|channel|>",),
        header="<|start|>assistant<|channel|>final<|message|>",
        direct="<|channel|>final<|message|>",
        drops=(
            "<|start|>assistant",
            "<|channel|>final<|message|>",
            "<|channel|>commentary<|message|>",
            "<|end|>",
            "<|return|>",
        ),
        repeats=True,
    ),
    # Gemma 4.
    ThoughtEntry(name="gemma", begin="<|channel>thought", end="<channel|>", before_end="\n"),
    # Magistral and later models of Mistral's.
    ThoughtEntry(name="mistral", begin="[THINK]", end="[/THINK]"),
    # Command A and R7B of Cohere's.
    ThoughtEntry(
        name="command",
        begin="<|START_THINKING|>",
        end="<|END_THINKING|>",
        header="<|START_RESPONSE|>",
        direct="<|START_RESPONSE|>",
        drops=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ),
    # Granite 3.2, and 3.3 with marks around both.
    ThoughtEntry(
        name="granite",
        begin="Here is my thought process:",
        end="Here is my response:",
        before_end="\n\n",
        header="\n\n",
    ),
    ThoughtEntry(
        name="response",
        begin="<think>",
        end="</think>",
        found_by=("<response>",),
        header="\n<response>",
        drops=("<response>", "</response>"),
    ),
    # Seed-OSS.
    ThoughtEntry(name="seed", begin="<seed:think>", end="</seed:think>", header="\n"),
    # Kimi-VL.
    ThoughtEntry(name="kimi", begin="◁think▷", end="◁/think▷", before_end="\n"),
    # EXAONE Deep.
    ThoughtEntry(name="thought", begin="<thought>", end="</thought>", before_end="\n", header="\n\n"),
    # DeepSeek, Qwen, GLM, Nemotron, MiniMax, SmolLM3 and most others.
    ThoughtEntry(name="think", begin="<think>", end="</think>", before_end="\n", header="\n\n"),
)

THOUGHTS: Final = Table[ThoughtEntry]("kind of thoughts", _BUILT_IN, lambda entry: entry.name, check_entry)
"""Every kind of thoughts by its name, in the order in which templates are searched for them: plug-ins' first."""


def find_kind(tokenizer: Any) -> ThoughtEntry | None:
    """The kind of thoughts that a tokenizer's chat template writes, if it writes any."""
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        template = "\n".join(str(one) for one in template.values())
    return _search(str(template), count_changes()) if template else None


def _search(template: str, changes: int) -> ThoughtEntry | None:
    key = (template, changes)
    if key not in _FOUND:
        entries = list(THOUGHTS.values())
        own = len(THOUGHTS.built_in)
        found = next((entry for entry in (*entries[own:], *entries[:own]) if entry.is_in(template)), None)
        while len(_FOUND) >= _MOST_FOUND:
            _FOUND.pop(next(iter(_FOUND)), None)
        _FOUND[key] = found
    return _FOUND[key]


_MOST_FOUND: Final = 64
_FOUND: Final[dict[tuple[str, int], ThoughtEntry | None]] = {}

"""Texts in parts: what is thought and what is said, however they are cut."""

from __future__ import annotations

import random

import pytest

from tests.text.test_chat_families import FAMILIES
from unspool.thoughts.kinds import THOUGHTS, find_kind
from unspool.thoughts.parts import PartText, Phase

CASES: list[tuple[str, Phase, str, str, str]] = [
    ("think", "free", "<think>\nLet me see.\n</think>\n\nFour.", "Let me see.", "Four."),
    ("think", "open", "Let me see.\n</think>\n\nFour.", "Let me see.", "Four."),
    ("think", "free", "Four <think>five</think>.", "", "Four <think>five</think>."),
    ("think", "free", "\n<think></think> x </think>", "", "x </think>"),
    ("think", "closed", "\n <think>", "", "\n <think>"),
    ("think", "free", "<think> cut of</thi", "cut of</thi", ""),
    ("think", "free", "  <thin", "", "  <thin"),
    ("mistral", "free", "[THINK]a [b] /THINK][/THINK]c", "a [b] /THINK]", "c"),
    ("gemma", "free", "<|channel>thought\nHm.\n<channel|>Yes.", "Hm.", "Yes."),
    ("kimi", "free", "◁think▷Hm.◁/think▷Yes.", "Hm.", "Yes."),
    ("granite", "free", "Here is my thought process:\nHm.\n\nHere is my response:\n\nYes.", "Hm.", "Yes."),
    ("response", "free", "<think>Hm.</think>\n<response>Yes.</response>", "Hm.", "Yes."),
    ("command", "free", "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Yes.<|END_RESPONSE|>", "Hm.", "Yes."),
    ("command", "free", "<|START_RESPONSE|>Yes.<|END_RESPONSE|>", "", "Yes."),
    (
        "harmony",
        "free",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>analysis<|message|>So.<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
        "Hm.\nSo.",
        "I look.\nYes.",
    ),
    ("harmony", "free", "<|channel|>final<|message|>Yes.<|return|>", "", "Yes."),
]


def split(name: str, phase: Phase, pieces: list[str]) -> tuple[str, str]:
    reader = PartText(THOUGHTS[name], phase)
    parts = [part for piece in pieces for part in reader.put(piece)] + reader.end()
    return tuple("".join(text for kind, text in parts if kind == one) for one in ("thought", "text"))  # type: ignore[return-value]


@pytest.mark.parametrize(("name", "phase", "text", "thought", "said"), CASES)
def test_a_text_has_its_parts(name: str, phase: Phase, text: str, thought: str, said: str) -> None:
    assert split(name, phase, [text]) == (thought, said)
    assert split(name, phase, list(text)) == (thought, said)


def test_how_a_text_was_cut_makes_no_difference() -> None:
    draw = random.Random(1)
    for name, kind in THOUGHTS.items():
        words = [*kind.marks, kind.header, " ", "\n", "word", "<", kind.begin[:-2], kind.end[:-1], kind.end[1:]]
        for _ in range(150):
            text = "".join(draw.choices(words, k=draw.randint(1, 9)))
            phase: Phase = draw.choice(["free", "open", "closed"])
            whole = split(name, phase, [text])
            for _ in range(4):
                places = sorted(draw.sample(range(len(text) + 1), k=min(len(text), draw.randint(0, 5))))
                cut = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
                assert split(name, phase, cut) == whole, (name, phase, cut)


def test_kinds_are_found_in_templates() -> None:
    wanted = {"qwen 3": "think", "deepseek r1": "think", "gpt-oss": "harmony", "llama 3.1": None, "gemma 3": None}

    class Holder:
        chat_template = ""

    for name, found in wanted.items():
        holder = Holder()
        holder.chat_template = FAMILIES[name]
        kind = find_kind(holder)
        assert (kind and kind.name) == found, name

"""Token healing: finding the tokens that a prompt's last token may have been the beginning of.

A tokenizer cuts the prompt where it ends, which the text it learned from did not: after "http:" the model hardly
ever saw "//", because "://" is one token. So the last token is chosen again, among those that begin with its text.
Origin: guidance (Lundberg et al. 2023), "The art of prompt design: prompt boundaries and token healing".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Tail:
    """A prompt whose last token is to be chosen again."""

    kept: tuple[int, ...]  # the prompt before it
    token: int
    choices: tuple[int, ...]  # the tokens that begin with its text, itself included


def find_tail(tokenizer: Any, ids: Sequence[int], vocab_size: int) -> Tail | None:
    """The last token that says something, with what it may grow into; None if there is nothing to heal.

    White space at the end is left out, as in the reference: the next token brings its own.
    """
    special = set(tokenizer.all_special_ids)
    rows = list(ids)
    while rows and rows[-1] not in special and not tokenizer.decode(rows[-1:]).strip():
        rows.pop()
    if not rows or rows[-1] in special:
        return None
    *kept, token = rows
    spelled = tokenizer.convert_ids_to_tokens(token)
    if not spelled:
        return None
    choices = tuple(
        sorted(
            other
            for text, other in tokenizer.get_vocab().items()
            if text.startswith(spelled) and other < vocab_size and other not in special
        )
    )
    if not kept and tokenizer.bos_token_id is not None:
        kept = [tokenizer.bos_token_id]
    return Tail(tuple(kept), token, choices) if kept and len(choices) > 1 else None


def find_added_text(tokenizer: Any, tail: Tail, healed: int) -> str:
    """The text by which the token that was chosen is longer than the one that stood there."""
    before, after = (tokenizer.decode([*tail.kept, token]) for token in (tail.token, healed))
    same = 0
    while same < min(len(before), len(after)) and before[same] == after[same]:
        same += 1
    return str(after[same:])

"""The languages of a translation, as options of a command."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from unspool.cli.parser import UsageError

if TYPE_CHECKING:
    from unspool.api import LanguageModel


def add_language_options(group: argparse._ArgumentGroup) -> None:
    """The source's and the target's language."""
    for side, help_text in (("source", "Language of the prompt"), ("target", "Language to write")):
        group.add_argument(
            f"--{side}-lang",
            f"--{side}_lang",
            metavar="CODE",
            help=f"{help_text}, of a translation model: a code that its tokenizer has.",
        )


def check_languages(arguments: argparse.Namespace) -> None:
    """Raise for languages in a chat, whose template has no place for them."""
    if arguments.chat and (arguments.source_lang is not None or arguments.target_lang is not None):
        raise UsageError("--source-lang and --target-lang are for translation models, which have no chat: drop --chat")


def mark_prompts(
    lm: LanguageModel, texts: list[str], arguments: argparse.Namespace, settings: dict[str, Any]
) -> list[str]:
    """The texts with a mark of their target, where the model reads one; the settings get what it is forced to write."""
    if arguments.source_lang is None and arguments.target_lang is None:
        return texts
    from unspool.text.languages import mark_languages

    marks = mark_languages(lm.tokenizer, arguments.source_lang, arguments.target_lang)
    if marks.forced_bos_token_id is not None:
        if settings.get("forced_bos_token_id") is not None:
            raise UsageError("--target-lang and --forced-bos-token-id both say what a text begins with; give one")
        settings["forced_bos_token_id"] = marks.forced_bos_token_id
    return [marks.prefix + text for text in texts]

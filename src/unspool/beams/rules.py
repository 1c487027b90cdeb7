"""What a beam search's settings must fulfil before it begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unspool.config import GenerationConfig
from unspool.constraints import make_constraints
from unspool.errors import SettingError

_BEAMS_ONLY = ("force_words_ids", "return_beam_trace")
_NOT_WITH_BEAMS = (
    ("logprobs", "a beam's tokens are chosen together"),
    ("mirostat_tau", "its state follows one sequence, and beams branch"),
)


def check_beams(settings: GenerationConfig, asked: frozenset[str], vocab_size: int) -> None:
    """Raise for settings that no beam search can follow; `asked` are those that the caller set."""
    num_beams = settings.num_beams or 1
    if num_beams == 1:
        for name in _BEAMS_ONLY:
            if getattr(settings, name) and name in asked:
                raise SettingError(
                    f"`{name}` is read by beam search, and num_beams is 1; set num_beams, or leave it out"
                )
        return
    for name, why in _NOT_WITH_BEAMS:
        if getattr(settings, name) is not None:
            raise SettingError(f"`{name}` does not go with num_beams={num_beams}: {why}; leave one of them out")
    groups = settings.num_beam_groups or 1
    if num_beams % groups:
        raise SettingError(
            f"`num_beams` ({num_beams}) must be divisible by `num_beam_groups` ({groups}): groups are of one size"
        )
    if (settings.diversity_penalty or 0.0) > 0.0 and groups == 1:
        raise SettingError(
            f"`diversity_penalty`={settings.diversity_penalty} is between groups of beams, and there is one group; "
            "set num_beam_groups too"
        )
    if settings.force_words_ids is not None:
        make_constraints(settings.force_words_ids)
        _check_words(settings, vocab_size)


def check_room_for_words(settings: GenerationConfig, max_new_tokens: int) -> None:
    """Raise where what must be written is longer than what may be."""
    if (settings.num_beams or 1) == 1 or settings.force_words_ids is None:
        return
    needed = sum(min(map(len, _alternatives(word))) for word in settings.force_words_ids)
    if needed > max_new_tokens:
        raise SettingError(
            f"`force_words_ids` asks for at least {needed} tokens, and this call writes at most {max_new_tokens}; "
            "raise max_new_tokens, or force less"
        )


def _check_words(settings: GenerationConfig, vocab_size: int) -> None:
    banned = [list(word) for word in settings.bad_words_ids or ()]
    banned += [[token] for token in settings.suppress_tokens or ()]
    for word in settings.force_words_ids:
        phrases = _alternatives(word)
        for token in (token for phrase in phrases for token in phrase):
            if token >= vocab_size:
                raise SettingError(
                    f"`force_words_ids` holds the id {token}, outside the model's vocabulary of {vocab_size} tokens"
                )
        if all(any(_holds(phrase, ban) for ban in banned) for phrase in phrases):
            raise SettingError(
                f"`force_words_ids` asks for {word}, which `bad_words_ids` or `suppress_tokens` forbids; "
                "take it out of one of them"
            )


def _alternatives(word: Any) -> list[list[int]]:
    return word if isinstance(word[0], list) else [word]


def _holds(phrase: Sequence[int], part: Sequence[int]) -> bool:
    size = len(part)
    return any(list(phrase[start : start + size]) == list(part) for start in range(len(phrase) - size + 1))

"""What a constrained search must write, and whether it can be written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from unspool.config import GenerationConfig
from unspool.config.parameters import is_on
from unspool.constraints import Constraint, DisjunctiveConstraint, make_constraints
from unspool.constraints.distance import count_fewest_steps, describe_constraint, holds, list_phrases
from unspool.errors import SettingError
from unspool.wording import Setting, word

_CONTRACT = ("advance", "does_advance", "update", "reset", "remaining", "copy")


def read_constraints(settings: GenerationConfig) -> list[Constraint]:
    """All that must be written, of `constraints` and of `force_words_ids`; empty if nothing is."""
    given = settings.constraints
    constraints = list(given or ())
    if given is not None and not constraints:
        raise SettingError("`constraints` is empty; name at least one Constraint, or leave it out")
    for one in constraints:
        lacking = [name for name in _CONTRACT if not callable(getattr(one, name, None))]
        if lacking:
            raise SettingError(
                f"`constraints` must hold Constraint objects, but holds {one!r:.200}, which has no {lacking[0]}(); "
                "use PhrasalConstraint, DisjunctiveConstraint or a Constraint of your own"
            )
    if settings.force_words_ids is not None:
        constraints += make_constraints(settings.force_words_ids)
    return constraints


def prepare_constraints(settings: GenerationConfig, *, vocab_size: int, end_ids: Sequence[int]) -> list[Constraint]:
    """The constraints as a search follows them: alternatives that can't be written are not tried."""
    limits = _Limits.read(settings, vocab_size, end_ids)
    return [limits.trim(constraint) for constraint in read_constraints(settings)]


def count_free_places(settings: GenerationConfig, max_new_tokens: int) -> int:
    """How many of the new tokens are not forced by a setting, to what is no part of a constraint."""
    return max_new_tokens - sum(is_on(settings, name) for name in ("forced_bos_token_id", "forced_eos_token_id"))


def check_constraints(
    settings: GenerationConfig, *, vocab_size: int, end_ids: Sequence[int], max_new_tokens: int
) -> None:
    """Raise if it is certain that what must be written can't be."""
    constraints = read_constraints(settings) if (settings.num_beams or 1) > 1 else []
    if not constraints:
        return
    limits = _Limits.read(settings, vocab_size, end_ids)
    needed = sum(limits.measure(constraint) for constraint in constraints)
    room = count_free_places(settings, max_new_tokens)
    if needed > room:
        name = "constraints" if settings.force_words_ids is None else "force_words_ids"
        raise SettingError(
            word(
                "{name} asks for at least {needed} tokens, and this call writes at most {room} that are not forced "
                "otherwise; raise {max_new_tokens}, or force less",
                name=Setting(name),
                needed=needed,
                room=room,
            )
        )


@dataclass(frozen=True)
class _Limits:
    """What can't be written, whatever the model says."""

    vocab_size: int
    end_ids: frozenset[int]
    banned: tuple[tuple[int, ...], ...]
    ngram_size: int

    @classmethod
    def read(cls, settings: GenerationConfig, vocab_size: int, end_ids: Sequence[int]) -> _Limits:
        ends = frozenset(end_ids)
        words = [tuple(word) for word in settings.bad_words_ids or ()]
        banned = [word for word in words if len(word) != 1 or word[0] not in ends]  # the way to end is not taken away
        banned += [(int(token),) for token in settings.suppress_tokens or ()]
        return cls(vocab_size, ends, tuple(banned), settings.no_repeat_ngram_size or 0)

    def measure(self, constraint: Constraint) -> int:
        """The fewest tokens that fulfil a constraint; an error if nothing can."""
        phrases = list_phrases(constraint)
        if phrases is None:
            return self._try_out(constraint)
        reasons = [self._explain(phrase) for phrase in phrases]
        possible = [len(phrase) for phrase, why in zip(phrases, reasons, strict=True) if why is None]
        if not possible:
            raise SettingError(f"{describe_constraint(constraint)} is to be written, and can't be: {reasons[0]}")
        return min(possible)

    def trim(self, constraint: Constraint) -> Constraint:
        """A constraint without those of its alternatives that can't be written."""
        phrases = list_phrases(constraint) or []
        possible = [phrase for phrase in phrases if self._explain(phrase) is None]
        return DisjunctiveConstraint(possible) if 0 < len(possible) < len(phrases) else constraint

    def _explain(self, phrase: Sequence[int]) -> str | None:
        """Why a phrase can't be written; None if it may be."""
        outside = [token for token in phrase if token >= self.vocab_size]
        if outside:
            return f"the id {outside[0]} is outside the model's vocabulary of {self.vocab_size} tokens"
        ends = [token for token in phrase if token in self.end_ids]
        if ends:
            return f"{ends[0]} is an end token, and a sequence ends there; leave it out, or set another eos_token_id"
        if any(holds(phrase, ban) for ban in self.banned):
            return "`bad_words_ids` or `suppress_tokens` forbids it; take it out of one of them"
        size = self.ngram_size
        grams = [tuple(phrase[start : start + size]) for start in range(len(phrase) - size + 1)]
        if size and len(set(grams)) < len(grams):
            return f"it repeats itself, and no_repeat_ngram_size={size} forbids that; raise it"
        return None

    def _try_out(self, constraint: Any) -> int:
        """Check a constraint that someone wrote, and walk it to its end."""
        fresh = constraint.copy()
        if callable(getattr(fresh, "test", None)):
            fresh.test()
        steps = count_fewest_steps(constraint.copy(), lambda token: self._explain([token]) is None)
        if steps is None:
            raise SettingError(
                f"{describe_constraint(constraint)} is to be fulfilled, and can't be: every way leads over tokens that "
                "end a sequence, are forbidden, or are outside the model's vocabulary"
            )
        return steps

"""The rules, each once for all frameworks. Where the two frameworks' references differ, a class variable says how."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from unspool.errors import InputError, SettingError, excerpt
from unspool.frameworks.arrays import Array, Arrays
from unspool.frameworks.processor import Rule
from unspool.logits.rows import as_positive_integer, read_token_ids
from unspool.numeric import is_number, is_token_id
from unspool.wording import about

INF = float("inf")
MOST_PLACES = 1 << 20  # of tokens that are forced
MOST_WORDS, LONGEST_WORD = 65_536, 4096


def _check_above_zero(name: str, value: Any) -> None:
    if not is_number(value) or value <= 0:
        raise SettingError(about(name, f"has to be a strictly positive float, but is {value!r:.80}."))


def _check_filter(value: Any) -> None:
    if not is_number(value, allows_infinity=True):
        raise SettingError(about("filter_value", f"has to be a number, but is {value!r:.80}."))


def _check_token(name: str, token: Any) -> None:
    as_positive_integer(name, token, at_least=0)


def _force(xp: Arrays, scores: Array, token: Any, fill: float = -INF) -> Array:
    """Scores with one token at 0 and nothing else."""
    return xp.where(xp.places(scores) == token, 0.0, xp.full(scores, fill))


def _mark_tokens(xp: Arrays, tokens: list[int], scores: Array) -> Array:
    """Which places of the vocabulary are these tokens; those outside it are left out, as in the torch processors."""
    inside = [[token for token in tokens if token < scores.shape[-1]]]
    ids = xp.ids(inside, scores)
    return xp.mark(ids, ids >= 0, scores.shape[-1])[0]


@dataclass(frozen=True, eq=False)
class Temperature(Rule):
    """Scores divided by a temperature."""

    temperature: float

    def __post_init__(self) -> None:
        _check_above_zero("temperature", self.temperature)

    def change(self, xp: Arrays, input_ids: Array, scores: Array, cur_len: Any) -> Array:
        """The scores, divided."""
        return scores / self.temperature


@dataclass(frozen=True, eq=False)
class TopK(Rule):
    """The highest scores; the others get the filter's value."""

    top_k: int
    filter_value: float = -INF
    min_tokens_to_keep: int = 1
    keeps_ties: ClassVar[bool] = True  # whether what equals the last one kept stays too

    def __post_init__(self) -> None:
        as_positive_integer("top_k", self.top_k)
        as_positive_integer("min_tokens_to_keep", self.min_tokens_to_keep, at_least=0)
        _check_filter(self.filter_value)

    def change(self, xp: Arrays, input_ids: Array, scores: Array, cur_len: Any) -> Array:
        """The scores with the lower ones filtered."""
        kept = min(max(self.top_k, self.min_tokens_to_keep), scores.shape[-1])
        values, order = xp.sort_down(scores)
        if self.keeps_ties:
            return xp.where(scores < values[..., kept - 1 : kept], self.filter_value, scores)
        return xp.unsort(xp.where(xp.places(values) >= kept, self.filter_value, values), order)


@dataclass(frozen=True, eq=False)
class TopP(Rule):
    """The fewest likely tokens whose probabilities reach a sum; the others get the filter's value."""

    top_p: float
    filter_value: float = -INF
    min_tokens_to_keep: int = 1

    def __post_init__(self) -> None:
        if not is_number(self.top_p) or not 0 <= self.top_p <= 1:
            raise SettingError(about("top_p", f"has to be a float from 0 to 1, but is {self.top_p!r:.80}."))
        as_positive_integer("min_tokens_to_keep", self.min_tokens_to_keep)
        _check_filter(self.filter_value)

    def change(self, xp: Arrays, input_ids: Array, scores: Array, cur_len: Any) -> Array:
        """The scores with the tail filtered."""
        values, order = xp.sort_down(scores)
        places = xp.places(values)
        before = xp.columns(xp.sum_up(values), xp.where(places > 0, places - 1, places))
        is_tail = (places >= self.min_tokens_to_keep) & ~(before < self.top_p)
        return xp.unsort(xp.where(is_tail, self.filter_value, values), order)


@dataclass(frozen=True, eq=False)
class MinLength(Rule):
    """No end before a length."""

    min_length: int
    eos_token_id: int
    is_inclusive: ClassVar[bool] = False  # whether the end is still forbidden at the length itself

    def __post_init__(self) -> None:
        as_positive_integer("min_length", self.min_length, at_least=0)
        _check_token("eos_token_id", self.eos_token_id)

    def change(self, xp: Arrays, input_ids: Array, scores: Array, cur_len: Any) -> Array:
        """The scores, with the end's at -inf while the text is short."""
        is_short = read_length(xp, cur_len, scores) < self.min_length + self.is_inclusive
        return xp.where(is_short & (xp.places(scores) == self.eos_token_id), -INF, scores)


@dataclass(frozen=True, eq=False)
class RepetitionPenalty(Rule):
    """Tokens that were written become less likely: positive scores are divided, negative ones multiplied."""

    penalty: float

    def __post_init__(self) -> None:
        _check_above_zero("penalty", self.penalty)

    def change(self, xp: Arrays, input_ids: Array, scores: Array, cur_len: Any) -> Array:
        """The scores, those of written tokens penalised."""
        ids = self.read_ids(xp, input_ids, scores)
        is_seen = _mark_ids(xp, ids, xp.places(ids) < read_length(xp, cur_len, scores), scores)
        lowered = xp.where(scores > 0, scores * (1 / self.penalty), scores * self.penalty)
        return xp.where(is_seen, lowered, scores)


def _mark_ids(xp: Arrays, ids: Array, is_on: Array, scores: Array) -> Array:
    """Which tokens of the vocabulary stand among ids (rows, n) where `is_on`; other ids, as padding's, are none."""
    is_token = (ids >= 0) & (ids < scores.shape[-1])
    return xp.mark(xp.where(is_token, ids, ids * 0), is_on & is_token, scores.shape[-1])


def _find_ends(xp: Arrays, ids: Array, length: Array, count: int) -> Array:
    """The last `count` tokens of each row (rows, count), in their order; what lies before the first is any token."""
    at = length - count + xp.ids(np.arange(count), ids)
    return xp.columns(ids, _clip(xp, at, ids))


def _clip(xp: Arrays, at: Array, ids: Array) -> Array:
    last = ids.shape[-1] - 1
    at = xp.where(at < 0, at * 0, at)
    return xp.where(at > last, at * 0 + last, at)


@dataclass(frozen=True, eq=False)
class NoRepeatNGram(Rule):
    """No token that would end an n-gram for the second time."""

    ngram_size: int

    def __post_init__(self) -> None:
        as_positive_integer("ngram_size", self.ngram_size)

    def change(self, xp: Arrays, input_ids: Array, scores: Array, cur_len: Any) -> Array:
        """The scores, with those of repeating tokens at -inf."""
        ids = self.read_ids(xp, input_ids, scores)
        if self.ngram_size > ids.shape[-1]:
            return scores  # no row holds one n-gram
        length = read_length(xp, cur_len, scores)
        num_before = self.ngram_size - 1
        following = xp.places(ids)  # the place of the token that ends an n-gram
        is_match = ((following >= num_before) & (following < length) & (length >= num_before)) & (ids == ids)
        ends = _find_ends(xp, ids, length, num_before)
        for offset in range(num_before):
            before = xp.columns(ids, _clip(xp, following - num_before + offset, ids))
            is_match = is_match & (before == ends[:, offset : offset + 1])
        return xp.where(_mark_ids(xp, ids, is_match, scores), -INF, scores)


@dataclass(frozen=True, eq=False)
class NoBadWords(Rule):
    """No token that would end one of some sequences; an end token may be among them, as in the reference."""

    bad_words_ids: list[list[int]]
    eos_token_id: int

    def __post_init__(self) -> None:
        words = self.bad_words_ids
        if not isinstance(words, list) or not 0 < len(words) <= MOST_WORDS:
            raise SettingError(about("bad_words_ids", f"has to be a non-empty list, but is {excerpt(words)}."))
        for word in words:
            if not isinstance(word, list) or not 0 < len(word) <= LONGEST_WORD:
                raise SettingError(
                    about("bad_words_ids", f"has to be a list of lists of token ids, but holds {excerpt(word)}.")
                )
            read_token_ids("bad_words_ids", word)
        if self.eos_token_id is not None:
            _check_token("eos_token_id", self.eos_token_id)

    @cached_property
    def _table(self) -> tuple[Any, Any, Any]:
        """What comes before each word's last token, aligned at its end and filled with -1; lengths; last tokens."""
        lengths = np.array([len(word) - 1 for word in self.bad_words_ids], dtype=np.int32)
        before = np.full((len(lengths), lengths.max()), -1, dtype=np.int32)
        for row, word in enumerate(self.bad_words_ids):
            before[row, before.shape[1] - lengths[row] :] = word[:-1]
        return before, lengths, np.array([word[-1] for word in self.bad_words_ids], dtype=np.int32)

    def change(self, xp: Arrays, input_ids: Array, scores: Array, cur_len: Any) -> Array:
        """The scores, with those of words' last tokens at -inf where the rest stands before."""
        ids = self.read_ids(xp, input_ids, scores)
        length = read_length(xp, cur_len, scores)
        before, lengths, last = (xp.ids(part, ids) for part in self._table)
        ends = _find_ends(xp, ids, length, before.shape[-1])
        is_same = (ends[:, None] == before[None]) | (before < 0)[None]  # (rows, words, places)
        is_match = xp.all(is_same) & (lengths <= length)
        return xp.where(_mark_ids(xp, last + ids[:, :1] * 0, is_match, scores), -INF, scores)


@dataclass(frozen=True, eq=False)
class ForcedBOS(Rule):
    """One token right after the one that the text starts with."""

    bos_token_id: int

    def __post_init__(self) -> None:
        _check_token("bos_token_id", self.bos_token_id)

    def change(self, xp: Arrays, input_ids: Array, scores: Array, cur_len: Any) -> Array:
        """The scores, at a text of one token with nothing else left."""
        check_inside("bos_token_id", self.bos_token_id, scores)
        is_first = read_length(xp, cur_len, scores) == 1
        return xp.where(is_first, _force(xp, scores, self.bos_token_id), scores)


@dataclass(frozen=True, eq=False)
class ForcedEOS(Rule):
    """An end token as the last one before a length is reached."""

    max_length: int
    eos_token_id: int

    def __post_init__(self) -> None:
        as_positive_integer("max_length", self.max_length)
        _check_token("eos_token_id", self.eos_token_id)

    def change(self, xp: Arrays, input_ids: Array, scores: Array, cur_len: Any) -> Array:
        """The scores, at the last place with nothing else left."""
        check_inside("eos_token_id", self.eos_token_id, scores)
        is_last = read_length(xp, cur_len, scores) == self.max_length - 1
        return xp.where(is_last, _force(xp, scores, self.eos_token_id), scores)


@dataclass(frozen=True, eq=False)
class SuppressTokens(Rule):
    """No token of a list."""

    suppress_tokens: list[int]

    def __post_init__(self) -> None:
        read_token_ids("suppress_tokens", self.suppress_tokens)

    def change(self, xp: Arrays, input_ids: Array, scores: Array, cur_len: Any) -> Array:
        """The scores, with the list's at -inf."""
        tokens = read_token_ids("suppress_tokens", self.suppress_tokens)
        return xp.where(_mark_tokens(xp, tokens, scores), -INF, scores)


@dataclass(frozen=True, eq=False)
class SuppressTokensAtBegin(Rule):
    """No token of a list at the first place that is written."""

    begin_suppress_tokens: list[int]
    begin_index: int

    def __post_init__(self) -> None:
        read_token_ids("begin_suppress_tokens", self.begin_suppress_tokens)
        as_positive_integer("begin_index", self.begin_index, at_least=0)

    def change(self, xp: Arrays, input_ids: Array, scores: Array, cur_len: Any) -> Array:
        """The scores, at the first place with the list's at -inf."""
        is_first = read_length(xp, cur_len, scores) == self.begin_index
        tokens = read_token_ids("begin_suppress_tokens", self.begin_suppress_tokens)
        return xp.where(is_first & _mark_tokens(xp, tokens, scores), -INF, scores)


@dataclass(frozen=True, eq=False)
class ForceTokens(Rule):
    """Tokens for certain places: pairs of a place and its token, which may be None for none."""

    force_token_map: Any
    fills_lowest: ClassVar[bool] = False  # whether other tokens get the lowest finite score, not -inf

    def __post_init__(self) -> None:
        try:
            pairs = dict(self.force_token_map)
        except (TypeError, ValueError):
            raise SettingError(
                about("force_token_map", f"has to be a list of pairs, but is {excerpt(self.force_token_map)}.")
            ) from None
        if not pairs:
            raise SettingError(about("force_token_map", "is empty; give [[place, token], …]."))
        for place, token in pairs.items():
            _check_token("force_token_map", place)
            if token is not None:
                _check_token("force_token_map", token)
        if max(pairs) >= MOST_PLACES:
            raise SettingError(about("force_token_map", f"has a place of {MOST_PLACES} or more."))

    @cached_property
    def _tokens(self) -> Any:
        """The token of each place, -1 for none."""
        pairs = dict(self.force_token_map)
        tokens = np.full(max(pairs) + 1, -1, dtype=np.int32)
        for place, token in pairs.items():
            tokens[place] = -1 if token is None else token
        return tokens

    def change(self, xp: Arrays, input_ids: Array, scores: Array, cur_len: Any) -> Array:
        """The scores, where a token is forced with nothing else left."""
        check_inside("force_token_map", int(self._tokens.max()), scores)
        length = read_length(xp, cur_len, scores)
        tokens = xp.ids(self._tokens, scores)
        at = xp.ids([0], scores) + length
        token = xp.columns(tokens, _clip(xp, at, tokens))
        is_forced = (token >= 0) & (at < tokens.shape[-1])
        fill = xp.lowest(scores) if self.fills_lowest else -INF
        return xp.where(is_forced, _force(xp, scores, token, fill), scores)


@dataclass(frozen=True, eq=False)
class WhisperTimestamps(Rule):
    """Whisper's timestamps in pairs, and where they are likelier than text (Radford et al. 2022, arXiv 2212.04356)."""

    generate_config: Any
    model_config: Any
    decoder_input_length: int

    def __post_init__(self) -> None:
        for name in ("eos_token_id", "no_timestamps_token_id"):
            if not is_token_id(getattr(self.generate_config, name, None)):
                raise SettingError(about(name, "of generate_config has to be a token id, and is none."))
        as_positive_integer("decoder_input_length", self.decoder_input_length, at_least=0)

    @property
    def begin_index(self) -> int:
        """The column of the first token that is written: after the start token, and a language and a task if any."""
        return self.decoder_input_length + (3 if getattr(self.generate_config, "is_multilingual", False) else 1)

    @property
    def last_initial(self) -> int:
        """How many timestamps after 0.00 may come first."""
        given = getattr(self.generate_config, "max_initial_timestamp_index", None)
        last = self.model_config.vocab_size if given is None else given
        return as_positive_integer("max_initial_timestamp_index", last, at_least=0)

    def change(self, xp: Arrays, input_ids: Array, scores: Array, cur_len: Any) -> Array:
        """The scores, with all that the rules forbid at -inf."""
        ids = self.read_ids(xp, input_ids, scores)
        length, places = read_length(xp, cur_len, scores), xp.places(scores)
        begin, silent = self.begin_index, self.generate_config.no_timestamps_token_id
        is_stamp = places > silent
        ends = _find_ends(xp, ids, length, 2)
        is_last_stamp = (ends[:, 1:] > silent) & (length > begin)
        is_paired = (ends[:, :1] > silent) | (length < begin + 2)
        is_text_alone = is_last_stamp & is_paired & is_stamp
        is_pair_wanted = is_last_stamp & ~is_paired & (places < self.generate_config.eos_token_id)
        is_late = (length == begin) & (places > silent + 1 + self.last_initial)
        scores = xp.where((places == silent) | is_text_alone | is_pair_wanted | is_late, -INF, scores)
        of_stamps = xp.logsumexp(xp.where(is_stamp, scores, xp.full(scores, -INF)))
        best_text = xp.max(xp.where(is_stamp, -INF, scores))
        return xp.where((of_stamps > best_text) & ~is_stamp, -INF, scores)


def read_length(xp: Arrays, cur_len: Any, scores: Array) -> Array:
    """The length so far as an array, which may be traced."""
    if cur_len is None or isinstance(cur_len, bool | str):
        raise InputError(f"cur_len is {cur_len!r:.40}; give the number of tokens that each row has so far")
    return xp.ids(cur_len, scores)


def check_inside(name: str, token: int, scores: Array) -> None:
    """Raise for a token that is to be forced and that the vocabulary lacks, which would leave nothing."""
    if token >= scores.shape[-1]:
        raise InputError(f"{name} is {token}, and the scores are of {scores.shape[-1]} tokens")

"""SynthID-Text: the next token wins a tournament whose rounds are judged by keyed bits.

"Scalable watermarking for identifying large language model outputs", Nature 634 (2024). The reference's processor
counts its calls and keeps what it saw; here all of that is read off the visible history, so rows may be reordered,
rolled back and repeated.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cached_property, lru_cache
from typing import Any

import torch

from unspool.config import SynthIDTextWatermarkingConfig
from unspool.errors import InputError
from unspool.kernels.contexts import Text
from unspool.kernels.cpu import find_marks
from unspool.kernels.cpu.mark_calls import Bits, MarkCall, TournamentCall, Window
from unspool.logits.watermark import PromptedWatermark
from unspool.watermark.contexts import find_repeated, read_contexts
from unspool.watermark.tournament import PackedBits, mark_scores, take_logs
from unspool.watermark.twister import draw_bits

MULTIPLIER = 6364136223846793005
INCREMENT = 1


@lru_cache(maxsize=4)
def _find_table(seed: int, size: int, device: torch.device) -> torch.Tensor:
    """The bits of a sampling table, kept for the next requests with the same one."""
    return draw_bits(seed, size).to(device)


class SynthIDTextWatermarkLogitsProcessor(PromptedWatermark):
    """Favours tokens whose keyed bits (g-values), given the `ngram_len - 1` tokens before, are 1.

    Over keys, the distribution that is sampled stays as it was. `prompt_width` columns are no part of the text: the
    first tokens' context is zeros, as the reference's.
    """

    def __init__(
        self,
        ngram_len: int,
        keys: Sequence[int],
        sampling_table_size: int,
        sampling_table_seed: int,
        context_history_size: int,
        device: Any,
        skip_first_ngram_calls: bool = False,
        debug_mode: bool = False,
        *,
        prompt_width: int = 0,
    ) -> None:
        config = SynthIDTextWatermarkingConfig(
            ngram_len, list(keys), context_history_size, sampling_table_seed, sampling_table_size
        )
        config.validate()
        self.ngram_len = ngram_len
        self._key_numbers = tuple(config.keys)
        self.keys = torch.tensor(config.keys, device=device)
        self.sampling_table = _find_table(sampling_table_seed, sampling_table_size, torch.device(device or "cpu"))
        self.sampling_table_seed = sampling_table_seed
        self.context_history_size = context_history_size
        self.skip_first_ngram_calls = skip_first_ngram_calls
        self.debug_mode = debug_mode
        self._begin_after(prompt_width)

    @property
    def device(self) -> torch.device:
        """The device of the keys and the table; they follow the scores."""
        return self.keys.device

    @property
    def depth(self) -> int:
        """The rounds of the tournament, one for each key."""
        return len(self.keys)

    @property
    def mark(self) -> Hashable:
        """The keys and the settings."""
        table = (len(self.sampling_table), self.sampling_table_seed)
        how = (self.context_history_size, self.skip_first_ngram_calls, self.debug_mode)
        return type(self), self.ngram_len, self._key_numbers, table, how

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, pads: torch.Tensor | None = None) -> torch.Tensor:
        """Log-probabilities of the tournament's winner; the scores unchanged if the context is a repeated one."""
        self._check_input_ids_shape(input_ids)
        if self.debug_mode:
            scores = torch.ones_like(scores)
        if self.has_prompts:
            return self._mark_rows(input_ids, scores)
        window = self._find_window(input_ids.shape[1])
        if window is None:
            return scores
        self._follow(scores.device)
        text = Text(input_ids, window.start, window.width, window.first)
        contexts, repeated = read_contexts(text, 1, self._hash, mixes=False)
        return mark_scores(scores, self.packed, contexts, repeated)

    def _mark_rows(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """The same for rows whose texts begin after prompts of their own widths."""
        self._follow(scores.device)
        width, columns, starts = self.ngram_len - 1, input_ids.shape[1], self.list_prompt_widths(scores)
        num_skipped = width if self.skip_first_ngram_calls else 0
        earliest = columns - self.context_history_size  # no window before it counts
        firsts = starts + num_skipped
        if earliest > int(self._prompt_widths.values.min()) + num_skipped:
            firsts = firsts.clamp(min=earliest)
        # What stands before a text is read as zeros, as padding is.
        text = Text(input_ids, 0, width, 0, starts, firsts)
        contexts, repeated = read_contexts(text, 1, self._hash, mixes=False)
        if columns - self.prompt_width < num_skipped:
            repeated = (repeated.bool() | (columns - starts < num_skipped)).to(repeated.dtype)
        return mark_scores(scores, self.packed, contexts, repeated)

    def prepare_steps(self, ids: torch.Tensor, vocab: int, pads: torch.Tensor | None) -> MarkCall | None:
        """The library's tournament for every step."""
        marks = find_marks() if ids.device.type == "cpu" else None
        if marks is None or self.debug_mode or self.has_prompts:
            return None
        self._follow(ids.device)
        packed = self.packed
        if not len(packed.words):
            return None
        bits = Bits(packed.in_order, packed.depth, packed.shift)
        return TournamentCall(marks, ids, vocab, bits, self._find_window)

    def _find_window(self, columns: int) -> Window | None:
        """What of a text of so many columns is context; None while the first tokens are left unmarked."""
        width, start = self.ngram_len - 1, min(self.prompt_width, columns)
        num_tokens = columns - start
        if self.skip_first_ngram_calls and num_tokens < width:
            return None
        first = max(width if self.skip_first_ngram_calls else 0, num_tokens - self.context_history_size)
        return Window(start, num_tokens, width, first)

    # --- g-values ------------------------------------------------------------------------------------
    def accumulate_hash(
        self,
        current_hash: torch.Tensor,
        data: torch.Tensor,
        multiplier: int = MULTIPLIER,
        increment: int = INCREMENT,
    ) -> torch.Tensor:
        """The hash (…) after the numbers of `data` (…, length), one by one, by a linear congruential generator."""
        for place in range(data.shape[-1]):
            current_hash = (current_hash + data[..., place]) * multiplier + increment
        return current_hash

    def compute_ngram_keys(self, ngrams: torch.Tensor) -> torch.Tensor:
        """The random keys (rows, ngrams, depth) of n-grams (rows, ngrams, ngram_len)."""
        if ngrams.dim() != 3 or ngrams.shape[2] != self.ngram_len:
            raise InputError(
                f"n-grams have to be of the shape (rows, ngrams, {self.ngram_len}), but are {list(ngrams.shape)}"
            )
        self._follow(ngrams.device)
        return (self._hash(ngrams)[..., None] + self.keys) * MULTIPLIER + INCREMENT

    def sample_g_values(self, ngram_keys: torch.Tensor) -> torch.Tensor:
        """The bits, 0 or 1, that random keys choose from the sampling table; of the keys' shape."""
        self._follow(ngram_keys.device)
        return self.sampling_table[ngram_keys % len(self.sampling_table)]

    def compute_g_values(self, input_ids: torch.Tensor) -> torch.Tensor:
        """The g-values (rows, length - (ngram_len - 1), depth) of a text's tokens (rows, length)."""
        self._check_text(input_ids)
        return self.sample_g_values(self.compute_ngram_keys(input_ids.unfold(1, self.ngram_len, 1)))

    def update_scores(self, scores: torch.Tensor, g_values: torch.Tensor) -> torch.Tensor:
        """Log-probabilities of the tournament's winner, from scores (rows, vocab) and g-values (rows, vocab, depth)."""
        probs = torch.softmax(scores, dim=1)
        for depth in range(g_values.shape[-1]):
            bits = g_values[..., depth]
            mass = (bits * probs).sum(dim=1, keepdim=True)
            probs = probs * (1 + bits - mass)
        return take_logs(probs)

    # --- masks ---------------------------------------------------------------------------------------
    def compute_context_repetition_mask(self, input_ids: torch.Tensor) -> torch.Tensor:
        """1 for tokens (rows, length - (ngram_len - 1)) whose context is new, 0 where it stood in the text before."""
        self._check_text(input_ids)
        contexts = input_ids[:, :-1].unfold(1, self.ngram_len - 1, 1)
        return ~find_repeated(contexts, self.context_history_size)

    def compute_eos_token_mask(self, input_ids: torch.Tensor, eos_token_id: int) -> torch.Tensor:
        """1 for the tokens (rows, length) before the first end token, 0 from there on."""
        self._check_input_ids_shape(input_ids)
        return (input_ids == eos_token_id).long().cumsum(dim=-1).eq(0).to(torch.int64)

    def expected_mean_g_value(self, vocab_size: int, coinflip_prob: float = 0.5) -> float:
        """The mean g-value of text marked in one round by a model that finds all tokens equally likely."""
        return coinflip_prob + coinflip_prob * (1 - coinflip_prob) * (1 - 1 / vocab_size)

    # --- within --------------------------------------------------------------------------------------
    @cached_property
    def packed(self) -> PackedBits:
        """The g-values of all tokens, packed."""
        return _pack(self.sampling_table_seed, len(self.sampling_table), self._key_numbers, self.sampling_table.device)

    def _hash(self, tokens: torch.Tensor) -> torch.Tensor:
        """`accumulate_hash` of tokens (…, length), from 1 on, as one sum."""
        powers, start = _list_powers(tokens.shape[-1], tokens.device)
        return (tokens * powers).sum(dim=-1) + start

    def _follow(self, device: torch.device) -> None:
        """Move the keys and the table to the device of the scores."""
        if self.keys.device != device:
            self.keys, self.sampling_table = self.keys.to(device), self.sampling_table.to(device)
            self.__dict__.pop("packed", None)

    def _check_input_ids_shape(self, input_ids: torch.Tensor) -> None:
        if input_ids.dim() != 2:
            raise InputError(f"input_ids have to be of the shape (rows, length), but are {list(input_ids.shape)}")

    def _check_text(self, input_ids: torch.Tensor) -> None:
        self._check_input_ids_shape(input_ids)
        if input_ids.shape[1] < self.ngram_len:
            raise InputError(
                f"a text of {input_ids.shape[1]} tokens is shorter than an n-gram of {self.ngram_len}; "
                "there is nothing to score"
            )


@lru_cache(maxsize=8)
def _pack(seed: int, size: int, keys: tuple[int, ...], device: torch.device) -> PackedBits:
    """The g-values that all calls of one key share: to pack them takes as long as five steps of a small model."""
    table = draw_bits(seed, size).to(device)
    return PackedBits.of(table, torch.tensor(keys, device=device), MULTIPLIER, INCREMENT)


@lru_cache(maxsize=64)
def _list_powers(length: int, device: torch.device) -> tuple[torch.Tensor, int]:
    """What each of so many tokens is multiplied by in a hash, and what comes to it without tokens."""
    powers = [_wrap(pow(MULTIPLIER, length - place, 1 << 64)) for place in range(length)]
    start = sum(pow(MULTIPLIER, place, 1 << 64) * INCREMENT for place in range(length)) + pow(MULTIPLIER, length)
    return torch.tensor(powers, device=device), _wrap(start % (1 << 64))


def _wrap(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value

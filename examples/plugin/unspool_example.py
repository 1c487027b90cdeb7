"""One part of each kind for unspool. `list_parts` is the entry point; docs/plugins.md goes through it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from unspool import LogitsProcessor, StaticCache, StoppingCriteria
from unspool.models.families.llama import NAMES, read_llama_config
from unspool.plugins import (
    CacheKindEntry,
    DecoderFamily,
    Draft,
    DrafterContext,
    DrafterEntry,
    ProcessorEntry,
    Rows,
    StopEntry,
    StrategyEntry,
    TokenStrategy,
    fixed,
    make_count,
    make_flag,
    make_number,
    make_other,
)

# --- a processor: `smoothing_factor=0.3` ----------------------------------------------------------------------


class QuadraticSmoothing(LogitsProcessor):
    """Lowers scores by the square of their distance from the highest (quadratic sampling, kalomaze 2024)."""

    def __init__(self, factor: float | Sequence[float] | torch.Tensor) -> None:
        self.factor = torch.as_tensor(factor, dtype=torch.float32).reshape(-1, 1)  # (1, 1) or (rows, 1)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """The scores on a parabola; a row whose factor is 0 stays as it is."""
        factor = self.factor.to(scores)
        highest = scores.amax(dim=-1, keepdim=True)  # (rows, 1)
        curved = highest - factor * (scores - highest) ** 2
        return torch.where(factor > 0, curved, scores)

    def select_rows(self, index: torch.Tensor) -> QuadraticSmoothing:
        """The processor for the rows at `index`, where every row has its own factor."""
        return self if len(self.factor) == 1 else QuadraticSmoothing(self.factor[index.to("cpu"), 0])


SMOOTHING = ProcessorEntry(
    processor=QuadraticSmoothing,
    parameters=(
        make_number(
            "smoothing_factor",
            0.0,
            "sampling",
            "Lowers scores by this times the square of their distance from the highest; 0 is off.",
            per_row=True,
            at_least=0.0,
            off=(0.0,),
        ),
    ),
    stage="sampling",
    after="temperature",
)

# --- a stop: `max_repeats=3` ------------------------------------------------------------------------------------


class MaxRepeats(StoppingCriteria):
    """Stops a row that has written one token so many times in a row."""

    def __init__(self, times: int) -> None:
        self.times = times

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """The rows that end in a token repeated so often."""
        if input_ids.shape[1] < self.times:
            return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
        return (input_ids[:, -self.times :] == input_ids[:, -1:]).all(dim=-1)


REPEATS = StopEntry(
    stop=MaxRepeats,
    reason="repeats",
    parameters=(make_count("max_repeats", None, "length", "Stop at a token written so often in a row.", at_least=2),),
)

# --- a strategy: `typical_search=True` --------------------------------------------------------------------------


class TypicalSearch(TokenStrategy):
    """Takes the token whose surprise is nearest to the expected one: locally typical sampling (Meister et al. 2022,
    arXiv 2202.00666) without the draw."""

    def choose(self, rows: Rows, scores: torch.Tensor) -> torch.Tensor:
        """The most typical token of every row."""
        logprobs = scores.float().log_softmax(dim=-1)  # (rows, vocab)
        entropy: torch.Tensor = torch.special.entr(logprobs.exp()).sum(dim=-1, keepdim=True)
        return (-logprobs - entropy).abs().argmin(dim=-1)


TYPICAL = StrategyEntry(
    name="typical_search",
    make=TypicalSearch,
    parameters=(make_flag("typical_search", False, "strategy", "Take the most typical token, not the likeliest."),),
)

# --- a drafter: `phrase_book=[[5, 9, 14], …]` -------------------------------------------------------------------


class PhraseBook:
    """Guesses that a row which has begun one of the given phrases goes on with it (retrieval, as in REST: He et al.
    2023, arXiv 2311.08252)."""

    is_free = True  # beside a forward pass

    def __init__(self, context: DrafterContext) -> None:
        self.phrases = [tuple(phrase) for phrase in context.plan.settings.phrase_book]

    def propose(self, rows: Rows, limits: Sequence[int]) -> Draft:
        """The rest of the phrase that each row is in."""
        guesses = []
        for place, limit in enumerate(limits):
            text = rows.tokens_from(place, max(0, rows.lengths[place] - 32)) if limit else []
            guesses.append(self._continue(text)[:limit])
        return Draft.of(guesses, rows.device)

    def _continue(self, text: list[int]) -> list[int]:
        for size in range(min(len(text), 31), 0, -1):  # the longest beginning counts
            for phrase in self.phrases:
                if size < len(phrase) and phrase[:size] == tuple(text[-size:]):
                    return list(phrase[size:])
        return []

    def observe(self, rows: Rows, draft: Draft, accepted: Sequence[int]) -> None:
        """Nothing is kept from one draft to the next."""

    def keep_rows(self, index: Sequence[int]) -> None:
        """Nothing is held per row."""


PHRASES = DrafterEntry(
    name="phrase_book",
    make=PhraseBook,
    parameters=(make_other("phrase_book", "id lists", "assistance", "Token sequences that are likely to be written."),),
)

# --- a cache kind: `cache_implementation="bucketed"` ------------------------------------------------------------


def make_bucketed(shape: Any, rows: int, capacity: int | None, options: Any) -> StaticCache:
    """A static cache whose room is a power of two: calls of many lengths share few shapes."""
    room = 1 << max(capacity or 1, 64).bit_length()
    return StaticCache(shape.as_config(), rows, room, shape.device, shape.dtype)


BUCKETED = CacheKindEntry("bucketed", make_bucketed, is_sized=True, forks=True, is_plain=True)

# --- a model family: Seed-OSS -----------------------------------------------------------------------------------

SEED_OSS = DecoderFamily(
    name="seed_oss",
    architectures=("SeedOssForCausalLM",),
    model_types=("seed_oss",),
    # A Llama with biases on q, k and v, and one of its own switch on the output.
    read_config=lambda config: replace(
        read_llama_config(config, "seed_oss"),
        has_qkv_bias=config.boolean("attention_bias", default=True),
        has_out_bias=config.boolean("attention_out_bias", default=False),
    ),
    find_names=fixed(NAMES),
)


def list_parts() -> tuple[Any, ...]:
    """What this package adds to unspool."""
    return SMOOTHING, REPEATS, TYPICAL, PHRASES, BUCKETED, SEED_OSS

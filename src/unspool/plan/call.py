"""A call, settled: what the plan says to everyone after it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from unspool.config import GenerationConfig
from unspool.config.compiling import Compiling
from unspool.config.modes import find_num_candidates
from unspool.config.parameters import is_on
from unspool.plan.drafting import Drafting
from unspool.plan.origins import Origin


@dataclass(frozen=True)
class Plan:
    """One call, settled: every value decided, every conflict ruled out."""

    settings: GenerationConfig
    origins: Mapping[str, Origin]
    asked: frozenset[str]  # the settings that the caller set, in the call or in a config given to it
    strategy: str  # the name of the strategy that the settings ask for
    do_sample: bool
    max_length: int  # columns, as the reference counts: prompt, padding and new tokens
    eos_token_ids: tuple[int, ...]
    pad_token_id: int
    num_beams: int
    num_return_sequences: int
    seeds: tuple[int, ...] | None  # one for all or one per prompt; None: drawn for this call
    cache_kind: str
    prompt_width: int
    hidden_width: int = 0  # positions of the prompt that no column stands for
    dola_layers: tuple[int, ...] = ()  # the layers that DoLa chooses among; none without it
    cache_config: Mapping[str, Any] = field(default_factory=dict)  # the kind's options, checked
    drafting: Drafting | None = None
    compiling: Compiling | None = None
    derived: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    """What others work out of the settings alone: calls with equal settings have it in common."""

    @property
    def guidance_scale(self) -> float | None:
        """The weight of guidance; None if there is none, as at 1."""
        scale = self.settings.guidance_scale
        return None if scale is None or scale == 1 else float(scale)

    @property
    def max_new_tokens(self) -> int:
        """The most tokens that a row can get."""
        return self.max_length - self.prompt_width

    @property
    def is_last_forced(self) -> bool:
        """Whether the last token of a row that reaches the limit is forced."""
        return is_on(self.settings, "forced_eos_token_id")

    @property
    def num_candidates(self) -> int:
        """The most tokens that are read ahead for a row, to choose one of them; 0 if none is."""
        return find_num_candidates(self.settings)

    @property
    def copies(self) -> int:
        """Rows that one prompt is continued in."""
        return self.num_beams if self.num_beams > 1 else self.num_return_sequences

    @property
    def fill_token_id(self) -> int:
        """What follows a sequence that ended before others; beam search takes an end token where padding is id 0,
        as the reference does."""
        is_plain = self.strategy == "beams" and self.eos_token_ids and not self.pad_token_id
        return self.eos_token_ids[0] if is_plain else self.pad_token_id

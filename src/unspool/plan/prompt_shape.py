"""The prompts of a call, as far as plans depend on them."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class PromptShape:
    """What the plan must know of the prompts."""

    num_rows: int
    width: int  # columns of ids, padding included
    longest: int  # positions of the longest row
    has_embeds: bool = False
    is_whole: bool = False  # embeddings that are read in one pass: a picture's tokens see each other
    has_cache: bool = False  # the caller gave past_key_values
    is_endless: bool = False  # and their memory is bounded, however long a text gets
    cache_is_filled: bool = False  # and they hold a part of the prompt
    cache_is_plain: bool = True  # and their keys lie in one buffer a layer
    is_ragged: bool = False  # rows of different lengths, the encoder's among them
    has_negative: bool = False  # a negative prompt was given
    longest_negative: int = 0  # positions it takes in the decoder
    hidden: int = 0  # columns of embeddings that were given without ids, padding included
    end: int | None = None  # columns at which the model's own rule ends every text, as a sound's length does

    @property
    def longest_read(self) -> int:
        """Positions of the longest row that is read, guidance's other rows among them."""
        return max(self.longest, self.longest_negative)

    def without_lengths(self) -> PromptShape:
        """The shape of all prompts that differ from these in their lengths alone; no prompt still has no columns."""
        width, hidden = min(self.width, 1), min(self.hidden, 1)
        return replace(self, width=width, longest=1, longest_negative=0, hidden=hidden, end=None)

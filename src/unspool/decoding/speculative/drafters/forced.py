"""What a grammar forces: tokens that are known before the model is asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from unspool.decoding.rows import Rows
from unspool.decoding.speculative.drafters.base import Draft
from unspool.grammar.forced import find_forced
from unspool.grammar.processor import GrammarLogitsProcessor

FindProcessor = Callable[[], GrammarLogitsProcessor]


class ForcedText:
    """Drafts the text that every document of a row's grammar goes on with.

    The model may cut the same text into other tokens, and then its own are taken: drafts change nothing.
    """

    is_free = True

    def __init__(self, find_processor: FindProcessor) -> None:
        self._find_processor = find_processor

    def propose(self, rows: Rows, limits: Sequence[int]) -> Draft:
        """The tokens of the forced text, but for the last, which may be part of a longer one."""
        processor, ends = self._find_processor(), rows.ends
        guesses: list[list[int]] = [[] for _ in limits]
        for width in {end for end, limit in zip(ends, limits, strict=True) if limit}:
            states = processor.states_of(rows.read_history(width))
            for place, (state, limit) in enumerate(zip(states, limits, strict=True)):
                if limit and ends[place] == width and state is not None:
                    guesses[place] = find_forced(state)[:limit]
        return Draft.of(guesses, rows.device)

    def observe(self, rows: Rows, draft: Draft, accepted: Sequence[int]) -> None:
        """Nothing: states are found from the rows' tokens."""

    def keep_rows(self, index: Sequence[int]) -> None:
        """Nothing: the processor follows the rows."""

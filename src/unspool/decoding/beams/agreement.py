"""What a beam search emits while it runs: the tokens that are certain."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from unspool.decoding.loop import Emitted


class Agreement:
    """Emits the tokens that every live beam of a prompt agrees on, once; nothing emitted is ever taken back.

    What can still be returned is a running beam's descendant or a finished hypothesis that is kept, so the tokens
    that all of these share are certain.
    """

    def __init__(self, num_prompts: int, num_returned: int) -> None:
        self._num_returned = num_returned
        self._num_sure = dict.fromkeys(range(num_prompts), 0)  # of prompts that are not over

    @property
    def open(self) -> list[int]:
        """The prompts whose sequences are not all emitted."""
        return list(self._num_sure)

    def admit(self, others: Sequence[Agreement], firsts: Sequence[int]) -> None:
        """Take in other prompts, of which the first ones have these numbers from now on."""
        for other, first in zip(others, firsts, strict=True):
            self._num_sure |= {first + prompt: count for prompt, count in other._num_sure.items()}

    def forget(self, prompts: Iterable[int]) -> None:
        """Emit no more of some prompts."""
        for prompt in prompts:
            self._num_sure.pop(prompt, None)

    def add(
        self,
        emitted: Emitted,
        prompt: int,
        live: Sequence[Sequence[int]],
        ended: Sequence[tuple[list[int], str]] | None,
    ) -> None:
        """Add what became certain of a prompt; with `ended`, the rest of each sequence that is returned."""
        if prompt not in self._num_sure:
            return
        before, first_row = self._num_sure[prompt], prompt * self._num_returned
        if ended is not None:
            del self._num_sure[prompt]
            for place, (tokens, reason) in enumerate(ended):
                emitted.tokens[first_row + place] = list(tokens[before:])
                emitted.finished[first_row + place] = reason
            return
        sure = _count_shared(live, before)
        if sure > before:
            for place in range(self._num_returned):
                emitted.tokens[first_row + place] = list(live[0][before:sure])
            self._num_sure[prompt] = sure


def _count_shared(sequences: Sequence[Sequence[int]], start: int) -> int:
    """The length of the prefix that all sequences share, which is at least `start`."""
    shortest = min(len(sequence) for sequence in sequences)
    for place in range(start, shortest):
        token = sequences[0][place]
        if any(sequence[place] != token for sequence in sequences):
            return place
    return max(start, shortest)

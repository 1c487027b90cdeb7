"""Classifier-free guidance: away from what another prompt would give (Sanchez et al. 2023, arXiv 2306.17806)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F

from unspool.decoding.observer import Guided
from unspool.decoding.prompts import Prompts
from unspool.decoding.readouts.base import Readout, Scores
from unspool.decoding.rows import Rows
from unspool.kernels.readings import Guide, ReadLogits
from unspool.protocols import Forward, Want


class Guidance(Readout):
    """Reads every row twice in one pass: after its prompt, and after another one.

    Rows `0 … n-1` of the cache are the call's; row `n + i` holds row `i`'s other prompt and the same new tokens. So
    the weights are read once, and every kind of cache, beams and rows that leave follow without a second loop.
    """

    num_sets = 2
    is_plain = False

    def __init__(self, scale: float, others: torch.Tensor, lengths: Sequence[int], prompt_lengths: Sequence[int]):
        self._guide = Guide(scale)
        self._others = others  # (rows, width), right-filled
        self._lengths = list(lengths)
        self._prompt_lengths = list(prompt_lengths)

    @classmethod
    def of(cls, scale: float, prompts: Prompts) -> Guidance:
        """Guidance by the prompts' negative ones; without them the other rows begin with each prompt's last token."""
        if prompts.source is not None:  # the encoder reads the negative prompt; decoders begin alike
            return cls(scale, prompts.ids, prompts.lengths, prompts.lengths)
        if prompts.negative is None:
            num_left = 1 + prompts.num_written
            return cls(scale, prompts.ids[:, -num_left:], [num_left] * prompts.num_rows, prompts.lengths)
        assert prompts.negative.tokens is not None
        return cls(scale, prompts.negative.tokens, prompts.negative.lengths, prompts.lengths)

    def widen(self, want: Want) -> Want:
        """What becomes of the logits, if the pass can do it."""
        return replace(want, epilogue=self._guide)

    def longest_prompt(self, rows: Sequence[int]) -> int:
        """Positions of the longest prompt, those of the other rows among them."""
        return max(*rows, *self._lengths)

    def unread(self, rows: Rows, held: Sequence[int]) -> tuple[torch.Tensor, list[int]]:
        """The call's rows, and after them the other ones."""
        num_rows = len(rows)
        own, counts = rows.unread(held[:num_rows])
        num_new = [length - first for length, first in zip(rows.lengths, self._prompt_lengths, strict=True)]
        left = [first + new - n for first, new, n in zip(self._lengths, num_new, held[num_rows:], strict=True)]
        if left == counts and all(n <= new for n, new in zip(left, num_new, strict=True)):
            return torch.cat((own, own)), counts + left  # new tokens alone, which are the same
        other = self._unread_others(rows, num_new, held[num_rows:])
        width = max(own.shape[1], other.shape[1])
        filled = [F.pad(tokens, (0, width - tokens.shape[1])) for tokens in (own, other)]
        return torch.cat(filled), counts + left

    def _unread_others(self, rows: Rows, num_new: Sequence[int], held: Sequence[int]) -> torch.Tensor:
        """The other rows' tokens after the first `held`, right-filled: a prompt's reading, or one without a cache."""
        history = rows.history()
        width = history.shape[1]
        left = [
            torch.cat((self._others[row, : self._lengths[row]], history[row, width - new :]))[held[row] :]
            for row, new in enumerate(num_new)
        ]
        return torch.nn.utils.rnn.pad_sequence(left, batch_first=True)

    def select_rows(self, index: Sequence[int]) -> None:
        """Follow rows of the call that are repeated or stay."""
        self._others = self._others[list(index)]
        self._lengths = [self._lengths[row] for row in index]
        self._prompt_lengths = [self._prompt_lengths[row] for row in index]

    def admit(self, others: Sequence[Guidance], firsts: Sequence[int]) -> None:
        """Take in rows that are led away from prompts of their own by the same scale."""
        if any(one._guide != self._guide for one in others):
            raise ValueError("rows that are guided by different scales can't be read by one readout")
        readouts = (self, *others)
        width = max(one._others.shape[1] for one in readouts)
        self._others = torch.cat([F.pad(one._others, (0, width - one._others.shape[1])) for one in readouts])
        self._lengths = [length for one in readouts for length in one._lengths]
        self._prompt_lengths = [length for one in readouts for length in one._prompt_lengths]

    def read(self, forward: Forward, rows: Rows, *, normalise: bool) -> Scores:  # both are normalised always
        """Guided log-probabilities, not normalised again: as in the reference, `renormalize_logits` does that."""
        logits, num_rows = forward.logits.float(), len(rows)  # (2 * rows, vocab)
        read: ReadLogits | None = forward.epilogue
        if read is not None and forward.likeliest is not None:
            result = Scores(logits[:num_rows], read.scores, forward.likeliest[:num_rows])
        else:
            result = Scores(logits[:num_rows], self._guide.read(logits))
        if self.observer is not None:
            self.observer.see(Guided(result.logits, logits[num_rows:], result.scores))
        return result

"""Log-probabilities of what a beam search returns, kept of every token that it may still return."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from unspool.decoding.beams.settings import BeamSettings
from unspool.decoding.scorer import Scorer
from unspool.kernels.sending import fetch_once, send
from unspool.outputs import TokenLogprob


@dataclass(slots=True)
class Prefix:
    """New tokens that beams of a prompt have written, and what was reported of the token behind them."""

    logprobs: dict[int, float] = field(default_factory=dict)  # of the tokens that it may go on with
    likeliest: tuple[tuple[int, float], ...] = ()
    longer: dict[int, Prefix] = field(default_factory=dict)  # by the token that it went on with


class BeamReports:
    """The log-probabilities of a search's tokens, found again by the texts that they stand in.

    A token's log-probability follows from the text before it, whichever beam wrote that, so what is returned needs no
    beam of origin; a search ends with texts that no row holds any more.
    """

    def __init__(self, num_prompts: int, num_beams: int, num_returned: int, num_top: int) -> None:
        roots = [Prefix() for _ in range(num_prompts)]
        self._num_top = num_top
        self._written = [root for root in roots for _ in range(num_beams)]  # by each row
        self._emitted = [root for root in roots for _ in range(num_returned)]  # of each sequence that is returned

    def note(
        self,
        logits: torch.Tensor,
        offered: Iterable[tuple[int, int]],
        parents: Sequence[int],
        tokens: Sequence[int],
    ) -> None:
        """Enter a step: its logits (rows, vocab), the rows and tokens of all candidates, and for each row that on which
        it goes on from and its next token."""
        pairs = list(dict.fromkeys([*offered, *zip(parents, tokens, strict=True)]))
        own, likeliest = self._read(logits, pairs)
        for (row, token), logprob in zip(pairs, own, strict=True):
            self._written[row].logprobs.setdefault(token, logprob)
        for prefix, found in zip(self._written, likeliest, strict=True):
            prefix.likeliest = prefix.likeliest or found
        moved = zip(parents, tokens, strict=True)
        self._written = [self._written[parent].longer.setdefault(token, Prefix()) for parent, token in moved]

    def _read(
        self, logits: torch.Tensor, pairs: Sequence[tuple[int, int]]
    ) -> tuple[list[float], list[tuple[tuple[int, float], ...]]]:
        """Log-probabilities of tokens behind rows, and the likeliest tokens of each row."""
        values = torch.log_softmax(logits.float(), dim=-1)
        rows, tokens = (send([pair[at] for pair in pairs], logits.device) for at in (0, 1))
        top = values.topk(min(self._num_top, values.shape[-1]), dim=-1)
        parts = [values[rows, tokens], top.values.flatten(), top.indices.flatten()]
        packed = torch.cat([part.double() for part in parts])  # exact, in one copy
        found = fetch_once(packed).read(lambda values: values.tolist())
        count, size = len(pairs), top.values.numel()
        ranked = list(zip(map(int, found[count + size :]), found[count : count + size], strict=True))
        width = top.values.shape[1]
        return found[:count], [tuple(ranked[row * width : (row + 1) * width]) for row in range(len(logits))]

    def keep_rows(self, index: Sequence[int]) -> None:
        """Follow rows that stay while others leave."""
        self._written = [self._written[row] for row in index]

    def take(self, row: int, tokens: Sequence[int]) -> list[TokenLogprob]:
        """What is reported of the tokens that are emitted next of a sequence."""
        prefix, found = self._emitted[row], []
        for token in tokens:
            found.append(TokenLogprob(token, prefix.logprobs[token], prefix.likeliest))
            prefix = prefix.longer.get(token) or Prefix()  # none: the token ended the text
        self._emitted[row] = prefix
        return found


def make_reports(scorer: Scorer, settings: BeamSettings, num_prompts: int) -> BeamReports | None:
    """What a search keeps of log-probabilities; None if they are not asked for."""
    num_top = scorer.record.num_top
    if num_top is None:
        return None
    return BeamReports(num_prompts, settings.num_beams, settings.num_returned, num_top)

"""One position of a text in numbers: the distribution before and after the processors, and what each of them did."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from unspool.config import GenerationConfig
from unspool.decoding.observer import Scored
from unspool.grammar.processor import GrammarLogitsProcessor
from unspool.logits.order import PROCESSORS
from unspool.registry import find_name
from unspool.trace.values import Show, shorten

NUM_TOP = 20  # tokens of an event, beside the chosen one


@dataclass(slots=True)
class Position:
    """What is kept of a position until its token is known."""

    raw: torch.Tensor  # (vocab,): log-probabilities of the model
    processed: torch.Tensor  # (vocab,): log-probabilities after the processors
    cut_by: torch.Tensor  # (vocab,) int16: the number of the step that took a token out, from 1 on; 0 if none did
    steps: list[dict[str, Any]]
    grammar: dict[str, Any] | None  # how many tokens a grammar allowed

    @classmethod
    def read(cls, scored: Scored, settings: GenerationConfig, readout: tuple[str, str] | None) -> Position:
        """The position of the first row; `readout` is the name and the setting of one that changed the logits."""
        logits, given = scored.logits[0].float(), scored.given[0]
        cut_by = torch.zeros(len(logits), dtype=torch.int16, device=logits.device)
        steps, grammar = [], None
        if readout is not None:
            steps.append(_describe_step(*readout, torch.log_softmax(logits, dim=-1), given, cut_by, 1))
        for number, step in enumerate(scored.steps, start=1 + len(steps)):
            name = getattr(step.processor, "__name__", type(step.processor).__name__)
            setting = find_setting(step.processor, settings)
            steps.append(_describe_step(name, setting, step.before[0], step.after[0], cut_by, number))
            if isinstance(step.processor, GrammarLogitsProcessor):
                allowed = steps[-1]["left"]
                grammar = {"allowed": allowed, "forced": allowed == 1}
        raw, processed = torch.log_softmax(logits, dim=-1), torch.log_softmax(scored.scores[0].float(), dim=-1)
        return cls(raw, processed, cut_by, steps, grammar)

    def describe(self, token: int, show: Show) -> dict[str, Any]:
        """The numbers of an event, for the token that was chosen here."""
        raw, processed = self.raw, self.processed
        ids = raw.topk(min(NUM_TOP, len(raw))).indices.tolist()
        ids += [] if token in ids else [token]
        columns = zip(
            ids, raw[ids].exp().tolist(), processed[ids].exp().tolist(), self.cut_by[ids].tolist(), strict=True
        )
        return {
            "logprob": shorten(float(processed[token])),
            "raw_logprob": shorten(float(raw[token])),
            "rank": 1 + int((raw > raw[token]).sum()),
            "entropy": _measure_entropy(processed),
            "raw_entropy": _measure_entropy(raw),
            "top": [
                {
                    "id": one,
                    "text": show(one),
                    "raw": shorten(before),
                    "p": shorten(after),
                    "cut_by": self.steps[number - 1]["processor"] if number else None,
                }
                for one, before, after, number in columns
            ],
            "steps": self.steps,
        }


def _describe_step(
    name: str, setting: str | None, before: torch.Tensor, after: torch.Tensor, cut_by: torch.Tensor, number: int
) -> dict[str, Any]:
    """What a processor did to scores (vocab,); tokens that it took out are marked with its `number`."""
    was_left, is_left = before > -torch.inf, after > -torch.inf
    is_cut = was_left & ~is_left
    cut_by.masked_fill_(is_left, 0)  # a grammar may bring tokens back that a readout had left out
    cut_by.masked_fill_(is_cut, number)
    removed, left = int(is_cut.sum()), int(is_left.sum())
    line = None
    if removed and left:
        line = shorten(float(torch.softmax(before.float(), dim=-1)[is_left].min()))
    changed = int(((before != after) & was_left & is_left).sum())
    return {"processor": name, "setting": setting, "removed": removed, "left": left, "changed": changed, "line": line}


def _measure_entropy(logprobs: torch.Tensor) -> float | None:
    """The entropy in nats of log-probabilities, -inf among them."""
    probabilities = logprobs.exp()
    return shorten(abs(float(torch.xlogy(probabilities, probabilities).sum())))


def find_setting(processor: Any, settings: GenerationConfig) -> str | None:
    """The setting that switched a processor on; None for a caller's own."""
    names = [kind.__name__ for kind in type(processor).__mro__]
    entries = [entry for entry in PROCESSORS.values() if find_name(entry.processor) in names]
    asked = [entry for entry in entries if getattr(settings, entry.setting, None) not in (None, *entry.off)]
    return next((entry.setting for entry in asked or entries), None)

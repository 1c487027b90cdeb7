"""Fake models for drafting: a target, a draft model that is often right, and one that can leave early."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from tests.fakes import FakeEncoderDecoder, FakeModel
from unspool.cache import Cache
from unspool.protocols import LAST, Forward, Want


def blur(model: FakeModel, amount: float, seed: int = 7) -> FakeModel:
    """Another model that says nearly the same."""
    other = type(model)(model.info.vocab_size)
    generator = torch.Generator().manual_seed(seed)
    other.table = model.table + torch.randn(model.table.shape, generator=generator) * amount
    other.places = model.places + torch.randn(model.places.shape, generator=generator) * amount
    if isinstance(model, FakeEncoderDecoder) and isinstance(other, FakeEncoderDecoder):
        other.source_table = model.source_table
    return other


class Layered(FakeModel):
    """A fake of three layers: after one or two of them it says nearly what it says after all."""

    def __init__(self, vocab: int = 23, amount: float = 1.0) -> None:
        super().__init__(vocab)
        self.info = replace(self.info, num_layers=3, can=self.info.can | {"early_exit"})
        self._early = blur(FakeModel(vocab), amount)

    def forward(
        self,
        tokens: torch.Tensor | None,
        cache: Cache,
        *,
        counts: Sequence[int] | None = None,
        want: Want = LAST,
        embeds: torch.Tensor | None = None,
    ) -> Forward:
        if want.exit_layer is None:
            return super().forward(tokens, cache, counts=counts, want=want, embeds=embeds)
        assert 1 <= want.exit_layer < 3
        return self._early.forward(tokens, cache, counts=counts, embeds=embeds)


def make_drafters(target: FakeModel, amount: float = 1.0, **more: Any) -> dict[str, dict[str, Any]]:
    """Every drafter's arguments, by name."""
    models = {"num_assistant_tokens": 4, "assistant_confidence_threshold": 0.0, **more}
    return {
        "lookup": {"prompt_lookup_num_tokens": 4, "max_matching_ngram_size": 2},
        "model": {"assistant_model": blur(target, amount), **models},
        "unsure model": {"assistant_model": blur(target, amount), **models, "assistant_confidence_threshold": 0.5},
        "lookup and model": {"assistant_model": blur(target, amount), "prompt_lookup_num_tokens": 3, **models},
        "early exit": {"assistant_early_exit": 2, **models},
        "auto": {"speculate": "auto"},
        "auto model": {"assistant_model": blur(target, amount), "speculate": "auto", "num_assistant_tokens": 4},
    }


DRAFTERS = ("lookup", "model", "lookup and model", "unsure model", "early exit", "auto", "auto model")

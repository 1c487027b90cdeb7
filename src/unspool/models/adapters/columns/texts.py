"""A transformers model over its own cache that reads texts of its own, as a draft model with another tokenizer does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from unspool.cache import Cache
from unspool.config import GenerationConfig
from unspool.models.adapters.adapted import find_device
from unspool.models.adapters.columns.model import ColumnModel
from unspool.models.adapters.columns.preparation import prepare_call
from unspool.models.adapters.columns.state import ColumnCache, Columns
from unspool.models.adapters.description import describe_loosely
from unspool.protocols import LAST, Encoded, Forward, Model, Want


class TextModel(ColumnModel):
    """The model of a call without the call's inputs: what an empty cache is given to read first begins a text."""

    @classmethod
    def of(cls, model: ColumnModel) -> ColumnModel:
        """A model for texts of its own; an encoder-decoder, whose source is the call's, as it is."""
        prepare = model.call.prepare_text
        if model.is_pair or prepare is None:
            return model
        first = torch.zeros(1, 1, dtype=torch.long, device=find_device(model))
        made = cls(model.inner, model.description, prepare(first, torch.ones_like(first)))
        made.call.prepare_text = prepare
        return made

    @classmethod
    def open(cls, model: Any) -> Model | None:
        """An object that our caches can't serve, which drafts for any model; None for an encoder-decoder."""
        if describe_loosely(model).info.is_encoder_decoder:
            return None
        first = torch.zeros(1, 1, dtype=torch.long, device=find_device(model))
        given = {"attention_mask": torch.ones_like(first)}
        return cls.of(prepare_call(model, first, given, GenerationConfig(), f"{type(model).__name__} drafts"))

    def new_cache(
        self,
        kind: str = "dynamic",
        rows: int = 1,
        capacity: int | None = None,
        encoded: Encoded | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> ColumnCache:
        """A cache of transformers' own kind that can be emptied, for another text."""
        cache = super().new_cache(kind, rows, capacity, encoded, config)
        cache.begins_texts = True
        return cache

    @torch.no_grad()
    def forward(
        self,
        tokens: torch.Tensor | None,
        cache: Cache,
        *,
        counts: Sequence[int] | None = None,
        want: Want = LAST,
        embeds: torch.Tensor | None = None,
    ) -> Forward:
        """Read new tokens after what the cache holds, or the beginning of a text."""
        assert isinstance(cache, ColumnCache)
        if cache.columns is not None or tokens is None:
            return super().forward(tokens, cache, counts=counts, want=want, embeds=embeds)
        real = list(counts) if counts is not None else [tokens.shape[1]] * len(tokens)
        self._begin(cache, tokens, real)
        forward = super().forward(tokens, cache, counts=real, want=want)
        cache.prompt = cache.prompt.copy()
        cache.prompt.cut(0)  # all of the text can be taken back
        return forward

    def _begin(self, cache: ColumnCache, tokens: torch.Tensor, real: Sequence[int]) -> None:
        """Make a text the prompt of a cache, by the model's own rules."""
        laid = Columns.right_aligned(tokens, real, counts_positions=False)
        assert self.call.prepare_text is not None and cache.begin_inputs is not None
        made = self.call.prepare_text(laid.ids, laid.mask.long())
        made.prompt.mask = laid.mask  # a text without tokens too
        cache.prompt = made.prompt
        cache.inputs = cache.begin_inputs(made.inputs, len(real))
        cache.first_inputs = dict(cache.inputs)

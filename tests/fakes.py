"""A model of twenty lines: enough for every strategy, and small enough to check by hand."""

from __future__ import annotations

import torch

from unspool.cache import DynamicCache, StaticCache
from unspool.protocols import LAST, Forward, ModelInfo


class FakeModel:
    """Scores depend on the whole visible past, so a wrong position, mask or row shows at once."""

    def __init__(self, vocab: int = 23, max_context: int | None = None, seed: int = 0, **info) -> None:
        self.info = ModelInfo("fake", vocab, 4, 1, 1, max_context=max_context, **info)
        self.table = torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(seed)) * 3
        self.device, self.dtype = torch.device("cpu"), torch.float32
        self.num_passes = 0
        self.num_tokens_read = 0

    def new_cache(self, kind="dynamic", rows=1, capacity=None, encoded=None):
        if kind == "static":

            class Config:
                num_attention_heads, num_hidden_layers, hidden_size = 1, 1, 1
                max_position_embeddings = capacity

            return StaticCache(Config, rows, capacity)
        return DynamicCache(capacity=capacity)

    def forward(self, tokens, cache, *, counts=None, want=LAST, embeds=None):
        self.num_passes += 1
        values = tokens.float() if embeds is None else embeds[..., 0]
        rows, new = values.shape
        self.num_tokens_read += sum(counts) if counts is not None else rows * new
        span = cache.begin(rows, new, counts)
        keys, _ = cache.write(0, values[:, :, None, None, None].expand(-1, -1, 2, 1, 1))
        keys = keys[:, 0, :, 0]  # (rows, keys): the token at each position
        position = torch.arange(span.stop)
        visible = position <= span.positions[..., None]  # (rows, new, keys)
        weight = visible * 0.5 ** (span.positions[..., None] - position).clamp(min=0)
        cache.end()
        past = self.table[keys.long()]  # (rows, keys, vocab)
        logits = torch.einsum("rnk,rkv->rnv", weight, past)  # (rows, new, vocab)
        states = (values[..., None].expand(-1, -1, 4),) * 2 if want.hidden_states else None
        weights = (weight[:, None],) if want.attentions else None
        if want.logits == "last":
            last = torch.tensor([count - 1 for count in span.counts]).clamp(min=0)
            logits = logits[torch.arange(rows), last]
        return Forward(logits, states, weights)

"""Models of twenty lines: enough for every strategy, and small enough to check by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import tokenizers
import torch

from unspool.cache import Cache, DynamicCache, EncoderDecoderCache, StaticCache
from unspool.protocols import LAST, Encoded, Forward, ModelInfo, Want
from unspool.text import Tokenizer


class FakeModel:
    """Scores depend on the whole visible past and on the position, so a wrong position, mask or row shows at once."""

    def __init__(self, vocab: int = 23, max_context: int | None = None, seed: int = 0, **info: Any) -> None:
        self.info = ModelInfo("fake", vocab, 4, 1, 1, max_context=max_context, **info)
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.randn(vocab, vocab, generator=generator) * 3
        self.places = torch.randn(7, vocab, generator=generator) * 3  # without it, greedy rows soon repeat one token
        self.reading = torch.randn(vocab, 4, generator=generator)
        self.device, self.dtype = torch.device("cpu"), torch.float32
        self.num_passes = 0
        self.num_tokens_read = 0
        self.rows_of_passes: list[int] = []

    def score(self, ids: Sequence[int]) -> torch.Tensor:
        """The next token's logits (vocab,) after a row of ids, by definition: no cache, no batch."""
        decay = torch.tensor([0.5 ** (len(ids) - 1 - place) for place in range(len(ids))])
        return decay @ self.table[list(ids)] + self.places[(len(ids) - 1) % 7]

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Embeddings (rows, length, 4) that say the same as the ids."""
        return ids[..., None].float().expand(*ids.shape, 4)

    def new_cache(
        self, kind: str = "dynamic", rows: int = 1, capacity: int | None = None, encoded: Encoded | None = None
    ) -> Cache:
        return new_fake_cache(kind, rows, capacity)

    def forward(
        self,
        tokens: torch.Tensor | None,
        cache: Cache,
        *,
        counts: Sequence[int] | None = None,
        want: Want = LAST,
        embeds: torch.Tensor | None = None,
    ) -> Forward:
        values = embeds[..., 0] if tokens is None else tokens.float()
        self._count(values, counts)
        logits, weight, span_counts = self._attend(values, cache, counts)
        last = logits @ self.reading  # (rows, new, 4)
        states = (self.embed(values), last) if want.hidden_states else None
        weights = (weight[:, None],) if want.attentions else None
        last_states = last if want.last_states else None
        return Forward(_take(logits, span_counts, want), states, weights, last_states=last_states)

    def encode(self, *_: Any, **__: Any) -> Encoded:
        raise AssertionError("a decoder-only model has no encoder")

    def _count(self, values: torch.Tensor, counts: Sequence[int] | None) -> None:
        self.num_passes += 1
        self.rows_of_passes.append(values.shape[0])
        self.num_tokens_read += sum(counts) if counts is not None else values.numel()

    def _attend(
        self, values: torch.Tensor, cache: Cache, counts: Sequence[int] | None
    ) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        span = cache.begin(*values.shape, counts)
        keys, _ = cache.write(0, values[:, :, None, None, None].expand(-1, -1, 2, 1, 1))
        keys = keys[:, 0, :, 0]  # (rows, keys): the token at each position
        position = torch.arange(span.stop)
        visible = position <= span.positions[..., None]  # (rows, new, keys)
        weight = visible * 0.5 ** (span.positions[..., None] - position).clamp(min=0)
        cache.end()
        logits = weight @ self.table[keys.long()]  # (rows, new, vocab)
        return logits + self.places[span.positions % 7], weight, span.counts


class FakeLayers(FakeModel):
    """The same with six layers, whose early predictions depend on the past and on the last token."""

    def __init__(self, vocab: int = 23, seed: int = 0, **info: Any) -> None:
        super().__init__(vocab, seed=seed)
        self.info = ModelInfo("fake", vocab, 4, 6, 1, can=self.info.can | {"early_logits"}, **info)
        self.early = torch.randn(6, vocab, vocab, generator=torch.Generator().manual_seed(seed + 1)) * 3

    def score_layer(self, ids: Sequence[int], layer: int) -> torch.Tensor:
        """A layer's logits (vocab,) after a row of ids, by definition."""
        return self.score(ids) * 0.3 + self.early[layer, ids[-1]]

    def forward(
        self,
        tokens: torch.Tensor | None,
        cache: Cache,
        *,
        counts: Sequence[int] | None = None,
        want: Want = LAST,
        embeds: torch.Tensor | None = None,
    ) -> Forward:
        forward = super().forward(tokens, cache, counts=counts, want=want, embeds=embeds)
        read = tokens if tokens is not None else embeds[..., 0].long()
        ends = torch.tensor(counts or [read.shape[1]] * read.shape[0]) - 1
        last = read.gather(1, ends.clamp(min=0)[:, None])[:, 0]
        forward.early_logits = tuple(forward.logits * 0.3 + self.early[layer, last] for layer in want.early)
        return forward


class FakeEncoderDecoder(FakeModel):
    """The same, whose scores also depend on every token of a source and its place."""

    def __init__(self, vocab: int = 23, seed: int = 0, **info: Any) -> None:
        super().__init__(vocab, seed=seed, is_encoder_decoder=True, **info)
        self.source_table = torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(seed + 1)) * 5
        self.num_encodings = 0

    def score(self, ids: Sequence[int], source: Sequence[int] = ()) -> torch.Tensor:
        """The next token's logits (vocab,), by definition."""
        near = torch.tensor([1 / (place + 1) for place in range(len(source))])
        return super().score(ids) + near @ self.source_table[list(source)]

    def encode(
        self,
        tokens: torch.Tensor | None,
        counts: Sequence[int] | None = None,
        *,
        want: Want = LAST,
        embeds: torch.Tensor | None = None,
    ) -> Encoded:
        self.num_encodings += 1
        states = self.embed(tokens) if tokens is not None else embeds
        rows, length = states.shape[:2]
        hidden = (states, states) if want.hidden_states else None
        weights = (torch.ones(rows, 1, length, length),) if want.attentions else None
        return Encoded(states, list(counts or [length] * rows), hidden, weights)

    def new_cache(
        self, kind: str = "dynamic", rows: int = 1, capacity: int | None = None, encoded: Encoded | None = None
    ) -> Cache:
        cross = DynamicCache(capacity=encoded.states.shape[1])
        cross.begin(*encoded.states.shape[:2], encoded.lengths)
        cross.write(0, encoded.states[:, :, :1, None, None].expand(-1, -1, 2, 1, 1))
        cross.end()
        return EncoderDecoderCache(new_fake_cache(kind, rows, capacity), cross)

    def forward(
        self,
        tokens: torch.Tensor | None,
        cache: EncoderDecoderCache,
        *,
        counts: Sequence[int] | None = None,
        want: Want = LAST,
        embeds: torch.Tensor | None = None,
    ) -> Forward:
        forward = super().forward(tokens, cache, counts=counts, want=want, embeds=embeds)
        source = cache.read_sources()[0][0][:, 0, :, 0].long()  # (rows, source)
        place = torch.arange(source.shape[1])
        near = (place < torch.tensor(cache.source_lengths)[:, None]) / (place + 1)  # (rows, source)
        across = torch.einsum("rs,rsv->rv", near, self.source_table[source])
        forward.logits = forward.logits + (across if want.logits == "last" else across[:, None])
        if want.attentions:
            forward.cross_attentions = (near[:, None, None].expand(-1, 1, tokens.shape[1], -1),)
        return forward


def decode_slowly(
    model: FakeModel,
    prompt: Sequence[int],
    num_new: int,
    eos: Sequence[int] = (),
    choose: Callable[[torch.Tensor, int], int] = lambda scores, position: int(scores.argmax()),
    **score: Any,
) -> list[int]:
    """The tokens after a prompt, by the loop everybody knows; `choose` picks one for a position."""
    ids: list[int] = list(prompt)
    for _ in range(num_new):
        ids.append(choose(model.score(ids, **score), len(ids)))
        if ids[-1] in eos:
            break
    return ids[len(prompt) :]


def new_fake_cache(kind: str, rows: int, capacity: int | None) -> Cache:
    """A cache of one layer, one head, width 1."""
    if kind == "static":
        return StaticCache(SimpleNamespace(num_attention_heads=1, num_hidden_layers=1, hidden_size=1), rows, capacity)
    return DynamicCache(capacity=capacity)


def pad_left(rows: Sequence[Sequence[int]], pad: int = 0, width: int = 0) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask` of ragged rows, at least `width` columns wide."""
    width = max(width, *map(len, rows))
    ids = [[pad] * (width - len(row)) + list(row) for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def _take(logits: torch.Tensor, counts: list[int], want: Want) -> torch.Tensor:
    if want.logits == "all":
        return logits
    last = torch.tensor([count - 1 for count in counts]).clamp(min=0)
    return logits[torch.arange(len(counts)), last]


CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if tools %}{{ tools | length }} tools\n{% endif %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def make_tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer of 160 tokens: three special ones, bytes of ASCII and of a few characters, merges."""
    letters = bytes_to_letters()
    known = [*range(32, 127), 10, *sorted({*"é€日😀".encode()})]
    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2} | {letters[byte]: 3 + place for place, byte in enumerate(known)}
    merges = []
    for word in ("\u0120the", "\u0120cat", "\u0120and", "the", "stop", "ing", "hello", "world", "user:"):
        for end in range(2, len(word) + 1):
            if word[:end] not in vocab:
                merges.append((word[: end - 1], word[end - 1]))
                vocab[word[:end]] = len(vocab)
    for place in range(160 - len(vocab)):
        vocab[f"<extra{place}>"] = len(vocab)
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    named = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    return Tokenizer(backend, special_tokens=named, chat_template=CHAT_TEMPLATE)


def bytes_to_letters() -> dict[int, str]:
    """The letter that byte-level vocabularies write for each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + place) for place, byte in enumerate(rest)}

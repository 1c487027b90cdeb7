"""T5 (Raffel et al., 2020): an encoder, a decoder with cross-attention, and relative position biases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from unspool.cache import Cache, DynamicCache, EncoderDecoderCache, Span
from unspool.errors import InputError, UnsupportedError
from unspool.kernels.activations import find_activation
from unspool.kernels.attention import attend
from unspool.kernels.branched import attend_shared
from unspool.kernels.forked import fold_mask
from unspool.kernels.relative import distance_buckets
from unspool.models.arrangement import Arrangement, read_mask
from unspool.models.decoder.reading import read_keys
from unspool.models.decoder.views import AttentionView
from unspool.models.encoder_decoder.t5_weights import T5Layer, T5Spec, T5Weights
from unspool.models.native import ModelConfig, NativeModel, take_last
from unspool.models.weights import Embedding, Linear
from unspool.outputs import Output
from unspool.protocols import LAST, Encoded, Forward, ModelInfo, Want
from unspool.shortage import explain_shortage

_FIRST_TABLE = 512  # initial size of a table, in distances


@dataclass
class Seq2SeqOutput(Output):
    """What calling an encoder-decoder returns."""

    logits: torch.Tensor | None = None  # (rows, columns, vocab)
    past_key_values: Cache | None = None
    decoder_hidden_states: tuple[torch.Tensor, ...] | None = None
    decoder_attentions: tuple[torch.Tensor, ...] | None = None
    cross_attentions: tuple[torch.Tensor, ...] | None = None
    encoder_last_hidden_state: torch.Tensor | None = None
    encoder_hidden_states: tuple[torch.Tensor, ...] | None = None
    encoder_attentions: tuple[torch.Tensor, ...] | None = None


class T5(NativeModel):
    """An encoder-decoder of the T5 family."""

    weights: T5Weights

    def __init__(
        self, spec: T5Spec, weights: T5Weights, config: Mapping[str, Any], device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__(device, dtype)
        self.spec = spec
        self.weights = weights
        self.info = _describe(spec)
        self.config = _normalise(spec, config)
        self._refresh()

    def _refresh(self) -> None:
        self._activate = find_activation(self.spec.activation)
        self._behind: torch.Tensor | None = None  # (heads, distances): the decoder's bias

    def get_input_embeddings(self) -> Embedding:
        return self.weights.embedding

    def get_output_embeddings(self) -> Linear:
        return self.weights.head

    # --- the encoder ---------------------------------------------------------------------------------
    @explain_shortage("an encoder read its source")
    @torch.no_grad()
    def encode(
        self,
        tokens: torch.Tensor | None,
        counts: Sequence[int] | None = None,
        *,
        want: Want = LAST,
        embeds: torch.Tensor | None = None,
    ) -> Encoded:
        x = self._embed(tokens, embeds)
        rows, length, _ = x.shape
        lengths = list(counts) if counts is not None else [length] * rows
        mask = self._both_ways_bias(length)  # (1, heads, source, source)
        visible = _visible(lengths, length, self.device)
        if visible is not None:
            mask = torch.where(visible, mask, -torch.inf)
        hidden, attentions = [], []
        for layer in self.weights.encoder.layers:
            if want.hidden_states:
                hidden.append(x)
            q, k, v = (part.transpose(1, 2) for part in self._heads(layer.qkv(layer.attn_norm(x)), 3).unbind(2))
            read, weights = attend(q, k, v, scale=1.0, mask=mask, want_weights=want.attentions)
            x = x + layer.out(read.transpose(1, 2).flatten(2))
            x = x + self._feed(layer, x)
            if weights is not None:
                attentions.append(weights)
        x = self.weights.encoder.final_norm(x)
        return Encoded(
            x,
            lengths,
            (*hidden, x) if want.hidden_states else None,
            tuple(attentions) if want.attentions else None,
        )

    def new_cache(
        self,
        kind: str = "dynamic",
        rows: int = 1,
        capacity: int | None = None,
        encoded: Encoded | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> EncoderDecoderCache:
        if encoded is None:
            raise InputError("an encoder-decoder's cache holds what was encoded: give new_cache(…, encoded=…)")
        own = self._new_own_cache(kind, rows, capacity, self.spec.num_decoder_layers, config)
        return EncoderDecoderCache(own, self._project_source(DynamicCache(capacity=encoded.states.shape[1]), encoded))

    @torch.no_grad()
    def _project_source(self, cross: Cache, encoded: Encoded) -> Cache:
        """Write every layer's keys and values of the encoder's states, once."""
        rows, length, _ = encoded.states.shape
        cross.begin(rows, length, encoded.lengths, self.device)
        for index, layer in enumerate(self.weights.decoder.layers):
            assert layer.cross_kv is not None
            cross.write(index, self._heads(layer.cross_kv(encoded.states), 2))
        cross.end()
        return cross

    # --- the decoder ---------------------------------------------------------------------------------
    @explain_shortage("a model read tokens")
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
        states, answer = self._run(tokens, cache, counts, want, embeds)
        if want.logits == "last":
            states = take_last(states, counts)  # (rows, hidden)
        answer.logits = self._project(states)
        return answer

    def _run(
        self,
        tokens: torch.Tensor | None,
        cache: Cache,
        counts: Sequence[int] | None,
        want: Want,
        embeds: torch.Tensor | None,
    ) -> tuple[torch.Tensor, Forward]:
        """Final states (rows, new, hidden), and a `Forward` that lacks only the logits."""
        pair = _check_pair(cache)
        x = self._embed(tokens, embeds)
        span = cache.begin(x.shape[0], x.shape[1], counts, self.device)
        mask = self._look_back(cache, span)
        sources, visible = pair.read_sources(), pair.mask_source(self.device)
        hidden, own_weights, cross_weights = [], [], []
        for index, layer in enumerate(self.weights.decoder.layers):
            if want.hidden_states:
                hidden.append(x)
            x, weights = self._attend_back(index, layer, x, cache, mask, want.attentions)
            x, across = self._attend_across(layer, x, sources[index], visible, want.attentions)
            x = x + self._feed(layer, x)
            if weights is not None and across is not None:
                own_weights.append(weights)
                cross_weights.append(across)
        cache.end()
        x = self.weights.decoder.final_norm(x)
        answer = Forward(
            x,
            (*hidden, x) if want.hidden_states else None,
            tuple(own_weights) if want.attentions else None,
            tuple(cross_weights) if want.attentions else None,
            last_states=x if want.last_states else None,
        )
        return x, answer

    def _attend_back(
        self, index: int, layer: T5Layer, x: torch.Tensor, cache: Cache, mask: torch.Tensor, want_weights: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        qkv = self._heads(layer.qkv(layer.attn_norm(x)), 3)  # (rows, new, 3, heads, width)
        keys, values = cache.write(index, qkv[:, :, 1:])
        queries = qkv[:, :, 0].transpose(1, 2)
        view = AttentionView(0, mask, False, None, num_forks=cache.num_forks)
        read, weights = read_keys(queries, keys, values, view, scale=1.0, want_weights=want_weights)
        return x + layer.out(read.transpose(1, 2).flatten(2)), weights

    def _attend_across(
        self,
        layer: T5Layer,
        x: torch.Tensor,
        source: tuple[torch.Tensor, torch.Tensor],
        visible: torch.Tensor | None,
        want_weights: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        assert layer.cross_norm is not None and layer.cross_q is not None and layer.cross_out is not None
        queries = self._heads(layer.cross_q(layer.cross_norm(x)), 1)[:, :, 0].transpose(1, 2)
        read, weights = attend_shared(queries, *source, scale=1.0, mask=visible, want_weights=want_weights)
        return x + layer.cross_out(read.transpose(1, 2).flatten(2)), weights

    # --- shared by both ------------------------------------------------------------------------------
    def _embed(self, tokens: torch.Tensor | None, embeds: torch.Tensor | None) -> torch.Tensor:
        if tokens is not None:
            return self.weights.embedding(tokens)
        assert embeds is not None
        return embeds.to(self.dtype)

    def _heads(self, x: torch.Tensor, parts: int) -> torch.Tensor:
        return x.view(*x.shape[:-1], parts, self.spec.num_heads, self.spec.head_dim)

    def _feed(self, layer: T5Layer, x: torch.Tensor) -> torch.Tensor:
        up = layer.up(layer.ffn_norm(x))
        if not self.spec.is_gated:
            return layer.down(self._activate(up))
        gate, value = up.chunk(2, dim=-1)
        return layer.down(self._activate(gate).mul_(value))

    def _project(self, states: torch.Tensor) -> torch.Tensor:
        return self.weights.head(states if self.spec.head_scale == 1.0 else states * self.spec.head_scale)

    def _both_ways_bias(self, length: int) -> torch.Tensor:
        """The encoder's bias: one half of the buckets looks back, the other ahead."""
        half = self.spec.num_buckets // 2
        buckets = distance_buckets(length, half, self.spec.max_distance).to(self.device)
        places = torch.arange(length, device=self.device)
        ahead = places - places[:, None]  # key - query
        found = self.weights.encoder.bias[buckets[ahead.abs()] + half * (ahead > 0)]
        return found.permute(2, 0, 1)[None]  # (1, heads, source, source)

    def _look_back(self, cache: Cache, span: Span) -> torch.Tensor:
        """The decoder's bias by each row's own positions; masked keys have minus infinity."""
        if self._behind is None or self._behind.shape[1] < span.stop:
            room = max(span.stop, 2 * self._behind.shape[1] if self._behind is not None else _FIRST_TABLE)
            buckets = distance_buckets(room, self.spec.num_buckets, self.spec.max_distance).to(self.device)
            self._behind = self.weights.decoder.bias[buckets].t().contiguous()
        queries = (span.positions[:1] if span.is_uniform else span.positions)[:, :, None]
        back = queries - cache.key_positions(span)[:, None]  # (rows or 1, new, keys)
        bias = self._behind[:, back.clamp(min=0)].transpose(0, 1)  # (rows or 1, heads, new, keys)
        if not cache.is_in_order:
            visible = cache.mask(span)
            assert isinstance(visible, torch.Tensor)
            bias = torch.where(visible, bias, -torch.inf)
            return bias if cache.num_forks == 1 else fold_mask(bias, cache.num_forks, *[self.spec.num_heads] * 2)
        return bias if cache.mask(span) is None else bias.masked_fill((back < 0)[:, None], -torch.inf)

    # --- the reference's way of calling ---------------------------------------------------------------
    @torch.no_grad()
    def __call__(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.Tensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs: Any = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        decoder_inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = True,
    ) -> Seq2SeqOutput | tuple[Any, ...]:
        """Logits for the decoder's columns; the source is encoded unless the cache or the caller has it."""
        want = Want("all", bool(output_hidden_states), bool(output_attentions))
        rows, num_new = self._check_input(decoder_input_ids, decoder_inputs_embeds, self.spec.hidden_size)
        encoded = source = None
        if past_key_values is None or not _check_pair(past_key_values).source_lengths:
            encoded, source = self._encode_call(input_ids, inputs_embeds, attention_mask, encoder_outputs, want)
        cache = self._call_cache(past_key_values, rows, encoded)
        arranged = read_mask(decoder_attention_mask, rows, num_new, cache.lengths or [0] * rows)
        states, answer = self._run(
            arranged.pack(decoder_input_ids.to(self.device)) if decoder_input_ids is not None else None,
            cache,
            arranged.counts,
            want,
            arranged.pack(decoder_inputs_embeds.to(self.device)) if decoder_inputs_embeds is not None else None,
        )
        output = Seq2SeqOutput(
            logits=self._project(arranged.unpack(states)),
            past_key_values=cache if use_cache is None or use_cache else None,
            decoder_hidden_states=_each(arranged.unpack, answer.hidden_states),
            decoder_attentions=_each(arranged.unpack_weights, answer.attentions),
            cross_attentions=answer.cross_attentions,
        )
        if encoded is not None and source is not None:
            output.encoder_last_hidden_state = source.unpack(encoded.states)
            output.encoder_hidden_states = _each(source.unpack, encoded.hidden_states)
            output.encoder_attentions = _each(source.unpack_weights, encoded.attentions)
        return output if return_dict is None or return_dict else output.to_tuple()

    def _encode_call(
        self,
        input_ids: torch.Tensor | None,
        inputs_embeds: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        encoder_outputs: Any,
        want: Want,
    ) -> tuple[Encoded, Arrangement]:
        if encoder_outputs is not None:
            states = getattr(encoder_outputs, "last_hidden_state", None)
            states = (encoder_outputs[0] if states is None else states).to(self.device, self.dtype)
            rows, length = states.shape[:2]
            source = read_mask(attention_mask, rows, length, [0] * rows)
            return Encoded(source.pack(states), source.counts or [length] * rows), source
        rows, length = self._check_input(input_ids, inputs_embeds, self.spec.hidden_size)
        source = read_mask(attention_mask, rows, length, [0] * rows)
        if source.counts is not None and not all(source.counts):
            raise InputError("a row of the source has no real token")
        tokens = source.pack(input_ids.to(self.device)) if input_ids is not None else None
        embeds = source.pack(inputs_embeds.to(self.device)) if inputs_embeds is not None else None
        return self.encode(tokens, source.counts, want=want, embeds=embeds), source

    def _call_cache(self, given: Cache | None, rows: int, encoded: Encoded | None) -> Cache:
        if given is None:
            return self.new_cache("dynamic", rows, encoded=encoded)
        if encoded is not None:
            self._project_source(_check_pair(given).cross_attention_cache, encoded)
        return given


def _check_pair(cache: Cache) -> EncoderDecoderCache:
    if not isinstance(cache, EncoderDecoderCache):
        raise UnsupportedError(
            f"an encoder-decoder can't decode with a {type(cache).__name__}; use the EncoderDecoderCache of new_cache()"
        )
    return cache


def _visible(lengths: Sequence[int], longest: int, device: torch.device) -> torch.Tensor | None:
    """Which of the source's positions are real (rows, 1, 1, source); None if all are."""
    if all(length == longest for length in lengths):
        return None
    return (torch.arange(longest, device=device) < torch.tensor(lengths, device=device)[:, None])[:, None, None]


def _each(change: Any, tensors: tuple[torch.Tensor, ...] | None) -> tuple[torch.Tensor, ...] | None:
    return None if tensors is None else tuple(change(tensor) for tensor in tensors)


def _describe(spec: T5Spec) -> ModelInfo:
    return ModelInfo(
        family="t5",
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        num_layers=spec.num_decoder_layers,
        num_heads=spec.num_heads,
        layer_kinds=tuple(["full"] * spec.num_decoder_layers),
        is_encoder_decoder=True,
        has_tied_embeddings=spec.is_head_tied,
        eos_token_id=spec.eos_token_id,
        pad_token_id=spec.pad_token_id,
        decoder_start_token_id=spec.decoder_start_token_id,
        can=ModelInfo.can | {"branches", "forks"},
    )


def _normalise(spec: T5Spec, config: Mapping[str, Any]) -> ModelConfig:
    eos = spec.eos_token_id
    common = {
        "model_type": "t5",
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.ffn_size,
        "num_hidden_layers": spec.num_encoder_layers,
        "num_decoder_layers": spec.num_decoder_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": None,
        "is_encoder_decoder": True,
        "eos_token_id": list(eos) if isinstance(eos, tuple) else eos,
        "pad_token_id": spec.pad_token_id,
        "decoder_start_token_id": spec.decoder_start_token_id,
    }
    return ModelConfig(**{**config, **common})

"""The configurable decoder: every decoder-only family runs through this one forward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from unspool.cache import Cache, DynamicCache, Span
from unspool.errors import InputError
from unspool.kernels.activations import find_activation
from unspool.kernels.alibi import alibi_bias
from unspool.kernels.attention import attend
from unspool.kernels.rotary import RotaryTable, rotate_
from unspool.models.arrangement import read_mask
from unspool.models.layers import DecoderWeights, Layer
from unspool.models.native import ModelConfig, NativeModel, take_last
from unspool.models.spec import DecoderSpec, RopeSpec
from unspool.models.weights import Embedding, Linear
from unspool.outputs import Output
from unspool.protocols import LAST, Encoded, Forward, LayerKind, ModelInfo, Want


@dataclass
class CausalOutput(Output):
    """What calling a decoder returns."""

    logits: torch.Tensor | None = None  # (rows, columns kept, vocab)
    past_key_values: Cache | None = None
    hidden_states: tuple[torch.Tensor, ...] | None = None  # embeddings, then a layer each: (rows, columns, hidden)
    attentions: tuple[torch.Tensor, ...] | None = None  # a layer each: (rows, heads, columns, all columns)


@dataclass(slots=True)
class Sight:
    """What the queries of one pass may see in layers of one kind, and how positions enter there."""

    first_key: int  # keys before it are outside the window
    mask: torch.Tensor | None  # boolean or additive
    is_causal: bool
    factors: torch.Tensor | None  # (rows or 1, new, 1, pairs): rope


class Decoder(NativeModel):
    """A decoder-only model built from a description of its block and the weights for it."""

    weights: DecoderWeights

    def __init__(
        self,
        spec: DecoderSpec,
        weights: DecoderWeights,
        config: Mapping[str, Any],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(device, dtype)
        self.spec = spec
        self.weights = weights
        self.info = _describe(spec)
        self.config = _normalise(spec, config)
        self._activate = find_activation(spec.activation)
        self._ropes: dict[LayerKind, RotaryTable] = {}
        self._bias: torch.Tensor | None = None  # ALiBi (heads, positions)
        self._refresh()

    def _refresh(self) -> None:
        self._ropes = {}
        self._bias = None
        if self.spec.rope is not None:
            full = self._make_table(self.spec.rope)
            local = self._make_table(self.spec.local_rope) if self.spec.local_rope is not None else full
            self._ropes = {"full": full, "sliding": local}

    def _make_table(self, rope: RopeSpec) -> RotaryTable:
        return RotaryTable(rope.frequencies, rope.gain, self.device)

    def get_input_embeddings(self) -> Embedding:
        return self.weights.embedding

    def get_output_embeddings(self) -> Linear:
        return self.weights.head

    def new_cache(
        self, kind: str = "dynamic", rows: int = 1, capacity: int | None = None, encoded: Encoded | None = None
    ) -> Cache:
        if encoded is not None:
            raise InputError(f"{self.info.family} has no encoder, so its cache takes no encoded states")
        return self._new_own_cache(kind, rows, capacity, self.spec.num_layers)

    # --- a forward pass ------------------------------------------------------------------------------
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
        states, hidden, attentions = self._run(tokens, cache, counts, want, embeds)
        if want.logits == "last":
            states = take_last(states, counts)  # (rows, hidden)
        return Forward(self._project(states), hidden, attentions)

    def _run(
        self,
        tokens: torch.Tensor | None,
        cache: Cache,
        counts: Sequence[int] | None,
        want: Want,
        embeds: torch.Tensor | None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...] | None, tuple[torch.Tensor, ...] | None]:
        """Final states (rows, new, width of the head), and what else is wanted."""
        given = tokens if tokens is not None else embeds
        assert given is not None
        span = cache.begin(given.shape[0], given.shape[1], counts, self.device)
        x = self._embed(tokens, embeds, span)  # (rows, new, hidden)
        sights = {kind: self._look(kind, cache, span, want) for kind in set(self.spec.layer_kinds or ("full",))}
        hidden, attentions = [], []
        for index, layer in enumerate(self.weights.layers):
            if want.hidden_states:
                hidden.append(x)
            x, weights = self._block(index, layer, x, cache, sights[self.spec.kind_of(index)], want.attentions)
            if weights is not None:
                attentions.append(weights)
        cache.end()
        x = self._finish(x)
        hidden.append(x)
        return x, tuple(hidden) if want.hidden_states else None, tuple(attentions) if want.attentions else None

    def _embed(self, tokens: torch.Tensor | None, embeds: torch.Tensor | None, span: Span) -> torch.Tensor:
        weights = self.weights
        x = weights.embedding(tokens) if tokens is not None else embeds
        assert x is not None
        x = x.to(self.dtype)
        if weights.project_in is not None:
            x = weights.project_in(x)
        if weights.positions is not None:
            positions = span.positions + self.spec.position_offset
            limit = weights.positions.shape[0] - self.spec.position_offset
            # What lies past a short row's end is never read, so it may point at any position.
            longest = max(start + count for start, count in zip(span.starts, span.counts, strict=True))
            if longest > limit:
                raise InputError(
                    f"position {longest - 1} was asked for and {self.info.family} learned positions up to {limit - 1}"
                )
            x = x + weights.positions[positions.clamp(max=weights.positions.shape[0] - 1)]
        return weights.embedding_norm(x) if weights.embedding_norm is not None else x

    def _finish(self, x: torch.Tensor) -> torch.Tensor:
        x = self.weights.final_norm(x) if self.weights.final_norm is not None else x
        return self.weights.project_out(x) if self.weights.project_out is not None else x

    def _project(self, states: torch.Tensor) -> torch.Tensor:
        logits = self.weights.head(states)
        cap = self.spec.logit_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def _look(self, kind: LayerKind, cache: Cache, span: Span, want: Want) -> Sight:
        window = self.spec.window if kind == "sliding" else None
        factors = None
        if kind in self._ropes:
            table = self._ropes[kind].reserve(span.stop)
            positions = span.positions[:1] if span.is_uniform else span.positions
            factors = table[positions].unsqueeze(2)  # (rows or 1, new, 1, pairs)
        if span.num_new == 1 and span.is_uniform and not want.attentions and self.spec.alibi is None:
            return Sight(max(0, span.stop - window) if window else 0, None, False, factors)
        mask = cache.mask(span, window)
        if self.spec.alibi is not None:
            mask = self._add_bias(mask, span)
        return Sight(
            0, None if isinstance(mask, str) else mask, mask == "causal" if isinstance(mask, str) else False, factors
        )

    def _add_bias(self, mask: torch.Tensor | str | None, span: Span) -> torch.Tensor:
        """ALiBi for the keys in view, with what may not be seen at minus infinity."""
        alibi = self.spec.alibi
        assert alibi is not None
        if self._bias is None or self._bias.shape[1] < span.stop:
            room = max(span.stop, 2 * (self._bias.shape[1] if self._bias is not None else 256))
            bias = alibi_bias(self.spec.num_heads, room, scale=alibi.scale, is_rounded=alibi.is_rounded)
            self._bias = bias.to(self.device, self.dtype)
        bias = self._bias[None, :, None, : span.stop]  # (1, heads, 1, keys)
        if mask is None:
            return bias
        if isinstance(mask, str):
            mask = torch.ones(span.num_new, span.stop, dtype=torch.bool, device=self.device).tril()
        return torch.where(mask, bias, -torch.inf)

    # --- a block -------------------------------------------------------------------------------------
    def _block(
        self, index: int, layer: Layer, x: torch.Tensor, cache: Cache, sight: Sight, want_weights: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        spec, is_post = self.spec, self.spec.norm_placement == "post"
        assert layer.attn_norm is not None
        normed = x if is_post else layer.attn_norm(x)
        read, weights = self._attend(index, layer, normed, cache, sight, want_weights)
        if layer.post_attn_norm is not None:
            read = layer.post_attn_norm(read)
        if spec.residual == "parallel":
            return x + read + self._feed(layer, layer.ffn_norm(x) if layer.ffn_norm is not None else normed), weights
        assert layer.ffn_norm is not None
        x = x + read
        if is_post:
            x = layer.attn_norm(x)
            return layer.ffn_norm(x + self._feed(layer, x)), weights
        fed = self._feed(layer, layer.ffn_norm(x))
        if layer.post_ffn_norm is not None:
            fed = layer.post_ffn_norm(fed)
        return x + fed, weights

    def _attend(
        self, index: int, layer: Layer, x: torch.Tensor, cache: Cache, sight: Sight, want_weights: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        spec, (rows, num_new, _) = self.spec, x.shape
        heads, kv_heads = spec.num_heads, spec.num_kv_heads
        qkv = layer.qkv(x).view(rows, num_new, heads + 2 * kv_heads, spec.head_dim)
        if layer.q_norm is not None and layer.k_norm is not None:
            qkv[:, :, :heads] = layer.q_norm(qkv[:, :, :heads])
            qkv[:, :, heads : heads + kv_heads] = layer.k_norm(qkv[:, :, heads : heads + kv_heads])
        if sight.factors is not None:
            rotate_(qkv[:, :, : heads + kv_heads], sight.factors)
        keys, values = cache.write(index, qkv[:, :, heads:].view(rows, num_new, 2, kv_heads, spec.head_dim))
        if sight.first_key:
            keys, values = keys[:, :, sight.first_key :], values[:, :, sight.first_key :]
        read, weights = attend(
            qkv[:, :, :heads].transpose(1, 2),
            keys,
            values,
            scale=spec.scale_of(index),
            mask=sight.mask,
            is_causal=sight.is_causal,
            softcap=spec.attention_softcap,
            want_weights=want_weights,
        )
        return layer.out(read.transpose(1, 2).reshape(rows, num_new, heads * spec.head_dim)), weights

    def _feed(self, layer: Layer, x: torch.Tensor) -> torch.Tensor:
        up = layer.up(x)
        if not self.spec.is_gated:
            return layer.down(self._activate(up))
        gate, value = up.chunk(2, dim=-1)
        return layer.down(self._activate(gate) * value)

    # --- the reference's way of calling ---------------------------------------------------------------
    @torch.no_grad()
    def __call__(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = True,
        logits_to_keep: int | torch.Tensor = 0,
    ) -> CausalOutput | tuple[Any, ...]:
        """Logits for the columns given, padded or not; the cache is advanced where one is used."""
        width = self.spec.embedding_size or self.spec.hidden_size
        rows, num_new = self._check_input(input_ids, inputs_embeds, width)
        cache = past_key_values if past_key_values is not None else DynamicCache()
        held = cache.lengths or [0] * rows
        arranged = read_mask(attention_mask, rows, num_new, held)
        if position_ids is not None:
            arranged.check_positions(position_ids, held)
        want = Want("all", bool(output_hidden_states), bool(output_attentions))
        states, hidden, weights = self._run(
            arranged.pack(input_ids.to(self.device)) if input_ids is not None else None,
            cache,
            arranged.counts,
            want,
            arranged.pack(inputs_embeds.to(self.device)) if inputs_embeds is not None else None,
        )
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        output = CausalOutput(
            logits=self._project(arranged.unpack(states)[:, keep]),
            past_key_values=cache if use_cache is None or use_cache else None,
            hidden_states=tuple(map(arranged.unpack, hidden)) if hidden is not None else None,
            attentions=tuple(map(arranged.unpack_weights, weights)) if weights is not None else None,
        )
        return output if return_dict is None or return_dict else output.to_tuple()


def _describe(spec: DecoderSpec) -> ModelInfo:
    return ModelInfo(
        family=spec.family,
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        num_layers=spec.num_layers,
        num_heads=spec.num_heads,
        max_context=spec.max_context,
        window=spec.window,
        layer_kinds=tuple(spec.kind_of(i) for i in range(spec.num_layers)),
        has_tied_embeddings=spec.is_head_tied,
        bos_token_id=spec.bos_token_id,
        eos_token_id=spec.eos_token_id,
        pad_token_id=spec.pad_token_id,
    )


def _normalise(spec: DecoderSpec, config: Mapping[str, Any]) -> ModelConfig:
    eos = spec.eos_token_id
    common = {
        "model_type": spec.family,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.ffn_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.max_context,
        "sliding_window": spec.window,
        "tie_word_embeddings": spec.is_head_tied,
        "is_encoder_decoder": False,
        "bos_token_id": spec.bos_token_id,
        "eos_token_id": list(eos) if isinstance(eos, tuple) else eos,
        "pad_token_id": spec.pad_token_id,
    }
    return ModelConfig(**{**config, **common})

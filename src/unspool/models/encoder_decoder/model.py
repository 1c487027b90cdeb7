"""The configurable encoder-decoder: every family with an encoder runs through this one encoder and decoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from unspool.cache import Cache, DynamicCache, EncoderDecoderCache, Span
from unspool.errors import InputError
from unspool.kernels.activations import find_activation
from unspool.kernels.attention import attend
from unspool.kernels.branched import attend_shared
from unspool.kernels.forked import fold_mask
from unspool.kernels.halves import convolve
from unspool.kernels.presence import runs_kernels
from unspool.kernels.ragged import Ragged
from unspool.models.decoder.layers import Layer
from unspool.models.decoder.reading import read_keys
from unspool.models.decoder.views import AttentionView, AttentionViews
from unspool.models.encoder_decoder.caches import check_pair
from unspool.models.encoder_decoder.call import CalledPair
from unspool.models.encoder_decoder.layers import CrossWeights, EncoderDecoderWeights, Stack, take_decoder
from unspool.models.encoder_decoder.likeness import hold_same_numbers
from unspool.models.encoder_decoder.positions import DistanceBiases, PositionTable
from unspool.models.encoder_decoder.spec import EncoderDecoderSpec, StackSpec
from unspool.models.encoder_decoder.stacked_keys import StackedKeys
from unspool.models.native import ModelConfig, take_last
from unspool.models.paths.captured import explain_no_capture
from unspool.models.paths.captured_encoder import CapturedEncoder, takes_encoder
from unspool.models.paths.captured_pair import CapturedPairSteps
from unspool.models.paths.library import PACKING_LIMIT
from unspool.models.paths.library_encoder import EncoderProducts, Multiply, beside, multiply_plainly
from unspool.models.paths.library_encoding import LibraryEncoder
from unspool.models.paths.library_model import explain_unread
from unspool.models.paths.library_narrow import Product
from unspool.models.paths.library_pair import DescribedPair, PairLibraryPath
from unspool.models.paths.path import ClosedPath, Pass, Path, run_first
from unspool.models.weights import AnyEmbedding, AnyLinear, Norm, PackedLinear, iterate_tensors
from unspool.protocols import LAST, Encoded, Forward, Want
from unspool.shortage import explain_shortage

HALF_MOST = torch.finfo(torch.float16).max


class EncoderDecoder(CalledPair):
    """An encoder-decoder built from a description of its blocks and the weights for them.

    A model that reads sound (Whisper) has `info.features`. Its encoder takes log-mel features, a float tensor
    [rows, mels, frames], as `embeds`; `generate` and `__call__` take them as `input_features`. All frames are read,
    silence after the end of a sound included, as the model was trained.
    """

    weights: EncoderDecoderWeights
    _SETTINGS = ("generation_config", "packs_for_batches")

    def __init__(
        self,
        spec: EncoderDecoderSpec,
        weights: EncoderDecoderWeights,
        config: Mapping[str, Any],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(device, dtype)
        self.spec = spec
        self.weights = weights
        self.info = spec.describe()
        self.config = ModelConfig(**{**config, **spec.name_values()})
        self._packs = self.weights_bytes <= PACKING_LIMIT
        self._refresh()

    def _refresh(self) -> None:
        spec, weights = self.spec, self.weights
        self._activate = find_activation(spec.activation)
        made = (spec.hidden_size, self.device, self.dtype)
        self._encoder_positions = PositionTable(spec.encoder.positions, weights.encoder.positions, *made)
        self._decoder_positions = PositionTable(spec.decoder.positions, weights.decoder.positions, *made)
        self._views = AttentionViews(spec.describe_decoder(), self.device, self.dtype)
        self._biases = None
        if spec.relative is not None:
            self._biases = DistanceBiases(spec.relative, weights.encoder.biases, weights.decoder.biases)
        gates = 2 if spec.is_gated else 1
        products: list[Product] = []
        for layer in weights.encoder.layers:
            products += ((layer.qkv, 1), (layer.out, 1), (layer.up, gates), (layer.down, 1))
        products += ((cross.kv, 1) for cross in weights.decoder.crosses)
        self._products = EncoderProducts(products, narrows=self._packs and self.device.type == "cpu")
        self._library = LibraryEncoder(spec, weights.encoder, self._biases, self._products)
        self.paths = self._list_paths()
        self._encoder = self._make_encoder() if runs_kernels(self.device) else None

    def _list_paths(self) -> list[Path]:
        """The fast paths of a decoder's pass, in the order in which they are tried."""
        spec = self.spec
        if self.device.type != "cpu":
            why = explain_no_capture(spec.describe_decoder(), take_decoder(self.weights), self.device, self.dtype)
            if why is not None:
                return [ClosedPath("captured", why)]
            return [self._make_steps()]
        why = explain_unread(spec.describe_decoder(), self.device, self.dtype)
        if why is not None:
            return [ClosedPath("library", why)]
        positions, biases = self._decoder_positions, self._biases
        described = DescribedPair(spec, self.weights, self._views, positions, biases, narrows=self._packs)
        return [PairLibraryPath(spec, described)]

    def _make_steps(self) -> CapturedPairSteps:
        given = (self.spec, self.weights, self._decoder_positions, self._biases)
        return CapturedPairSteps(*given, self.device, self.dtype)

    def _make_encoder(self) -> CapturedEncoder | None:
        """The encoder's passes by our kernels, if they run them."""
        if not takes_encoder(self.spec, self.weights, self.dtype):
            return None
        given = (self.spec, self.weights, self._encoder_positions, self._biases)
        return CapturedEncoder(*given, self.device, self.dtype)

    @torch.no_grad()
    def launch_step(self) -> None:
        """Launch the kernels of one source and of a step of one row (`captured_ahead.prepare_step`)."""
        encoder = self._make_encoder()
        if encoder is not None:
            encoder.launch()
        self._make_steps().launch()

    @property
    def is_batch_invariant(self) -> bool:
        """Whether a row's numbers are the same bits whatever rows stand beside it: never, as the encoder is torch's."""
        return False

    def get_input_embeddings(self) -> AnyEmbedding:
        table = self.weights.encoder.embedding or self.weights.decoder.embedding
        assert table is not None
        return table

    def get_output_embeddings(self) -> AnyLinear:
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
        stack, features = self.weights.encoder, self.spec.features
        given = tokens if tokens is not None and features is None else embeds
        if features is not None:
            self._check_features(given)
        assert given is not None
        length = given.shape[1] if features is None else features.positions
        lengths = list(counts) if counts is not None else [length] * given.shape[0]
        self._check_source(max(lengths))
        counted = self._encoder_positions.find_counted(tokens, lengths)
        if counted is None and self._captures_encoder(given, want):
            assert self._encoder is not None
            return Encoded(self._encoder.run(given, lengths), lengths)
        x = self._embed(stack, tokens, embeds) if features is None else self._hear(given)
        x = self._encoder_positions.add(x, torch.arange(length, device=self.device)[None], length, counted)
        x = stack.embedding_norm(x) if stack.embedding_norm is not None else x
        ragged = None
        if not want.hidden_states and not want.attentions:
            ragged = self._find_ragged(lengths, length)
            states = self._encode_at_once(x, lengths, ragged)
            if states is not None:
                return Encoded(states, lengths)
        masks = self._look_around(lengths, length)
        hidden, attentions = [], []
        x = x if ragged is None else ragged.take(x)[None]
        multiply = self._products.choose(x.shape[0] * x.shape[1])
        with beside(multiply, len(lengths) * self.spec.encoder.num_heads * length**2):
            for index, layer in enumerate(stack.layers):
                if want.hidden_states:
                    hidden.append(x)
                mask = masks[min(index, len(masks) - 1)]
                x, weights = self._encode_layer(layer, x, mask, want.attentions, ragged, multiply)
                if weights is not None:
                    attentions.append(weights)
        x = stack.final_norm(x) if stack.final_norm is not None else x
        x = x if ragged is None else ragged.fill(x[0])
        return Encoded(
            x,
            lengths,
            (*hidden, x) if want.hidden_states else None,
            tuple(attentions) if want.attentions else None,
        )

    def _encode_at_once(self, x: torch.Tensor, lengths: Sequence[int], ragged: Ragged | None) -> torch.Tensor | None:
        """Final states of embeddings (rows, length, hidden) by one call of the CPU library; None if it has none."""
        if self.device.type != "cpu" or self.dtype != torch.float32 or min(lengths) < 1:
            return None
        if ragged is not None:
            made = self._library.run(ragged.take(x), lengths)
            return None if made is None else ragged.fill(made)
        made = self._library.run(x.flatten(0, 1), lengths)
        return None if made is None else made.view(x.shape)

    def _captures_encoder(self, given: torch.Tensor, want: Want) -> bool:
        """Whether a pass over tokens or features is one that is captured."""
        is_plain = self.spec.features is not None or not given.is_floating_point()
        is_open = self._encoder is not None and self.find_path("captured") is not None
        return is_open and is_plain and not want.hidden_states and not want.attentions

    def encodes_like(self, other: object) -> bool:
        """Whether both encoders make the same states: they have one description and the same numbers.

        A distilled model often has the encoder of the model that it was made from.
        """
        if not isinstance(other, EncoderDecoder) or self.dtype != other.dtype:
            return False
        if self.spec.describe_encoder() != other.spec.describe_encoder():
            return False
        mine, theirs = (list(iterate_tensors(one.weights.encoder)) for one in (self, other))
        return hold_same_numbers(self, mine, other, theirs)

    def _find_ragged(self, lengths: Sequence[int], longest: int) -> Ragged | None:
        """The real tokens of sources of different lengths, if products of only those pay: on a CPU."""
        if self.device.type != "cpu" or sum(lengths) == len(lengths) * longest or min(lengths) < 1:
            return None
        positions = torch.arange(longest).expand(len(lengths), longest)
        return Ragged([0] * len(lengths), lengths, positions)

    def _check_source(self, longest: int) -> None:
        limit = self.spec.longest_source
        if limit is not None and longest > limit:
            raise InputError(
                f"the source has {longest} positions and {self.info.family} reads at most {limit}; shorten it, or "
                "split it"
            )

    def _check_features(self, features: torch.Tensor | None) -> None:
        shape = self.spec.features
        assert shape is not None
        if features is None or features.dim() != 3 or tuple(features.shape[1:]) != (shape.channels, shape.frames):
            given = "no features" if features is None else f"features of shape {list(features.shape)}"
            raise InputError(f"{given} can't be encoded; give (rows, {shape.channels}, {shape.frames})")

    def _hear(self, features: torch.Tensor) -> torch.Tensor:
        """Features (rows, channels, frames) through the convolutions: (rows, positions, hidden)."""
        first, second = self.weights.encoder.convolutions
        x = F.gelu(convolve(features.to(self.device, self.dtype), first.weight, first.bias))
        return F.gelu(convolve(x, second.weight, second.bias, stride=2)).transpose(1, 2)

    def _look_around(self, lengths: Sequence[int], longest: int) -> Sequence[torch.Tensor | None]:
        """The encoder's masks: one for all layers, or one per layer."""
        biases: Sequence[torch.Tensor] = self._biases.look_around(longest) if self._biases is not None else ()
        if min(lengths) == longest:
            return biases or [None]
        places = torch.arange(longest, device=self.device)
        visible = (places < torch.tensor(list(lengths), device=self.device)[:, None])[:, None, None]
        if not biases:
            biases = [torch.zeros((), dtype=self.dtype, device=self.device)]
        return [torch.where(visible, bias, -torch.inf) for bias in biases]

    def _encode_layer(
        self,
        layer: Layer,
        x: torch.Tensor,
        mask: torch.Tensor | None,
        want_weights: bool,
        ragged: Ragged | None,
        multiply: Multiply,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One block; of `ragged` sources only the real tokens are given, as those of one row."""
        stack, scale = self.spec.encoder, self.spec.encoder.attention_scale
        assert layer.attn_norm is not None
        qkv = multiply(layer.qkv, self._enter(layer.attn_norm, x))
        qkv = _split_heads(qkv if ragged is None else ragged.fill(qkv[0]), 3, stack)
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        read, weights = attend(q, k, v, scale=scale, mask=mask, want_weights=want_weights)
        read = read.transpose(1, 2).flatten(2)
        made = multiply(layer.out, read if ragged is None else ragged.take(read)[None])
        return self._feed(layer, self._leave(layer.attn_norm, x, made), multiply), weights

    # --- caches --------------------------------------------------------------------------------------
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
        own = self._new_own_cache(kind, rows, capacity, self.spec.decoder.num_layers, config)
        return EncoderDecoderCache(own, self.project_source(DynamicCache(capacity=encoded.states.shape[1]), encoded))

    @torch.no_grad()
    def project_source(self, cross: Cache, encoded: Encoded) -> Cache:
        """Write every layer's keys and values of the encoder's states, once."""
        rows, length, _ = encoded.states.shape
        stacked = self._stack_keys() if isinstance(cross, DynamicCache) and not cross.lengths else None
        if stacked is not None and isinstance(cross, DynamicCache):
            cross.take_over(stacked.multiply(encoded.states, self.spec.decoder.num_heads), encoded.lengths)
            return cross
        cross.begin(rows, length, encoded.lengths, self.device)
        ragged = self._find_ragged(encoded.lengths, length)
        states = encoded.states if ragged is None else ragged.take(encoded.states)
        multiply = self._products.choose(states.numel() // states.shape[-1])
        with beside(multiply, states.numel()):
            for index, layer in enumerate(self.weights.decoder.crosses):
                kv = multiply(layer.kv, states)
                kv = self._shorten(kv if ragged is None else ragged.fill(kv))
                cross.write(index, _split_heads(kv, 2, self.spec.decoder))
        cross.end()
        return cross

    def _stack_keys(self) -> StackedKeys | None:
        """All layers' matrices of the sources' keys and values, if they lie together on a GPU."""
        return None if self.device.type == "cpu" else StackedKeys.find([one.kv for one in self.weights.decoder.crosses])

    def _shorten(self, kv: torch.Tensor) -> torch.Tensor:
        """A source's keys as they are kept: of quantised weights on a CPU in float16, which loses far less than these
        have lost, and a step reads half as much of them."""
        if not isinstance(self.weights.decoder.crosses[0].kv, PackedLinear):
            return kv
        return kv.clamp(-HALF_MOST, HALF_MOST).half()

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
        new = Pass(tokens, cache, counts, want, embeds, self._begin)
        are_counted = self._find_counted(new) is None
        answer, refusals = run_first(self.paths, new) if are_counted else (None, "some tokens have no position")
        if answer is None:
            states, answer = self.run_decoder(new)
            if want.logits == "last":
                states = take_last(states, counts)  # (rows, hidden)
            answer.logits = self.project(states)
        answer.path_reason = refusals
        return answer

    def _begin(self, cache: Cache, rows: int, num_new: int, counts: Sequence[int] | None) -> Span:
        """Open a pass over a cache."""
        return cache.begin(rows, num_new, counts, self.device)

    def _find_counted(self, new: Pass) -> torch.Tensor | None:
        """Which tokens (rows, new) of a text's first pass have positions; None if all have.

        As in the reference, those of later passes count columns.
        """
        return None if any(new.cache.lengths) else self._decoder_positions.find_counted(new.tokens, new.counts)

    def run_decoder(self, new: Pass) -> tuple[torch.Tensor, Forward]:
        """Final states (rows, new, hidden), and a `Forward` that lacks only the logits: operator by operator."""
        counted = self._find_counted(new)
        cache, want, span, stack = new.cache, new.want, new.span, self.weights.decoder
        pair = check_pair(cache)
        x = self._place(self._embed(stack, new.tokens, new.embeds), span, counted)
        views = self._look_back(cache, span, needs_all_keys=want.attentions)
        sources, visible = pair.read_sources(), pair.mask_source(self.device)
        hidden, own_weights, cross_weights = [], [], []
        for index, (layer, cross) in enumerate(zip(stack.layers, stack.crosses, strict=True)):
            if want.hidden_states:
                hidden.append(x)
            view = views[min(index, len(views) - 1)]
            x, weights = self._attend_back(index, layer, x, cache, view, want.attentions)
            x, across = self._attend_across(cross, x, sources[index], visible, want.attentions)
            x = self._feed(layer, x)
            if weights is not None and across is not None:
                own_weights.append(weights)
                cross_weights.append(across)
        cache.end()
        x = stack.final_norm(x) if stack.final_norm is not None else x
        answer = Forward(
            x,
            (*hidden, x) if want.hidden_states else None,
            tuple(own_weights) if want.attentions else None,
            tuple(cross_weights) if want.attentions else None,
            last_states=x if want.last_states else None,
        )
        return x, answer

    def project(self, states: torch.Tensor) -> torch.Tensor:
        """The logits of final states."""
        scale = self.spec.head_scale
        return self.weights.head(states if scale == 1.0 else states * scale)

    def _place(self, x: torch.Tensor, span: Span, counted: torch.Tensor | None) -> torch.Tensor:
        """Embeddings with their positions', normalised where the family does so."""
        self.spec.check_length(max(start + count for start, count in zip(span.starts, span.counts, strict=True)))
        positions = span.positions[:1] if span.is_uniform else span.positions
        x = self._decoder_positions.add(x, positions, span.stop, counted)
        norm = self.weights.decoder.embedding_norm
        return norm(x) if norm is not None else x

    def _look_back(self, cache: Cache, span: Span, *, needs_all_keys: bool) -> list[AttentionView]:
        """What the decoder's layers see of the texts: one view for all, or one per layer."""
        if self._biases is None:
            return [self._views.make(cache, span, needs_all_keys=needs_all_keys)["full"]]
        queries = (span.positions[:1] if span.is_uniform else span.positions)[:, :, None]
        back = queries - cache.key_positions(span)[:, None]  # (rows or 1, new, keys)
        biases = self._biases.look_back(back, span.stop)
        if not cache.is_in_order:
            visible = cache.mask(span)
            assert isinstance(visible, torch.Tensor)
            biases = [torch.where(visible, bias, -torch.inf) for bias in biases]
            if cache.num_forks > 1:
                heads = self.spec.decoder.num_heads
                biases = [fold_mask(bias, cache.num_forks, heads, heads) for bias in biases]
        elif cache.mask(span) is not None:
            biases = [bias.masked_fill((back < 0)[:, None], -torch.inf) for bias in biases]
        return [AttentionView(0, bias, False, None, num_forks=cache.num_forks) for bias in biases]

    def _attend_back(
        self, index: int, layer: Layer, x: torch.Tensor, cache: Cache, view: AttentionView, want_weights: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        assert layer.attn_norm is not None
        qkv = _split_heads(layer.qkv(self._enter(layer.attn_norm, x)), 3, self.spec.decoder)
        keys, values = cache.write(index, qkv[:, :, 1:])
        queries, scale = qkv[:, :, 0].transpose(1, 2), self.spec.decoder.attention_scale
        read, weights = read_keys(queries, keys, values, view, scale=scale, want_weights=want_weights)
        return self._leave(layer.attn_norm, x, layer.out(read.transpose(1, 2).flatten(2))), weights

    def _attend_across(
        self,
        cross: CrossWeights,
        x: torch.Tensor,
        source: tuple[torch.Tensor, torch.Tensor],
        visible: torch.Tensor | None,
        want_weights: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        queries = _split_heads(cross.q(self._enter(cross.norm, x)), 1, self.spec.decoder)[:, :, 0].transpose(1, 2)
        scale = self.spec.decoder.attention_scale
        keys, values = (part.to(queries.dtype) for part in source)
        read, weights = attend_shared(queries, keys, values, scale=scale, mask=visible, want_weights=want_weights)
        return self._leave(cross.norm, x, cross.out(read.transpose(1, 2).flatten(2))), weights

    # --- shared by both ------------------------------------------------------------------------------
    def _embed(self, stack: Stack, tokens: torch.Tensor | None, embeds: torch.Tensor | None) -> torch.Tensor:
        if tokens is None:
            assert embeds is not None
            return embeds.to(self.dtype)
        assert stack.embedding is not None
        return stack.embedding(tokens)

    def _enter(self, norm: Norm, x: torch.Tensor) -> torch.Tensor:
        """What a part of a block reads."""
        return norm(x) if self.spec.is_norm_first else x

    def _leave(self, norm: Norm, x: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        """The states after a part of a block."""
        return x + made if self.spec.is_norm_first else norm(x + made)

    def _feed(self, layer: Layer, x: torch.Tensor, multiply: Multiply = multiply_plainly) -> torch.Tensor:
        assert layer.ffn_norm is not None
        up = multiply(layer.up, self._enter(layer.ffn_norm, x))
        if self.spec.is_gated:
            gate, value = up.chunk(2, dim=-1)
            up = self._activate(gate).mul_(value)
        else:
            up = self._activate(up)
        return self._leave(layer.ffn_norm, x, multiply(layer.down, up))


def _split_heads(x: torch.Tensor, parts: int, stack: StackSpec) -> torch.Tensor:
    return x.view(*x.shape[:-1], parts, stack.num_heads, stack.head_dim)

"""The configurable decoder: every decoder-only family runs through this one forward pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from unspool.cache import Cache, DynamicCache, Span
from unspool.config import CompileConfig
from unspool.errors import InputError, UnsupportedError
from unspool.kernels.activations import find_activation
from unspool.kernels.ragged import Ragged
from unspool.kernels.rotary import rotate_
from unspool.models.arrangement import read_mask
from unspool.models.decoder.head import cap_logits, check_positions, read_out
from unspool.models.decoder.layers import DecoderWeights, Layer
from unspool.models.decoder.ragged import Layout
from unspool.models.decoder.reading import read_keys, read_ragged
from unspool.models.decoder.spec import DecoderSpec
from unspool.models.decoder.views import AttentionView, AttentionViews
from unspool.models.native import ModelConfig, NativeModel, take_last
from unspool.models.paths.captured import CapturedSteps, explain_no_capture
from unspool.models.paths.compiled import UNREAD, CompiledSteps, explain_no_compile
from unspool.models.paths.library import LibraryPath, explain_no_library
from unspool.models.paths.path import ClosedPath, Pass, Path, run_first
from unspool.models.paths.prepared import PACKING_LIMIT, PreparedPath, can_prepare
from unspool.models.weights import AnyEmbedding, AnyLinear
from unspool.outputs import Output
from unspool.protocols import LAST, Encoded, Forward, Stretch, Want
from unspool.shortage import explain_shortage


@dataclass
class CausalOutput(Output):
    """What calling a decoder returns."""

    logits: torch.Tensor | None = None  # (rows, columns kept, vocab)
    past_key_values: Cache | None = None
    hidden_states: tuple[torch.Tensor, ...] | None = None  # embeddings, then one per layer: (rows, columns, hidden)
    attentions: tuple[torch.Tensor, ...] | None = None  # one per layer: (rows, heads, columns, all columns)


class Decoder(NativeModel):
    """A decoder-only model built from a description of its block and the weights for it."""

    weights: DecoderWeights
    _SETTINGS = ("generation_config", "flattens_rows", "packs_for_batches")

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
        self.info = spec.describe()
        self.config = ModelConfig(**{**config, **spec.name_values()})
        self.flattens_rows: bool | None = None  # whether passes compute only real tokens; None: if it saves work
        self._packs = self.weights_bytes <= PACKING_LIMIT
        self._activate = find_activation(spec.activation)
        self._refresh()

    def _refresh(self) -> None:
        self._views = AttentionViews(self.spec, self.device, self.dtype)
        self._layout = Layout(self.spec, self.device, self.dtype)
        self.paths = self._list_paths()
        self._compiled: dict[str, Decoder] = {}

    def _list_paths(self) -> list[Path]:
        """The fast paths of a pass, in the order in which they are tried."""
        made = (self.spec, self.weights, self.device, self.dtype)
        if self.device.type != "cpu":
            why = explain_no_capture(self.spec, self.device, self.dtype)
            return [CapturedSteps(*made) if why is None else ClosedPath("captured", why)]
        why = explain_no_library(*made)
        paths: list[Path] = [
            LibraryPath(self.spec, self.weights, self._views) if why is None else ClosedPath("library", why)
        ]
        if can_prepare(*made):
            paths.append(PreparedPath(self.spec, self.weights, self._views, packs=self._packs))
        return paths

    def find_path(self, name: str) -> Path | None:
        """The path of that name, if it takes passes of this model."""
        return next((path for path in self.paths if path.name == name and not isinstance(path, ClosedPath)), None)

    @contextmanager
    def without_paths(self, *names: str) -> Iterator[None]:
        """Disable these paths inside the context: for tests and comparisons."""
        held, self.paths = self.paths, [path for path in self.paths if path.name not in names]
        try:
            yield
        finally:
            self.paths = held

    @property
    def fast_path(self) -> str | None:
        """How steps run by default: "captured", "library", or None for operator by operator."""
        return next((name for name in ("captured", "library") if self.find_path(name) is not None), None)

    def compiled(self, config: CompileConfig) -> Decoder:
        """This model with steps that run through torch.compile; the same one for the same arguments."""
        reason = explain_no_compile(self.spec, self.weights)
        if reason is not None:
            raise UnsupportedError(f"`compile_config` compiles a decoder's steps, and {reason}; leave it out")
        key = repr(config)
        if key not in self._compiled:
            steps = CompiledSteps(self.spec, self.weights, self.device, self.dtype, config)
            model = object.__new__(Decoder)
            model.__dict__.update(self.__dict__)
            model.info = replace(self.info, can=self.info.can - UNREAD)
            model.paths = [steps, *self.paths]
            self._compiled[key] = model
        return self._compiled[key]

    @property
    def packs_for_batches(self) -> bool:
        """Whether steps of several rows on a CPU may keep a second copy of the weights, laid out for them."""
        return self._packs

    @packs_for_batches.setter
    def packs_for_batches(self, is_on: bool) -> None:
        self._packs = is_on
        self._refresh()

    def get_input_embeddings(self) -> AnyEmbedding:
        return self.weights.embedding

    def get_output_embeddings(self) -> AnyLinear:
        return self.weights.head

    def new_cache(
        self,
        kind: str = "dynamic",
        rows: int = 1,
        capacity: int | None = None,
        encoded: Encoded | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> Cache:
        if encoded is not None:
            raise InputError(f"{self.info.family} has no encoder, so its cache takes no encoded states")
        return self._new_own_cache(kind, rows, capacity, self.spec.num_layers, config)

    # --- a forward pass ------------------------------------------------------------------------------
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
        forward, refusals = run_first(self.paths, new)
        if forward is None:
            forward = self._run_plainly(new)
        forward.path_reason = refusals
        return forward

    def _run_plainly(self, new: Pass) -> Forward:
        """A pass operator by operator."""
        cache, span, want, early = new.cache, new.span, new.want, list[torch.Tensor]()
        if self._is_step(new):
            with torch.inference_mode():  # logits are computed outside, so that callers may change them
                states, _, _ = self._run(new.tokens, cache, span, want, new.embeds, early)
            forward = read_out(self.spec, self.weights, states[:, -1], early, self.weights.head)
        else:
            ragged = self._find_ragged(cache, span, want)
            if ragged is not None:
                return self._forward_ragged(ragged, new.given, cache, span, want)
            states, hidden, attentions = self._run(new.tokens, cache, span, want, new.embeds, early)
            read = states if want.logits == "all" else take_last(states, new.counts)
            forward = read_out(self.spec, self.weights, read, early, self.weights.head)
            forward.hidden_states, forward.attentions = hidden, attentions
        forward.last_states = states if want.last_states else None
        return forward

    def _is_step(self, new: Pass) -> bool:
        """Whether a pass reads one token per row after what the cache holds, so that autograd need not record it."""
        want = new.want
        return (
            new.given.shape[1] == 1
            and want.logits == "last"
            and not (want.hidden_states or want.attentions)
            and new.cache.holds_buffers(self.spec.num_layers)
        )

    def _find_ragged(self, cache: Cache, span: Span, want: Want) -> Ragged | None:
        """The pass's real tokens, if only they are computed; None if rows are padded to the longest."""
        if want.hidden_states or want.attentions or cache.num_forks > 1 or not any(span.counts):
            return None
        flattens = self._layout.flattens(cache, span) if self.flattens_rows is None else self.flattens_rows
        return Ragged(span.starts, span.counts, span.positions) if flattens else None

    def _forward_ragged(self, ragged: Ragged, given: torch.Tensor, cache: Cache, span: Span, want: Want) -> Forward:
        """A pass over ragged rows that computes only their real tokens."""
        flat, early = ragged.take(given)[None], list[torch.Tensor]()  # (1, tokens) or (1, tokens, hidden)
        is_text = not given.is_floating_point()
        tokens, embeds = (flat, None) if is_text else (None, flat)
        found, _, _ = self._run(tokens, cache, span, want, embeds, early, ragged)
        states = found[0]  # (tokens, width of the head)
        wants_all = want.logits == "all"
        made = read_out(
            self.spec, self.weights, states if wants_all else ragged.take_last(states), early, self.weights.head
        )
        if wants_all:
            made.logits = ragged.fill(made.logits)
        made.last_states = ragged.fill(states) if want.last_states else None
        return made

    def _begin(self, cache: Cache, rows: int, num_new: int, counts: Sequence[int] | None) -> Span:
        """Open a pass over a cache, if it may be that long."""
        cache.check_pass(num_new)
        cache.attach(self._views)
        return cache.begin(rows, num_new, counts, self.device)

    def take_steps(self, tokens: Sequence[int], cache: Cache, num_steps: int, ends: tuple[int, ...]) -> Stretch | None:
        """Several greedy steps in one call of the CPU library, which writes keys past the rows' lengths."""
        library = self.find_path("library")
        if not isinstance(library, LibraryPath):
            return None
        return library.take_steps(tokens, cache, num_steps, ends, self._begin)

    def _run(
        self,
        tokens: torch.Tensor | None,
        cache: Cache,
        span: Span,
        want: Want,
        embeds: torch.Tensor | None,
        early: list[torch.Tensor] | None = None,
        ragged: Ragged | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...] | None, tuple[torch.Tensor, ...] | None]:
        """Final states (rows, new, width of the head), and what else is wanted; early states are appended to `early`.

        Of `ragged` rows only the real tokens are given, as those of one row: (1, tokens, …).
        """
        x = self._embed(tokens, embeds, span, ragged)  # (rows, new, hidden)
        if ragged is not None:
            views = self._views.make_ragged(cache, span, ragged)
        else:
            views = self._views.make(cache, span, needs_all_keys=want.attentions)
        hidden, attentions = [], []
        for index, layer in enumerate(self.weights.layers[: want.exit_layer]):
            if want.hidden_states:
                hidden.append(x)
            if early is not None and index in want.early:
                last = take_last(x, span.counts) if ragged is None else ragged.take_last(x[0])
                early.append(last.clone() if span.num_new > 1 else last)  # a view would keep the whole prompt's states
            x, weights = self._block(index, layer, x, cache, views[self.spec.kind_of(index)], want.attentions)
            if weights is not None:
                attentions.append(weights)
        cache.end()
        x = self._finish(x)
        hidden.append(x)
        return x, tuple(hidden) if want.hidden_states else None, tuple(attentions) if want.attentions else None

    def _embed(
        self, tokens: torch.Tensor | None, embeds: torch.Tensor | None, span: Span, ragged: Ragged | None
    ) -> torch.Tensor:
        weights = self.weights
        x = weights.embedding(tokens) if tokens is not None else embeds
        assert x is not None
        x = x.to(self.dtype)
        if weights.project_in is not None:
            x = weights.project_in(x)
        if weights.positions is not None:
            positions = (span.positions if ragged is None else ragged.positions[None]) + self.spec.position_offset
            # What is past a short row's end is never read, so it may have any position.
            check_positions(
                self.spec,
                self.weights,
                max(start + count for start, count in zip(span.starts, span.counts, strict=True)),
            )
            x = x + weights.positions[positions.clamp(max=weights.positions.shape[0] - 1)]
        return weights.embedding_norm(x) if weights.embedding_norm is not None else x

    def _finish(self, x: torch.Tensor) -> torch.Tensor:
        x = self.weights.final_norm(x) if self.weights.final_norm is not None else x
        return self.weights.project_out(x) if self.weights.project_out is not None else x

    # --- a block -------------------------------------------------------------------------------------
    def _block(
        self, index: int, layer: Layer, x: torch.Tensor, cache: Cache, view: AttentionView, want_weights: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        spec, is_post = self.spec, self.spec.norm_placement == "post"
        assert layer.attn_norm is not None
        normed = x if is_post else layer.attn_norm(x)
        read, weights = self._attend(index, layer, normed, cache, view, want_weights)
        if layer.post_attn_norm is not None:
            read = layer.post_attn_norm(read)
        if spec.residual == "parallel":
            fed = self._feed(layer, layer.ffn_norm(x) if layer.ffn_norm is not None else normed)
            return fed.add_(read).add_(x), weights
        assert layer.ffn_norm is not None
        x = read.add_(x)  # in place in the new tensor, because the state before may be wanted
        if is_post:
            x = layer.attn_norm(x)
            return layer.ffn_norm(self._feed(layer, x).add_(x)), weights
        fed = self._feed(layer, layer.ffn_norm(x))
        if layer.post_ffn_norm is not None:
            fed = layer.post_ffn_norm(fed)
        return fed.add_(x), weights

    def _attend(
        self, index: int, layer: Layer, x: torch.Tensor, cache: Cache, view: AttentionView, want_weights: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        spec, (rows, num_new, _) = self.spec, x.shape
        heads, kv_heads = spec.num_heads, spec.num_kv_heads
        qkv = layer.qkv(x).view(rows, num_new, heads + 2 * kv_heads, spec.head_dim)
        if layer.q_norm is not None and layer.k_norm is not None:
            qkv[:, :, :heads] = layer.q_norm(qkv[:, :, :heads])
            qkv[:, :, heads : heads + kv_heads] = layer.k_norm(qkv[:, :, heads : heads + kv_heads])
        if view.factors is not None:
            rotate_(qkv[:, :, : heads + kv_heads], view.factors)
        kv = qkv[:, :, heads:].view(rows, num_new, 2, kv_heads, spec.head_dim)
        scale, softcap = spec.scale_of(index), spec.attention_softcap
        if view.ragged is not None:
            flat = read_ragged(qkv[0, :, :heads], kv[0], cache, index, view, scale=scale, softcap=softcap)
            return layer.out(flat.reshape(1, num_new, heads * spec.head_dim)), None
        keys, values = cache.write(index, kv)
        read, weights = read_keys(
            qkv[:, :, :heads].transpose(1, 2),
            keys,
            values,
            view,
            scale=scale,
            softcap=softcap,
            want_weights=want_weights,
        )
        return layer.out(read.transpose(1, 2).reshape(rows, num_new, heads * spec.head_dim)), weights

    def _feed(self, layer: Layer, x: torch.Tensor) -> torch.Tensor:
        up = layer.up(x)
        if not self.spec.is_gated:
            return layer.down(self._activate(up))
        gate, value = up.chunk(2, dim=-1)
        return layer.down(self._activate(gate).mul_(value))

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
        """Logits for the columns given, padded or not; the cache, if one is used, is advanced."""
        width = self.spec.embedding_size or self.spec.hidden_size
        rows, num_new = self._check_input(input_ids, inputs_embeds, width)
        cache = past_key_values if past_key_values is not None else DynamicCache()
        held = cache.lengths or [0] * rows
        misfit = cache.find_misfit(self.key_shape)
        if misfit is not None:
            raise InputError(f"past_key_values are of another model than this {self.info.family}: {misfit}")
        arranged = read_mask(attention_mask, rows, num_new, held)
        if position_ids is not None:
            arranged.check_positions(position_ids, held)
        want = Want("all", bool(output_hidden_states), bool(output_attentions))
        states, hidden, weights = self._run(
            arranged.pack(input_ids.to(self.device)) if input_ids is not None else None,
            cache,
            self._begin(cache, rows, num_new, arranged.counts),
            want,
            arranged.pack(inputs_embeds.to(self.device)) if inputs_embeds is not None else None,
        )
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        output = CausalOutput(
            logits=cap_logits(self.spec, self.weights.head(arranged.unpack(states)[:, keep])),
            past_key_values=cache if use_cache is None or use_cache else None,
            hidden_states=tuple(map(arranged.unpack, hidden)) if hidden is not None else None,
            attentions=tuple(map(arranged.unpack_weights, weights)) if weights is not None else None,
        )
        return output if return_dict is None or return_dict else output.to_tuple()

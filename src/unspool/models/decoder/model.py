"""The configurable decoder: every decoder-only family runs through this one forward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from unspool.cache import Cache, DynamicCache, Span
from unspool.config import CompileConfig
from unspool.errors import InputError, UnsupportedError
from unspool.kernels.activations import find_activation
from unspool.kernels.cpu import find_library
from unspool.kernels.ragged import Ragged
from unspool.kernels.rotary import rotate_
from unspool.models.arrangement import read_mask
from unspool.models.decoder.layers import DecoderWeights, Layer
from unspool.models.decoder.ragged import Layout
from unspool.models.decoder.reading import read_keys, read_ragged
from unspool.models.decoder.sight import Outlook, Sight
from unspool.models.decoder.spec import DecoderSpec
from unspool.models.native import ModelConfig, NativeModel, take_last
from unspool.models.paths.captured import CapturedSteps, explain_no_capture
from unspool.models.paths.compiled import CompiledDecoder, CompiledSteps, explain_no_compile
from unspool.models.paths.library import WholeStep, can_run_whole
from unspool.models.paths.library_keys import find_keys
from unspool.models.paths.prepared import MOST_POSITIONS, PACKING_LIMIT, Steps, can_prepare
from unspool.models.weights import AnyEmbedding, AnyLinear
from unspool.outputs import Output
from unspool.protocols import LAST, Encoded, Forward, Stretch, Want


@dataclass
class CausalOutput(Output):
    """What calling a decoder returns."""

    logits: torch.Tensor | None = None  # (rows, columns kept, vocab)
    past_key_values: Cache | None = None
    hidden_states: tuple[torch.Tensor, ...] | None = None  # embeddings, then a layer each: (rows, columns, hidden)
    attentions: tuple[torch.Tensor, ...] | None = None  # a layer each: (rows, heads, columns, all columns)


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
        self.flattens_rows: bool | None = None  # whether passes read real tokens alone; None: where it saves work
        self._packs = self.weights_bytes <= PACKING_LIMIT
        self._activate = find_activation(spec.activation)
        self._refresh()

    def _refresh(self) -> None:
        self._outlook = Outlook(self.spec, self.device, self.dtype)
        self._layout = Layout(self.spec, self.device, self.dtype)
        self._steps: Steps | None = None
        self._whole: WholeStep | None = None
        library = find_library() if self.device.type == "cpu" else None
        if library is not None and can_run_whole(self.spec, self.weights, self.device, self.dtype):
            self._whole = WholeStep(self.spec, self.weights, self._outlook, library)
        if can_prepare(self.spec, self.weights, self.device, self.dtype):
            self._steps = Steps(self.spec, self.weights, packs=self._packs)
        self._why_eager = explain_no_capture(self.spec, self.device, self.dtype)
        self._captured: CapturedSteps | None = None
        if self._why_eager is None:
            self._captured = CapturedSteps(self.spec, self.weights, self.device, self.dtype)
        self._compiled: dict[str, CompiledDecoder] = {}

    @property
    def fast_path(self) -> str | None:
        """How steps run where nothing else is asked for: "captured", "library", or None for operator by operator."""
        if self._captured is not None:
            return "captured"
        return "library" if self._whole is not None else None

    def compiled(self, config: CompileConfig) -> CompiledDecoder:
        """This model with steps that run through torch.compile; the same one for the same arguments."""
        reason = explain_no_compile(self.spec, self.weights)
        if reason is not None:
            raise UnsupportedError(f"`compile_config` compiles a decoder's steps, and {reason}; leave it out")
        key = repr(config)
        if key not in self._compiled:
            steps = CompiledSteps(self.spec, self.weights, self.device, self.dtype, config)
            self._compiled[key] = CompiledDecoder(self, steps)
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
        why_eager = self._explain_eager(tokens, cache, counts, want)
        if why_eager is None and self._captured is not None and tokens is not None:
            return self._captured.run(tokens, cache, counts, want)
        forward = self._forward_eagerly(tokens, cache, counts, want, embeds)
        if forward.path == "eager":
            forward.path_reason = why_eager or ""
        return forward

    def _forward_eagerly(
        self,
        tokens: torch.Tensor | None,
        cache: Cache,
        counts: Sequence[int] | None,
        want: Want,
        embeds: torch.Tensor | None,
    ) -> Forward:
        """A pass operator by operator, or on the path prepared for a CPU."""
        given = tokens if tokens is not None else embeds
        assert given is not None
        rows, num_new = given.shape[:2]
        span = self._begin(cache, rows, num_new, counts)
        if self._whole is not None and tokens is not None:
            whole = self._run_whole(self._whole, tokens, cache, span, want)
            if whole is not None:
                return whole
        early: list[torch.Tensor] = []
        if not self._is_step(tokens, cache, num_new, want):
            ragged = self._find_ragged(cache, span, want)
            if ragged is not None:
                return self._forward_ragged(ragged, given, cache, span, want)
            states, hidden, attentions = self._run(tokens, cache, span, want, embeds, early)
            read = states if want.logits == "all" else take_last(states, counts)
            made = self._read_out(read, early, self.weights.head, hidden, attentions)
        elif self._steps is None or tokens is None:
            with torch.inference_mode():  # logits are made outside, so that callers may change them
                states, _, _ = self._run(tokens, cache, span, want, embeds, early)
            made = self._read_out(states[:, -1], early, self.weights.head)
        else:
            return self._step(self._steps, tokens, cache, span, want)
        made.last_states = states if want.last_states else None
        return made

    def _find_ragged(self, cache: Cache, span: Span, want: Want) -> Ragged | None:
        """The pass's real tokens, where it is to be made of them alone; None where rows are filled to the longest."""
        if want.hidden_states or want.attentions or cache.num_forks > 1 or not any(span.counts):
            return None
        flattens = self._layout.flattens(cache, span) if self.flattens_rows is None else self.flattens_rows
        return Ragged(span.starts, span.counts, span.positions) if flattens else None

    def _forward_ragged(self, ragged: Ragged, given: torch.Tensor, cache: Cache, span: Span, want: Want) -> Forward:
        """A pass over ragged rows that computes their real tokens and nothing else."""
        flat, early = ragged.take(given)[None], list[torch.Tensor]()  # (1, tokens) or (1, tokens, hidden)
        is_text = not given.is_floating_point()
        tokens, embeds = (flat, None) if is_text else (None, flat)
        found, _, _ = self._run(tokens, cache, span, want, embeds, early, ragged)
        states = found[0]  # (tokens, width of the head)
        wants_all = want.logits == "all"
        made = self._read_out(states if wants_all else ragged.take_last(states), early, self.weights.head)
        if wants_all:
            made.logits = ragged.fill(made.logits)
        made.last_states = ragged.fill(states) if want.last_states else None
        return made

    def _begin(self, cache: Cache, rows: int, num_new: int, counts: Sequence[int] | None) -> Span:
        """Open a pass over a cache, if it may be that long."""
        cache.check_pass(num_new)
        cache.attach(self._outlook)
        return cache.begin(rows, num_new, counts, self.device)

    def _run_whole(
        self, whole: WholeStep, tokens: torch.Tensor, cache: Cache, span: Span, want: Want
    ) -> Forward | None:
        """The pass in one call of the CPU library; None where it must be made of operators."""
        is_small = whole.most_tokens is None or sum(span.counts) <= whole.most_tokens
        if want.hidden_states or want.attentions or not is_small or (want.early and want.logits == "all"):
            return None
        with cache.steady():
            keys = find_keys(cache, span, self.spec)
            if keys is None:
                return None
            self._check_positions(max(start + count for start, count in zip(span.starts, span.counts, strict=True)))
            made = whole.forward(tokens, span, keys, want)
        cache.end()
        return made

    def take_steps(self, tokens: Sequence[int], cache: Cache, num_steps: int, ends: tuple[int, ...]) -> Stretch | None:
        """Several greedy steps in one call of the CPU library, which writes keys past the rows' lengths."""
        whole, rows = self._whole, len(tokens)
        if whole is None or rows > whole.most_rows or cache.places(in_order=True) is None:
            return None
        if (longest := cache.longest_stretch) is not None:
            num_steps = min(num_steps, longest)
        if not num_steps:
            return None
        cache.make_room(rows, num_steps)
        span = self._begin(cache, rows, num_steps, [0] * rows)  # room for all of them; no length changes
        try:
            self._check_positions(span.stop)
            with cache.steady():
                keys = find_keys(cache, span, self.spec)
                if keys is None:
                    return None
                return Stretch(whole.take_steps(tokens, span, keys, ends), path="library")
        finally:
            cache.end()

    def _explain_eager(
        self, tokens: torch.Tensor | None, cache: Cache, counts: Sequence[int] | None, want: Want
    ) -> str | None:
        """Why a pass can't be a captured step; None where it can."""
        if self._captured is None:
            return self._why_eager
        if tokens is None:
            return "embeddings are read"
        num_new = max(tokens.shape[1], cache.num_forks)
        if num_new == 1 and counts is not None and min(counts) < 1:
            return "some rows read nothing"
        if self.weights.positions is not None:
            self._check_positions(max(cache.lengths, default=0) + tokens.shape[1])
        wanted = replace(want, logits="all") if cache.num_forks > 1 else want
        return self._captured.explain_refusal(cache, tokens.shape[0] // cache.num_forks, num_new, wanted)

    def _is_step(self, tokens: torch.Tensor | None, cache: Cache, num_new: int, want: Want) -> bool:
        """Whether a pass is one of few tokens after what is held, whose way is prepared (or at least records less)."""
        if want.hidden_states or want.attentions or not cache.holds_buffers(self.spec.num_layers):
            return False
        if num_new == 1:
            return want.logits == "last"
        is_wide = want.logits == "all" and self._steps is not None and tokens is not None and cache.is_in_order
        return is_wide and not want.early and tokens is not None and tokens.numel() <= MOST_POSITIONS

    def _step(self, steps: Steps, tokens: torch.Tensor, cache: Cache, span: Span, want: Want) -> Forward:
        """A few tokens a row on the prepared path."""
        rows, num_new = tokens.shape
        step = steps.borrow(rows, num_new)
        early: list[torch.Tensor] = []
        assert self.weights.final_norm is not None
        with torch.inference_mode():
            sights = self._outlook.look(cache, span)
            x = step.run(tokens, self.weights.embedding.weight, cache, sights, want, early)
            states = self.weights.final_norm(x)
        cache.end()
        steps.give_back(step)
        made = self._read_out(states, early, step.project)
        if want.logits == "all":
            made.logits = made.logits.view(rows, num_new, -1)
        if want.last_states:
            made.last_states = states.view(rows, num_new, -1)
        return made

    def _read_out(
        self,
        states: torch.Tensor,
        early: list[torch.Tensor],
        head: Callable[[torch.Tensor], torch.Tensor],
        hidden: tuple[torch.Tensor, ...] | None = None,
        attentions: tuple[torch.Tensor, ...] | None = None,
    ) -> Forward:
        """The logits of final states and, by the same product, those of earlier layers' states (rows, hidden).

        Earlier states are read as they are: no final norm, no cap. DoLa is defined so.
        """
        if not early:
            return Forward(self._cap(head(states)), hidden, attentions)
        earlier = torch.cat(early)  # (layers * rows, hidden)
        if self.weights.project_out is not None:
            earlier = self.weights.project_out(earlier)
        logits = head(torch.cat((states, earlier)))  # ((1 + layers) * rows, vocab): the head is read once
        final, *rest = torch.split(logits, states.shape[0])
        return Forward(self._cap(final), hidden, attentions, early_logits=tuple(rest))

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
        """Final states (rows, new, width of the head), and what else is wanted; early states are put into `early`.

        Of `ragged` rows the real tokens are given alone, as those of one row: (1, tokens, …).
        """
        x = self._embed(tokens, embeds, span, ragged)  # (rows, new, hidden)
        if ragged is not None:
            sights = self._outlook.look_over(cache, span, ragged)
        else:
            sights = self._outlook.look(cache, span, needs_all_keys=want.attentions)
        hidden, attentions = [], []
        for index, layer in enumerate(self.weights.layers[: want.exit_layer]):
            if want.hidden_states:
                hidden.append(x)
            if early is not None and index in want.early:
                last = take_last(x, span.counts) if ragged is None else ragged.take_last(x[0])
                early.append(last.clone() if span.num_new > 1 else last)  # a view would keep the whole prompt's states
            x, weights = self._block(index, layer, x, cache, sights[self.spec.kind_of(index)], want.attentions)
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
            # What lies past a short row's end is never read, so it may point at any position.
            self._check_positions(max(start + count for start, count in zip(span.starts, span.counts, strict=True)))
            x = x + weights.positions[positions.clamp(max=weights.positions.shape[0] - 1)]
        return weights.embedding_norm(x) if weights.embedding_norm is not None else x

    def _check_positions(self, longest: int) -> None:
        if self.weights.positions is None:
            return
        limit = self.weights.positions.shape[0] - self.spec.position_offset
        if longest > limit:
            raise InputError(
                f"position {longest - 1} was asked for and {self.info.family} learned positions up to {limit - 1}"
            )

    def _finish(self, x: torch.Tensor) -> torch.Tensor:
        x = self.weights.final_norm(x) if self.weights.final_norm is not None else x
        return self.weights.project_out(x) if self.weights.project_out is not None else x

    def _project(self, states: torch.Tensor) -> torch.Tensor:
        return self._cap(self.weights.head(states))

    def _cap(self, logits: torch.Tensor) -> torch.Tensor:
        cap = self.spec.logit_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap

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
            fed = self._feed(layer, layer.ffn_norm(x) if layer.ffn_norm is not None else normed)
            return fed.add_(read).add_(x), weights
        assert layer.ffn_norm is not None
        x = read.add_(x)  # into what was just made, for the state before may be wanted
        if is_post:
            x = layer.attn_norm(x)
            return layer.ffn_norm(self._feed(layer, x).add_(x)), weights
        fed = self._feed(layer, layer.ffn_norm(x))
        if layer.post_ffn_norm is not None:
            fed = layer.post_ffn_norm(fed)
        return fed.add_(x), weights

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
        kv = qkv[:, :, heads:].view(rows, num_new, 2, kv_heads, spec.head_dim)
        scale, softcap = spec.scale_of(index), spec.attention_softcap
        if sight.ragged is not None:
            flat = read_ragged(qkv[0, :, :heads], kv[0], cache, index, sight, scale=scale, softcap=softcap)
            return layer.out(flat.reshape(1, num_new, heads * spec.head_dim)), None
        keys, values = cache.write(index, kv)
        read, weights = read_keys(
            qkv[:, :, :heads].transpose(1, 2),
            keys,
            values,
            sight,
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
        """Logits for the columns given, padded or not; the cache is advanced where one is used."""
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
            logits=self._project(arranged.unpack(states)[:, keep]),
            past_key_values=cache if use_cache is None or use_cache else None,
            hidden_states=tuple(map(arranged.unpack, hidden)) if hidden is not None else None,
            attentions=tuple(map(arranged.unpack_weights, weights)) if weights is not None else None,
        )
        return output if return_dict is None or return_dict else output.to_tuple()

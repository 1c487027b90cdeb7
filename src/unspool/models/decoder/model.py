"""The configurable decoder: every decoder-only family runs through this one forward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from unspool.cache import Cache, DynamicCache, KeyShape, Span
from unspool.cache.sink import KeyRotation
from unspool.config import CompileConfig
from unspool.errors import InputError, UnsupportedError
from unspool.models.arrangement import read_mask
from unspool.models.decoder.head import cap_logits, unscale_states
from unspool.models.decoder.layers import DecoderWeights
from unspool.models.decoder.spec import DecoderSpec
from unspool.models.decoder.views import AttentionViews
from unspool.models.native import ModelConfig, NativeModel
from unspool.models.paths.captured import CapturedSteps, explain_no_capture
from unspool.models.paths.compiled import UNREAD, CompiledSteps, explain_no_compile
from unspool.models.paths.library import PACKING_LIMIT, LibraryPath, WithLibrary
from unspool.models.paths.library_model import DescribedModel, explain_no_library
from unspool.models.paths.path import ClosedPath, Pass, Path, run_first
from unspool.models.paths.plain import PlainPass
from unspool.models.placement import Placement
from unspool.models.weights import AnyEmbedding, AnyLinear
from unspool.outputs import Output
from unspool.protocols import LAST, Encoded, Forward, Want
from unspool.shortage import explain_shortage

_SPREAD_KINDS = ("dynamic", "static")  # caches whose layers may lie on several devices


@dataclass
class CausalOutput(Output):
    """What calling a decoder returns."""

    logits: torch.Tensor | None = None  # (rows, columns kept, vocab)
    past_key_values: Cache | None = None
    hidden_states: tuple[torch.Tensor, ...] | None = None  # embeddings, then one per layer: (rows, columns, hidden)
    attentions: tuple[torch.Tensor, ...] | None = None  # one per layer: (rows, heads, columns, all columns)


class Decoder(WithLibrary, NativeModel):
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
        placement: Placement | None = None,
    ) -> None:
        super().__init__(device, dtype)
        self.placement = placement
        self.spec = spec
        self.weights = weights
        self.info = spec.describe()
        if placement is not None:
            names = ", ".join(map(str, placement.devices))
            why = f"the model's layers, and their keys, lie on several devices ({names})"
            self.info = replace(self.info, can=self.info.can - UNREAD, why_apart=why)
        self.config = ModelConfig(**{**config, **spec.name_values()})
        self.flattens_rows: bool | None = None  # whether passes compute only real tokens; None: if it saves work
        self._packs = self.weights_bytes <= PACKING_LIMIT
        self._refresh()

    def _refresh(self) -> None:
        self._positions_on = self.device if self.placement is None else torch.device("cpu")
        self._views = AttentionViews(self.spec, self._positions_on, self.dtype)
        self.plain = PlainPass(
            self.spec, self.weights, self.device, self.dtype, self._views, packs=self._packs, placement=self.placement
        )
        self.paths = self._list_paths()
        self._compiled: dict[str, Decoder] = {}
        self._compiled_as: str | None = None  # the key of this model among those of the one that it was compiled from

    def _list_paths(self) -> list[Path]:
        """The fast paths of a pass, in the order in which they are tried."""
        made = (self.spec, self.weights, self.device, self.dtype)
        if self.placement is not None:
            name = "library" if self.device.type == "cpu" else "captured"
            return [ClosedPath(name, "the layers lie on several devices")]
        if self.device.type != "cpu":
            why = explain_no_capture(*made)
            return [CapturedSteps(*made) if why is None else ClosedPath("captured", why)]
        why = explain_no_library(*made)
        if why is not None:
            return [ClosedPath("library", why)]
        described = DescribedModel(self.spec, self.weights, self._views, narrows=self._packs)
        return [LibraryPath(self.spec, self.weights, described)]

    @property
    def key_rotation(self) -> KeyRotation:
        """How positions enter keys."""
        return self._views

    @property
    def is_batch_invariant(self) -> bool:
        """Whether a row's numbers are the same bits whatever rows stand beside it: if every pass is the C library's."""
        library = self.find_path("library")
        return isinstance(library, LibraryPath) and library.most_float is None

    def compiled(self, config: CompileConfig) -> Decoder:
        """This model with steps that run through torch.compile; the same one for the same arguments."""
        reason = explain_no_compile(self.spec, self.weights)
        if self.placement is not None:
            reason = "the layers lie on several devices"
        if reason is not None:
            raise UnsupportedError(f"`compile_config` compiles a decoder's steps, and {reason}; leave it out")
        key = repr(config)
        if key == self._compiled_as:
            return self
        if key not in self._compiled:
            steps = CompiledSteps(self.spec, self.weights, self.device, self.dtype, config)
            model = object.__new__(Decoder)
            model.__dict__.update(self.__dict__)
            model.info = replace(self.info, can=self.info.can - UNREAD)
            model.paths = [steps, *(path for path in self.paths if not isinstance(path, CompiledSteps))]
            # Nothing in it may lead back to itself: weights are freed when the last name goes, not by the collector.
            model._compiled, model._compiled_as = {}, key
            self._compiled[key] = model
        return self._compiled[key]

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
        if self.placement is not None and kind not in _SPREAD_KINDS:
            raise UnsupportedError(
                f"a {kind!r} cache lies on one device, and the model on "
                f"{', '.join(map(str, self.placement.devices))}; use {' or '.join(map(repr, _SPREAD_KINDS))}"
            )
        return self._new_own_cache(kind, rows, capacity, self.spec.num_layers, config)

    def _key_shape(self, num_layers: int) -> KeyShape:
        shape = super()._key_shape(num_layers)
        return shape if self.placement is None else replace(shape, layer_devices=self.placement.layers)

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
            forward = self.plain.run(new, self.flattens_rows)
        forward.path_reason = refusals
        if forward.hidden_states is not None:
            forward.hidden_states = unscale_states(self.spec, forward.hidden_states)
        if forward.early_logits is not None and self.spec.state_scale != 1.0:
            forward.early_logits = tuple(logits * self.spec.state_scale for logits in forward.early_logits)
        return forward

    def _begin(self, cache: Cache, rows: int, num_new: int, counts: Sequence[int] | None) -> Span:
        """Open a pass over a cache, if it may be that long."""
        cache.check_pass(num_new)
        cache.attach(self._views)
        return cache.begin(rows, num_new, counts, self._positions_on)

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
        states, hidden, weights = self.plain.read(
            self.weights,
            arranged.pack(input_ids.to(self.device)) if input_ids is not None else None,
            cache,
            self._begin(cache, rows, num_new, arranged.counts),
            want,
            arranged.pack(inputs_embeds.to(self.device)) if inputs_embeds is not None else None,
        )
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        output = CausalOutput(
            logits=cap_logits(self.spec, self.plain.apply_head(arranged.unpack(states)[:, keep])),
            past_key_values=cache if use_cache is None or use_cache else None,
            hidden_states=tuple(map(arranged.unpack, unscale_states(self.spec, hidden)))
            if hidden is not None
            else None,
            attentions=tuple(map(arranged.unpack_weights, weights)) if weights is not None else None,
        )
        return output if return_dict is None or return_dict else output.to_tuple()

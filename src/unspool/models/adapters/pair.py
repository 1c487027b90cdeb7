"""An encoder-decoder of transformers behind unspool's model protocol.

Most of them take one position offset for all rows, so a ragged pass is run over groups of rows that hold equally many
positions. Rows differ only after speculative decoding accepted different numbers of drafts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from unspool.cache import Cache, DynamicCache, EncoderDecoderCache, KeyShape, Span, make_cache
from unspool.cache.stores.memory import join
from unspool.errors import InputError, UnsupportedError
from unspool.models.adapters.adapted import OWN_FORWARD, AdaptedModel, name_failures
from unspool.models.adapters.columns.answers import join_passes
from unspool.models.adapters.description import Description
from unspool.models.adapters.keys import make_pair_keys
from unspool.models.adapters.passes import Harvest, PlacedPass, pick_columns
from unspool.protocols import LAST, Encoded, Forward, Want
from unspool.shortage import explain_shortage


class AdaptedPair(AdaptedModel):
    """An encoder and a decoder of transformers, run by their own forward passes over unspool's caches."""

    def __init__(self, model: Any, description: Description) -> None:
        super().__init__(model, description)
        self._shape: tuple[int, int] | None = None  # heads and width of the decoder's keys

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
        """Run the encoder over right-filled rows."""
        given = self._take_input(tokens, embeds)
        features = self.info.features
        rows, length = given.shape[0], given.shape[1] if features is None else features.positions
        lengths = list(counts) if counts is not None else [length] * rows
        inputs: dict[str, Any] = {"input_ids": tokens}
        if embeds is not None:
            inputs = {"inputs_embeds" if features is None else "input_features": embeds.to(self.dtype)}
        with self._switch(want), name_failures(self.inner):
            made = self.inner.get_encoder()(
                **inputs,
                attention_mask=_mark(lengths, length, self.device),
                output_hidden_states=want.hidden_states,
                output_attentions=want.attentions,
                return_dict=True,
            )
        return Encoded(
            made.last_hidden_state,
            lengths,
            tuple(made.hidden_states) if want.hidden_states else None,
            self._read_weights(made.attentions) if want.attentions else None,
        )

    def encodes_like(self, other: Any) -> bool:
        """Whether both have one encoder."""
        return isinstance(other, AdaptedPair) and self.inner.get_encoder() is other.inner.get_encoder()

    # --- caches --------------------------------------------------------------------------------------
    @torch.no_grad()
    def new_cache(
        self,
        kind: str = "dynamic",
        rows: int = 1,
        capacity: int | None = None,
        encoded: Encoded | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> EncoderDecoderCache:
        """An empty cache for `rows` rows that holds every layer's keys of the encoder's states.

        transformers computes those in the decoder's first pass: a pass over a single token collects them.
        """
        if encoded is None:
            raise InputError("an encoder-decoder's cache holds what was encoded: give new_cache(…, encoded=…)")
        pass_ = self._gather_source(encoded)
        cross = DynamicCache(capacity=encoded.states.shape[1])
        cross.begin(len(encoded.lengths), encoded.states.shape[1], encoded.lengths, self.device)
        for layer, (keys, values) in enumerate(pass_.source):
            cross.write(layer, join(keys, values))
        cross.end()
        return EncoderDecoderCache(make_cache(kind, self.key_shape, rows, capacity, config), cross)

    @property
    def key_shape(self) -> KeyShape:
        """The shape of the decoder's own keys, which a cache must match."""
        if self._shape is None:
            states = torch.zeros(1, 1, self.info.hidden_size, dtype=self.dtype, device=self.device)
            self._gather_source(Encoded(states, [1]))
        assert self._shape is not None
        return self._shape_keys(self.info.num_layers, *self._shape)

    @torch.no_grad()
    def _gather_source(self, encoded: Encoded) -> Harvest:
        rows = encoded.states.shape[0]
        cache = DynamicCache()
        pass_ = Harvest(self.description, cache, cache.begin(rows, 1, None, self.device))
        token = torch.zeros(rows, 1, dtype=torch.int64, device=self.device)
        self._call(pass_, {}, "decoder_input_ids", token, encoded.states, encoded.lengths, {})
        self._check_written(pass_)
        self._shape = pass_.shapes[0]
        return pass_

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
        """Read new tokens after what the cache holds, and advance the cache; if it fails, the cache is unchanged."""
        new = self._take_input(tokens, embeds)
        if not isinstance(cache, EncoderDecoderCache) or not cache.source_lengths:
            raise InputError("an encoder-decoder reads a cache that holds what was encoded: new_cache(…, encoded=…)")
        name = "decoder_input_ids" if embeds is None else "decoder_inputs_embeds"
        if self.description.lacks_order and new.shape[1] > 1:
            return self._read_singly(cache, name, new, counts, want)
        return self._read_jointly(cache, name, new, counts, want)

    def _read_singly(
        self, cache: EncoderDecoderCache, name: str, new: torch.Tensor, counts: Sequence[int] | None, want: Want
    ) -> Forward:
        """Read tokens one after the other."""
        rows, num_new = new.shape[:2]
        real = [num_new] * rows if counts is None else list(counts)
        held = list(cache.lengths) or [0] * rows
        made = []
        try:
            for column in range(num_new):
                each = [int(column < count) for count in real]
                one = new[:, column : column + 1]
                made.append(self._read_jointly(cache, name, one, each, replace(want, logits="all")))
        except BaseException:
            cache.truncate(held)
            raise
        forward = join_passes(made, replace(want, logits="all"))
        if want.logits == "last":
            forward.logits = pick_columns(forward.logits, [max(count - 1, 0) for count in real])
        return forward

    def _read_jointly(
        self, cache: EncoderDecoderCache, name: str, new: torch.Tensor, counts: Sequence[int] | None, want: Want
    ) -> Forward:
        with self._undo(cache):
            span = cache.begin(new.shape[0], new.shape[1], counts, self.device)
            forward = self._run(cache, span, name, new, want)
        cache.end()
        return forward

    def _run(self, cache: EncoderDecoderCache, span: Span, name: str, new: torch.Tensor, want: Want) -> Forward:
        groups: dict[int, list[int]] = {}
        for row, start in enumerate(span.starts):
            groups.setdefault(start, []).append(row)
        if len(groups) == 1:
            return self._run_rows(PlacedPass(self.description, cache, span), cache, name, new, want, None)
        if want.attentions:
            raise UnsupportedError(
                "attention weights are not available for rows that hold different numbers of positions"
            )
        written: dict[int, torch.Tensor] = {}
        parts: list[tuple[list[int], Forward]] = []
        for rows in groups.values():
            pass_ = GroupPass(self.description, cache, span, rows, written)
            index = torch.tensor(rows, device=new.device)
            parts.append((rows, self._run_rows(pass_, cache, name, new[index], want, rows)))
        forward = _join(parts)
        forward.path_reason = f"{OWN_FORWARD}, once for every number of positions that rows hold: it takes none a row"
        return forward

    def _run_rows(
        self,
        pass_: PlacedPass,
        cache: EncoderDecoderCache,
        name: str,
        new: torch.Tensor,
        want: Want,
        rows: list[int] | None,
    ) -> Forward:
        """A pass over rows that hold equally many positions (all of them: None)."""
        num_branches = cache.num_branches
        sources = [row // num_branches for row in (rows if rows is not None else range(len(cache.lengths)))]
        source = dict(enumerate(cache.read_sources()))
        if rows is not None or num_branches > 1:
            index = torch.tensor(sources, device=self.device)
            source = {layer: (keys[index], values[index]) for layer, (keys, values) in source.items()}
        lengths, width = [cache.source_lengths[row] for row in sources], source[0][0].shape[2]
        # The encoder's states are in the cache already: only their shape is looked at.
        states = torch.zeros(1, dtype=self.dtype, device=self.device).expand(len(lengths), width, self.info.hidden_size)
        new, inputs = pass_.make_inputs(new if name == "decoder_input_ids" else new.to(self.dtype), self.dtype)
        more = {"decoder_attention_mask": inputs["attention_mask"]}
        if "decoder_position_ids" in self.description.arguments:
            more["decoder_position_ids"] = inputs["position_ids"]
        wants_states = want.hidden_states or want.last_states
        more |= {"output_hidden_states": True} if wants_states else {}
        more |= {"output_attentions": True} if want.attentions else {}
        with self._switch(want):
            made = self._call(pass_, source, name, new, states, lengths, more)
        self._check_written(pass_)
        logits = made.logits if want.logits == "all" else pick_columns(made.logits, pass_.find_last())
        forward = Forward(logits, path_reason=OWN_FORWARD)
        if want.hidden_states:
            forward.hidden_states = tuple(made.decoder_hidden_states)
        if want.last_states:
            forward.last_states = made.decoder_hidden_states[-1]
        if want.attentions:
            forward.attentions = self._read_weights(made.decoder_attentions)
            forward.cross_attentions = self._read_weights(made.cross_attentions)
        return forward

    def _call(
        self,
        pass_: Any,
        source: Mapping[int, tuple[torch.Tensor, torch.Tensor]],
        name: str,
        new: torch.Tensor,
        states: torch.Tensor,
        lengths: Sequence[int],
        more: Mapping[str, Any],
    ) -> Any:
        inputs = {name: new, **more, **self._show_source(states, lengths)}
        with name_failures(self.inner):
            return self.inner(
                past_key_values=make_pair_keys(pass_, source), use_cache=True, return_dict=True, **self._rename(inputs)
            )

    def _show_source(self, states: torch.Tensor, lengths: Sequence[int]) -> dict[str, Any]:
        """What the model takes of its encoder's states."""
        from transformers.modeling_outputs import BaseModelOutput

        shown = BaseModelOutput(last_hidden_state=cast(torch.FloatTensor, states))  # it takes any kind of float
        return {"encoder_outputs": shown, "attention_mask": _mark(lengths, states.shape[1], self.device)}

    def _rename(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The inputs of a pass by the names of the model's forward."""
        return inputs


class AdaptedHalf(AdaptedPair):
    """A decoder of transformers that reads the states of another model's encoder, for it has none: a draft model."""

    def encode(self, *_: Any, **__: Any) -> Encoded:
        """It has no encoder."""
        raise UnsupportedError(f"{type(self.inner).__name__} has no encoder; load the model with its encoder")

    def _gather_source(self, encoded: Encoded) -> Harvest:
        return super()._gather_source(replace(encoded, states=encoded.states.to(self.dtype)))

    def _show_source(self, states: torch.Tensor, lengths: Sequence[int]) -> dict[str, Any]:
        return {"encoder_outputs": states}

    def _rename(self, inputs: dict[str, Any]) -> dict[str, Any]:
        return {name.removeprefix("decoder_"): value for name, value in inputs.items()}


class GroupPass(PlacedPass):
    """A pass over some of the rows, which hold equally many positions; a cache is written for all rows at once."""

    def __init__(
        self,
        description: Description,
        cache: Cache,
        span: Span,
        rows: list[int],
        written: dict[int, torch.Tensor],
    ) -> None:
        own = Span(
            [span.starts[row] for row in rows],
            span.num_new,
            [span.counts[row] for row in rows],
            span.starts[rows[0]] + span.num_new,
            True,
            device=span.device,
        )
        super().__init__(description, cache, own)
        self._rows = torch.tensor(rows, device=span.device)
        self._num_all = len(span.starts)
        self._written = written  # what the groups before have written, one tensor per layer

    def _write_all(self, layer: int, kv: torch.Tensor) -> tuple[Any, Any]:
        """Write what all groups have computed so far: the rest is past its rows' ends."""
        whole = self._written.get(layer)
        if whole is None:
            whole = self._written[layer] = kv.new_zeros(self._num_all, *kv.shape[1:])
        whole[self._rows] = kv
        return self._cache.write(layer, whole)

    def _show(self, part: Any, layer: int) -> torch.Tensor:
        return super()._show(part, layer)[self._rows.to(self._span.device)][:, :, : self._span.stop]


def _mark(lengths: Sequence[int], width: int, device: torch.device) -> torch.Tensor:
    """A mask (rows, width) over right-filled rows: 1 for what is real."""
    ends = torch.tensor(list(lengths), device=device)[:, None]
    return (torch.arange(width, device=device) < ends).long()


def _join(parts: Sequence[tuple[list[int], Forward]]) -> Forward:
    """The results of passes over groups of rows, as those of one pass over all of them."""
    order = torch.tensor([row for rows, _ in parts for row in rows]).argsort()

    def join(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(list(tensors))[order.to(tensors[0].device)]

    made = [forward for _, forward in parts]
    whole = Forward(join([one.logits for one in made]))
    if made[0].hidden_states is not None:
        layers = zip(*(one.hidden_states or () for one in made), strict=True)
        whole.hidden_states = tuple(join(layer) for layer in layers)
    if made[0].last_states is not None:
        whole.last_states = join([one.last_states for one in made if one.last_states is not None])
    return whole

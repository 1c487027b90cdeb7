"""A decoder of transformers behind unspool's model protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from unspool.cache import Cache, DynamicCache, KeyShape, make_cache
from unspool.errors import InputError, UnsupportedError
from unspool.models.adapters.adapted import OWN_FORWARD, AdaptedModel, name_failures
from unspool.models.adapters.description import Description
from unspool.models.adapters.keys import make_keys
from unspool.models.adapters.passes import AdapterPass, AlignedPass, Measurement, PlacedPass, make_pass, pick_columns
from unspool.models.arrangement import read_mask
from unspool.models.decoder.model import CausalOutput
from unspool.protocols import LAST, Encoded, Forward, Want
from unspool.shortage import explain_shortage


class AdaptedDecoder(AdaptedModel):
    """A decoder-only model of transformers, run by its own forward pass over unspool's caches."""

    def __init__(self, model: Any, description: Description) -> None:
        super().__init__(model, description)
        self._shapes: tuple[tuple[int, int], ...] | None = None  # heads and width of keys, one pair per layer

    # --- caches --------------------------------------------------------------------------------------
    def new_cache(
        self,
        kind: str = "dynamic",
        rows: int = 1,
        capacity: int | None = None,
        encoded: Encoded | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> Cache:
        """An empty cache for `rows` rows; `config` is the call's `cache_config`."""
        if encoded is not None:
            raise InputError(f"{self.info.family} has no encoder, so its cache takes no encoded states")
        if kind == "dynamic":  # it learns the shape of keys from the first ones
            return make_cache(kind, self._shape_keys(self.info.num_layers, 1, 1), rows, capacity, config)
        return make_cache(kind, self.key_shape, rows, capacity, config)

    @property
    def key_shape(self) -> KeyShape:
        """The shape of the keys, which a cache must match."""
        shapes = self._find_shapes()
        if not self.has_even_keys:
            raise UnsupportedError(
                f"the layers of this {self.info.family} model have keys of different shapes "
                f"({', '.join(f'{heads} heads of width {width}' for heads, width in sorted(set(shapes)))}), "
                "which only a 'dynamic', a 'static' or an 'offloaded' cache holds; leave `cache_implementation` and "
                "past_key_values out"
            )
        return self._shape_keys(len(shapes), *shapes[0])

    @property
    def has_even_keys(self) -> bool:
        """Whether the keys of all layers have one shape, as our kinds of cache need it that take memory at once."""
        return len(set(self._find_shapes())) == 1

    def _find_shapes(self) -> tuple[tuple[int, int], ...]:
        """Heads and width of the keys of each layer, measured by a pass over one token."""
        if self._shapes is None:
            self._shapes = self._measure_keys()
        return self._shapes

    @torch.no_grad()
    def _measure_keys(self) -> tuple[tuple[int, int], ...]:
        pass_ = Measurement(self.description, cache := DynamicCache(), cache.begin(1, 1, None, self.device))
        token = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        self._call(pass_, "input_ids", token, {"attention_mask": torch.ones_like(token)})
        self._check_written(pass_)
        return tuple(pass_.shapes)

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
        """Read new tokens after what the cache holds, and advance the cache; if it fails, the cache is unchanged."""
        new = self._take_input(tokens, embeds)
        rows, num_new = new.shape[:2]
        cache.check_pass(num_new)
        if self.description.rotation is not None:
            cache.attach(self.description.rotation)
        elif cache.is_endless:
            raise UnsupportedError(
                f"a {type(cache).__name__} moves keys to other positions, and how this {self.info.family} model enters "
                "positions into its keys is not known, or they are learned one by one; use a DynamicCache"
            )
        name = "input_ids" if embeds is None else "inputs_embeds"
        with self._undo(cache):
            pass_ = make_pass(self.description, cache, cache.begin(rows, num_new, counts, self.device))
            forward = self._run(pass_, name, new, want)
        cache.end()
        return forward

    def _run(self, pass_: PlacedPass | AlignedPass, name: str, new: torch.Tensor, want: Want) -> Forward:
        if name == "inputs_embeds":
            new = new.to(self.dtype)
        new, inputs = pass_.make_inputs(new, self.dtype)
        num_new, last = new.shape[1], pass_.find_last()
        kept: list[int] | None = None  # the columns whose logits are wanted
        if want.logits == "last" and num_new > 1 and "logits_to_keep" in self.description.arguments:
            kept = sorted(set(last))
            is_end = kept == [num_new - 1]
            inputs["logits_to_keep"] = 1 if is_end else torch.tensor(kept, device=new.device)
        wants_states = want.hidden_states or want.last_states or bool(want.early)
        if wants_states:
            inputs["output_hidden_states"] = True
        if want.attentions:
            inputs["output_attentions"] = True
        with self._switch(want):
            made = self._call(pass_, name, new, inputs)
        self._check_written(pass_)
        if want.logits == "all":
            logits = pass_.restore(made.logits)
        else:
            logits = pick_columns(made.logits, last if kept is None else [kept.index(place) for place in last])
        forward = Forward(logits, path_reason=self._explain_path(pass_))
        if wants_states:
            self._add_states(forward, made.hidden_states, pass_, last, want)
        if want.attentions:
            forward.attentions = tuple(
                pass_.restore_weights(weights) for weights in self._read_weights(made.attentions)
            )
        return forward

    def _call(self, pass_: AdapterPass, name: str, new: torch.Tensor, inputs: Mapping[str, Any]) -> Any:
        with name_failures(self.inner):
            return self.inner(
                **{name: new}, **inputs, past_key_values=make_keys(pass_), use_cache=True, return_dict=True
            )

    def _add_states(
        self, forward: Forward, states: Any, pass_: PlacedPass | AlignedPass, last: list[int], want: Want
    ) -> None:
        if want.hidden_states:
            forward.hidden_states = tuple(pass_.restore(each) for each in states)
        if want.last_states:
            forward.last_states = pass_.restore(states[-1])
        if want.early:
            head = self.get_output_embeddings()
            forward.early_logits = tuple(head(pick_columns(states[layer], last)) for layer in want.early)

    def _explain_path(self, pass_: PlacedPass | AlignedPass) -> str:
        if isinstance(pass_, AlignedPass) and not pass_.is_straight:
            return f"{OWN_FORWARD}; ragged rows are shifted to end together: {self.description.why_aligned}"
        return f"{OWN_FORWARD}: {self.why_not_native}" if self.why_not_native else OWN_FORWARD

    # --- the rest of the protocol ---------------------------------------------------------------
    def encode(self, *_: Any, **__: Any) -> Encoded:
        """Run the encoder, if there is one."""
        raise UnsupportedError(f"{self.info.family} has no encoder")

    # --- the reference's way of calling ---------------------------------------------------------------
    def __call__(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = True,
        logits_to_keep: int | torch.Tensor = 0,
    ) -> CausalOutput | tuple[Any, ...]:
        """Logits for the columns given, padded or not, over a cache of unspool, as native models are called."""
        given = input_ids if input_ids is not None else inputs_embeds
        if given is None or given.numel() == 0:
            raise InputError("give token ids or embeddings, one of them")
        cache = past_key_values if past_key_values is not None else DynamicCache()
        misfit = cache.find_misfit(self.key_shape) if past_key_values is not None else None
        if misfit is not None:
            raise InputError(f"past_key_values are of another model than this {self.info.family}: {misfit}")
        rows, num_new = given.shape[:2]
        arranged = read_mask(attention_mask, rows, num_new, cache.lengths or [0] * rows)
        packed = arranged.pack(given.to(self.device))
        made = self.forward(
            packed if input_ids is not None else None,
            cache,
            counts=arranged.counts,
            want=Want("all", bool(output_hidden_states), bool(output_attentions)),
            embeds=packed if input_ids is None else None,
        )
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        hidden, weights = made.hidden_states, made.attentions
        output = CausalOutput(
            logits=arranged.unpack(made.logits)[:, keep],
            past_key_values=cache if use_cache is None or use_cache else None,
            hidden_states=tuple(map(arranged.unpack, hidden)) if hidden is not None else None,
            attentions=tuple(map(arranged.unpack_weights, weights)) if weights is not None else None,
        )
        return output if return_dict is None or return_dict else output.to_tuple()

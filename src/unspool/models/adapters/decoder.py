"""A decoder of transformers behind unspool's model protocol."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from unspool.cache import Cache, KeyShape, make_cache
from unspool.config import GenerationConfig
from unspool.errors import InputError, UnsupportedError
from unspool.models.adapters.description import Description
from unspool.models.adapters.keys import make_keys
from unspool.models.adapters.passes import AlignedPass, Pass, PlacedPass, make_pass, pick_columns
from unspool.models.adapters.settings import read_settings
from unspool.protocols import LAST, Encoded, Forward, Want


class AdaptedDecoder:
    """A decoder-only model of transformers, run by its own forward pass over unspool's caches."""

    def __init__(self, model: nn.Module, description: Description) -> None:
        self.inner = model
        self.info = description.info
        self.config = description.config
        self._description = description
        self._settings: GenerationConfig | None = None
        self._shapes: tuple[tuple[int, int], ...] | None = None  # heads and width of keys, a layer each

    def __repr__(self) -> str:
        return f"AdaptedDecoder({type(self.inner).__name__})"

    @property
    def device(self) -> torch.device:
        """Where the weights are (the first of them)."""
        device: torch.device = self.inner.device  # type: ignore[assignment]  # transformers' property
        return device

    @property
    def dtype(self) -> torch.dtype:
        """What the weights are kept in."""
        dtype: torch.dtype = self.inner.dtype  # type: ignore[assignment]  # transformers' property
        return dtype

    @property
    def generation_config(self) -> GenerationConfig | None:
        """The model's own settings: those of transformers' object as they are now, unless others were set here."""
        return self._settings if self._settings is not None else read_settings(self.inner)

    @generation_config.setter
    def generation_config(self, config: GenerationConfig | None) -> None:
        self._settings = config

    # --- caches --------------------------------------------------------------------------------------
    def new_cache(
        self,
        kind: str = "dynamic",
        rows: int = 1,
        capacity: int | None = None,
        encoded: Encoded | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> Cache:
        """An empty cache for `rows` rows; `config` is what `cache_config` says."""
        if encoded is not None:
            raise InputError(f"{self.info.family} has no encoder, so its cache takes no encoded states")
        if kind == "dynamic":  # it learns the shape of keys from the first ones
            return make_cache(kind, self._shape_keys(1, 1), rows, capacity, config)
        return make_cache(kind, self.key_shape, rows, capacity, config)

    @property
    def key_shape(self) -> KeyShape:
        """What a cache must fit. Configs don't always say: a pass over one token does, once for every model."""
        if self._shapes is None:
            self._shapes = self._measure_keys()
        if len(set(self._shapes)) > 1:
            raise UnsupportedError(
                f"the layers of this {self.info.family} model have keys of different shapes "
                f"({', '.join(f'{heads} heads of width {width}' for heads, width in sorted(set(self._shapes)))}), "
                "which only a 'dynamic' cache holds; leave `cache_implementation` and past_key_values out"
            )
        return self._shape_keys(*self._shapes[0])

    def _shape_keys(self, num_heads: int, width: int) -> KeyShape:
        info = self.info
        return KeyShape(
            num_layers=len(self._shapes or info.layer_kinds),
            num_kv_heads=num_heads,
            head_dim=width,
            dtype=self.dtype,
            device=self.device,
            layer_kinds=info.layer_kinds,
            window=info.window,
        )

    @torch.no_grad()
    def _measure_keys(self) -> tuple[tuple[int, int], ...]:
        from unspool.cache import DynamicCache

        told = _Measurement(self._description, cache := DynamicCache(), cache.begin(1, 1, None, self.device))
        token = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        self._call(told, "input_ids", token, {"attention_mask": torch.ones_like(token)})
        return tuple(told.shapes)

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
        """Read new tokens after what the cache holds, and advance the cache; where it fails, the cache is as it was."""
        new = tokens if tokens is not None else embeds
        if new is None:
            raise InputError("give token ids or embeddings, one of them")
        rows, num_new = new.shape[:2]
        self._check_length(cache, num_new)
        if self._description.rotation is not None:
            cache.attach(self._description.rotation)
        elif cache.is_endless:
            raise UnsupportedError(
                f"a {type(cache).__name__} moves keys to other positions, and how this {self.info.family} model enters "
                "positions into its keys is not known, or they are learned one by one; use a DynamicCache"
            )
        empty = cache.clone() if not cache.lengths and not cache.nbytes else None
        held = list(cache.lengths)
        told = make_pass(self._description, cache, cache.begin(rows, num_new, counts, self.device))
        try:
            forward = self._run(told, "input_ids" if embeds is None else "inputs_embeds", new, want)
        except BaseException:
            if empty is not None:
                cache.return_to(empty)
            cache.lengths = held
            raise
        cache.end()
        return forward

    def _check_length(self, cache: Cache, num_new: int) -> None:
        longest = cache.longest_pass
        if longest is not None and num_new > longest:
            raise InputError(
                f"a pass of {num_new} positions is too long for this {type(cache).__name__}, which places keys anew "
                f"after {longest}; read them in parts of at most cache.longest_pass, as generate() does"
            )

    def _run(self, told: PlacedPass | AlignedPass, name: str, new: torch.Tensor, want: Want) -> Forward:
        if name == "inputs_embeds":
            new = new.to(self.dtype)
        new, said = told.tell(new, self.dtype)
        num_new, last = new.shape[1], told.find_last()
        kept: list[int] | None = None  # the columns whose logits are asked for
        if want.logits == "last" and num_new > 1 and "logits_to_keep" in self._description.arguments:
            kept = sorted(set(last))
            is_end = kept == [num_new - 1]
            said["logits_to_keep"] = 1 if is_end else torch.tensor(kept, device=new.device)
        wants_states = want.hidden_states or want.last_states or bool(want.early)
        if wants_states:
            said["output_hidden_states"] = True
        with self._switch(want):
            made = self._call(told, name, new, said)
        self._check_written(told, want)
        if want.logits == "all":
            logits = told.restore(made.logits)
        else:
            logits = pick_columns(made.logits, last if kept is None else [kept.index(place) for place in last])
        forward = Forward(logits, path_reason=self._explain_path(told))
        if wants_states:
            self._add_states(forward, made.hidden_states, told, last, want)
        if want.attentions:
            forward.attentions = tuple(told.restore_weights(weights) for weights in self._read_weights(made))
        return forward

    def _call(self, told: Pass, name: str, new: torch.Tensor, said: Mapping[str, Any]) -> Any:
        return self.inner(**{name: new}, **said, past_key_values=make_keys(told), use_cache=True, return_dict=True)

    def _check_written(self, told: Pass, want: Want) -> None:
        expected = want.exit_layer or self.info.num_layers
        if told.num_written < min(expected, 1) or (told.num_written == 0):
            raise UnsupportedError(
                f"{type(self.inner).__name__} kept nothing in the past_key_values it was given, so it can't be decoded "
                "from step by step; use its own generate()"
            )

    def _add_states(
        self, forward: Forward, states: Any, told: PlacedPass | AlignedPass, last: list[int], want: Want
    ) -> None:
        if want.hidden_states:
            forward.hidden_states = tuple(told.restore(each) for each in states)
        if want.last_states:
            forward.last_states = told.restore(states[-1])
        if want.early:
            head = self.inner.get_output_embeddings()  # type: ignore[operator]  # transformers' method
            forward.early_logits = tuple(head(pick_columns(states[layer], last)) for layer in want.early)

    def _read_weights(self, made: Any) -> tuple[torch.Tensor, ...]:
        weights = tuple(made.attentions or ())
        if not weights or any(each is None for each in weights):
            raise UnsupportedError(
                f"{type(self.inner).__name__} returned no attention weights; load it with attn_implementation='eager'"
            )
        return weights

    def _explain_path(self, told: PlacedPass | AlignedPass) -> str:
        if isinstance(told, AlignedPass) and not told.is_straight:
            return f"a transformers model's own forward; rows are shifted to end together: {self._description.why_aligned}"
        return "a transformers model's own forward"

    @contextmanager
    def _switch(self, want: Want) -> Iterator[None]:
        """The model's config as a pass needs it: fewer layers for an early exit, attention that tells its weights."""
        changed: list[tuple[Any, str, Any]] = []
        config, whole = self._description.config, self.inner.config
        try:
            if want.exit_layer is not None:
                changed.append((config, "num_hidden_layers", config.num_hidden_layers))
                config.num_hidden_layers = want.exit_layer
            if want.attentions and self._description.can_switch:
                changed.append((whole, "_attn_implementation", whole._attn_implementation))
                whole._attn_implementation = "eager"  # type: ignore[union-attr]  # transformers' config
            yield
        finally:
            for owner, name, value in changed:
                setattr(owner, name, value)

    # --- what else is asked of a model ---------------------------------------------------------------
    def encode(
        self,
        tokens: torch.Tensor | None,  # noqa: ARG002 - the protocol's arguments
        counts: Sequence[int] | None = None,  # noqa: ARG002
        *,
        want: Want = LAST,  # noqa: ARG002
        embeds: torch.Tensor | None = None,  # noqa: ARG002
    ) -> Encoded:
        """Run the encoder, where there is one."""
        raise UnsupportedError(f"{self.info.family} has no encoder")

    def get_input_embeddings(self) -> Any:
        """The table of token embeddings: callable on ids."""
        return self.inner.get_input_embeddings()  # type: ignore[operator]  # transformers' method

    def get_output_embeddings(self) -> Any:
        """The head: callable on final hidden states."""
        return self.inner.get_output_embeddings()  # type: ignore[operator]  # transformers' method

    @property
    def fingerprint(self) -> str:
        """What this model is known by: its sizes, its type of number and a sample of its weights."""
        table = self.get_input_embeddings().weight
        sample = table[:: max(1, table.shape[0] // 64), :: max(1, table.shape[1] // 16)].detach().float().cpu()
        told = (self.info, str(self.dtype), [f"{value:.4e}" for value in sample.flatten().tolist()])
        return f"{self.info.family}-{hashlib.sha256(repr(told).encode()).hexdigest()[:16]}"

    def num_parameters(self) -> int:
        """How many numbers the model has; a tied head is counted once."""
        return sum(parameter.numel() for parameter in self.inner.parameters())

    @property
    def weights_bytes(self) -> int:
        """The memory the weights take."""
        return sum(parameter.numel() * parameter.element_size() for parameter in self.inner.parameters())


class _Measurement(Pass):
    """A pass over one token that keeps nothing and notes the shape of every layer's keys."""

    def __init__(self, *told: Any) -> None:
        super().__init__(*told)
        self.shapes: list[tuple[int, int]] = []

    def update(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ARG002
        self.shapes.append((keys.shape[1], max(keys.shape[3], values.shape[3])))
        self.num_written += 1
        return keys, values

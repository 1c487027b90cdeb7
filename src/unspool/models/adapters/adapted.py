"""What all adapted models share: the model inside, its settings, and what it is known by."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch

from unspool.cache import Cache, KeyShape
from unspool.config import GenerationConfig
from unspool.errors import InputError, UnspoolError, UnsupportedError, is_out_of_memory
from unspool.models.adapters.description import Description
from unspool.models.adapters.passes import Pass
from unspool.models.adapters.settings import read_settings
from unspool.models.handing import Origin, Reduced, reduce_model
from unspool.protocols import Want

OWN_FORWARD = "a transformers model runs its own forward"


@contextmanager
def name_failures(model: Any) -> Iterator[None]:
    """Raise what goes wrong in a model's own code as an error that says where it did; a config can be the cause."""
    try:
        yield
    except UnspoolError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        reason = " ".join(str(error).split())[:300]
        raise UnsupportedError(
            f"the forward pass of transformers' {type(model).__name__} failed: {type(error).__name__}: {reason}. "
            "Check the model's config, or use another model"
        ) from error


class AdaptedModel:
    """A model of transformers, run by its own forward pass over unspool's caches."""

    def __init__(self, model: Any, description: Description) -> None:
        self.inner = model
        self.info = description.info
        self.config = description.config
        self._description = description
        self._settings: GenerationConfig | None = None
        self.origin: Origin | None = None  # the folder that it was loaded from; None for an object of a caller's

    def __copy__(self) -> Self:
        """A model with settings of its own around the same model of transformers."""
        made = type(self).__new__(type(self))
        made.__dict__.update(self.__dict__, _settings=copy.deepcopy(self._settings))
        return made

    def __reduce__(self) -> Reduced:
        return reduce_model(self, {"_settings": self._settings})

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A model with weights of its own."""
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made

    def __repr__(self) -> str:
        return f"{type(self).__name__}({type(self.inner).__name__})"

    @property
    def device(self) -> torch.device:
        """Where the weights are (the first of them)."""
        device: torch.device = self.inner.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        """What the weights are kept in."""
        dtype: torch.dtype = self.inner.dtype
        return dtype

    @property
    def generation_config(self) -> GenerationConfig | None:
        """The model's own settings: those of transformers' object as they are now, unless others were set here."""
        return self._settings if self._settings is not None else read_settings(self.inner)

    @generation_config.setter
    def generation_config(self, config: GenerationConfig | None) -> None:
        self._settings = config

    def _shape_keys(self, num_layers: int, num_heads: int, width: int) -> KeyShape:
        """What a cache must fit whose layers have so many heads of that width."""
        return KeyShape(
            num_layers=num_layers,
            num_kv_heads=num_heads,
            head_dim=width,
            dtype=self.dtype,
            device=self.device,
            layer_kinds=self.info.layer_kinds,
            window=self.info.window,
        )

    # --- what passes share ---------------------------------------------------------------------------
    def _take_input(self, tokens: torch.Tensor | None, embeds: torch.Tensor | None) -> torch.Tensor:
        """What a pass reads."""
        given = tokens if tokens is not None else embeds
        if given is None:
            raise InputError("give token ids or embeddings, one of them")
        return given

    @contextmanager
    def _undo(self, cache: Cache) -> Iterator[None]:
        """Leave the cache as it was if the pass within fails."""
        empty = cache.clone() if not cache.lengths and not cache.nbytes else None
        held = list(cache.lengths)
        try:
            yield
        except BaseException:
            if empty is not None:
                cache.return_to(empty)
            elif not held:
                cache.lengths = held
            raise

    def _check_written(self, told: Pass) -> None:
        if not told.num_written:
            raise UnsupportedError(
                f"{type(self.inner).__name__} kept nothing in the past_key_values it was given, so it can't be decoded "
                "from step by step; use its own generate()"
            )

    def _read_weights(self, weights: Any) -> tuple[torch.Tensor, ...]:
        found = tuple(weights or ())
        if not found or any(each is None for each in found):
            raise UnsupportedError(
                f"{type(self.inner).__name__} returned no attention weights; load it with attn_implementation='eager'"
            )
        return found

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
                whole._attn_implementation = "eager"
            yield
        finally:
            for owner, name, value in changed:
                setattr(owner, name, value)

    # --- what else is asked of a model ---------------------------------------------------------------
    def get_input_embeddings(self) -> Any:
        """The table of token embeddings: callable on ids."""
        return self.inner.get_input_embeddings()

    def get_output_embeddings(self) -> Any:
        """The head: callable on final hidden states."""
        return self.inner.get_output_embeddings()

    @property
    def fingerprint(self) -> str:
        """What this model is known by: its sizes, its type of number and a sample of its weights."""
        table = self.get_input_embeddings().weight
        sample = table[:: max(1, table.shape[0] // 64), :: max(1, table.shape[1] // 16)].detach().float().cpu()
        told = (self.info, str(self.dtype), [f"{value:.4e}" for value in sample.flatten().tolist()])
        return f"{self.info.family}-{hashlib.sha256(repr(told).encode()).hexdigest()[:16]}"

    @property
    def is_quantised(self) -> bool:
        """Whether matrices are kept as whole numbers."""
        return any(not parameter.is_floating_point() for parameter in self.inner.parameters())

    def num_parameters(self) -> int:
        """How many numbers the model has; a tied head is counted once."""
        return sum(parameter.numel() for parameter in self.inner.parameters())

    @property
    def weights_bytes(self) -> int:
        """The memory the weights take."""
        return sum(parameter.numel() * parameter.element_size() for parameter in self.inner.parameters())

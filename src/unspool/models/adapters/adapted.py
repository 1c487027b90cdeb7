"""What all adapted models share: the wrapped model, its settings and its fingerprint."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Self

import torch

from unspool.cache import Cache, KeyShape
from unspool.errors import InputError, UnspoolError, UnsupportedError
from unspool.models.adapters.description import Description
from unspool.models.adapters.passes import AdapterPass
from unspool.models.adapters.settings import ObjectSettings
from unspool.models.counting import HeldNumbers, count_parameters, name_dtype, name_formats
from unspool.models.handing import Origin, Reduced, identify, reduce_model
from unspool.protocols import Want
from unspool.shortage import is_out_of_memory

_HANDLED = (TypeError, ValueError, IndexError, KeyError, AttributeError)
OWN_FORWARD = "a transformers model runs its own forward"


def find_device(model: Any) -> torch.device:
    """Where a model's inputs belong. accelerate keeps weights elsewhere, with hooks that bring them where they compute,
    and leaves none on the device that a parameter names."""
    named: torch.device = model.device
    if named.type != "meta":
        return named
    for part in model.modules():
        hook = vars(part).get("_hf_hook")
        for one in getattr(hook, "hooks", (hook,)):
            found = getattr(one, "execution_device", None)
            if found is not None:
                return torch.device(found)
    return named


@contextmanager
def set_evaluating(model: Any) -> Iterator[None]:
    """The model in evaluation mode: dropout would make its answers random."""
    training = [part for part in model.modules() if part.training] if model.training else []
    for part in training:
        part.training = False
    try:
        yield
    finally:
        for part in training:
            part.training = True


@contextmanager
def name_failures(model: Any) -> Iterator[None]:
    """Run a model's own code in evaluation mode; its errors become ours and name it, as a config can be the cause."""
    try:
        with set_evaluating(model):
            yield
    except UnspoolError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        reason = " ".join(str(error).split())[:300]
        raise _find_error(error)(
            f"the forward pass of transformers' {type(model).__name__} failed: {type(error).__name__}: {reason}. "
            "Check the model's config, or use another model"
        ) from error


def _find_error(error: Exception) -> type[UnsupportedError]:
    """Our error that is one of the given error's kind too: a caller may handle what a model's own code raises."""
    kind = next((kind for kind in _HANDLED if isinstance(error, kind)), None)
    return UnsupportedError if kind is None else _join(kind)


@cache
def _join(kind: type[Exception]) -> type[UnsupportedError]:
    return type(UnsupportedError.__name__, (UnsupportedError, kind), {"__doc__": UnsupportedError.__doc__})


class AdaptedModel(ObjectSettings):
    """A model of transformers, run by its own forward pass over unspool's caches."""

    def __init__(self, model: Any, description: Description) -> None:
        super().__init__(model)
        self.info = description.info
        self.config = description.config
        self.description = description
        self.why_not_native = ""  # if it was asked for
        self.origin: Origin | None = None  # the folder that it was loaded from; None for a caller's object

    def __copy__(self) -> Self:
        """A model with its own settings around the same transformers model."""
        made = type(self).__new__(type(self))
        made.__dict__.update(self.__dict__, _settings=copy.deepcopy(self._settings))
        return made

    def __reduce__(self) -> Reduced:
        return reduce_model(self, {"_settings": self._settings})

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A model with its own weights."""
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made

    def __repr__(self) -> str:
        return f"{type(self).__name__}({type(self.inner).__name__})"

    @property
    def counts_columns(self) -> bool:
        """Whether the model numbers positions by columns: a padded row is another text to it."""
        arguments = self.description.arguments
        return (
            not self.info.is_encoder_decoder and self.info.max_context is not None and "position_ids" not in arguments
        )

    @property
    def device(self) -> torch.device:
        """The device of the (first) weights, or where they are brought for a pass."""
        return find_device(self.inner)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        dtype: torch.dtype = self.inner.dtype
        return dtype

    def _shape_keys(self, num_layers: int, num_heads: int, width: int) -> KeyShape:
        """The key shape of a cache with layers of `num_heads` heads of this width."""
        return KeyShape(
            num_layers=num_layers,
            num_kv_heads=num_heads,
            head_dim=width,
            dtype=self.dtype,
            device=self.device,
            layer_kinds=self.info.layer_kinds,
            window=self.info.window,
        )

    # --- shared by passes ---------------------------------------------------------------------------
    def _take_input(self, tokens: torch.Tensor | None, embeds: torch.Tensor | None) -> torch.Tensor:
        """The name and the tensor of a pass's input."""
        given = tokens if tokens is not None else embeds
        if given is None:
            raise InputError("give token ids or embeddings, one of them")
        return given

    @contextmanager
    def _undo(self, cache: Cache) -> Iterator[None]:
        """Restore the cache if the pass inside fails."""
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

    def _check_written(self, pass_: AdapterPass) -> None:
        if not pass_.num_written:
            raise UnsupportedError(
                f"{type(self.inner).__name__} wrote nothing to the past_key_values it was given, so it can't be "
                "decoded step by step; use its own generate()"
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
        """The model's config as a pass needs it: fewer layers for an early exit, attention that returns its weights."""
        changed: list[tuple[Any, str, Any]] = []
        config, whole = self.description.config, self.inner.config
        try:
            if want.exit_layer is not None:
                changed.append((config, "num_hidden_layers", config.num_hidden_layers))
                config.num_hidden_layers = want.exit_layer
            if want.attentions and self.description.can_switch:
                changed.append((whole, "_attn_implementation", whole._attn_implementation))
                whole._attn_implementation = "eager"
            yield
        finally:
            for owner, name, value in changed:
                setattr(owner, name, value)

    # --- the rest of the protocol ---------------------------------------------------------------
    def get_input_embeddings(self) -> Any:
        """The table of token embeddings: callable on ids."""
        return self.inner.get_input_embeddings()

    def get_output_embeddings(self) -> Any:
        """The head: callable on final hidden states."""
        return self.inner.get_output_embeddings()

    @property
    def fingerprint(self) -> str:
        """An identifier of this model in every process: a hash of its sizes, its dtype, and its files or weights."""
        table = self.get_input_embeddings().weight
        some = table[:: max(1, table.shape[0] // 64), :: max(1, table.shape[1] // 16)].detach()
        return identify(self, some, self.inner.parameters() if self.origin is None else ())

    @property
    def is_quantised(self) -> bool:
        """Whether matrices are stored quantised."""
        return any(not parameter.is_floating_point() for parameter in self.inner.parameters())

    def num_parameters(self) -> int:
        """The number of parameters; a tied head is counted once."""
        return count_parameters(self._iterate_held())

    @property
    def weights_format(self) -> str:
        """In which formats the parameters are held, that of the most first."""
        return name_formats(self._iterate_held())

    def _iterate_held(self) -> Iterator[HeldNumbers]:
        for parameter in self.inner.parameters():
            # Two numbers of 4 bits to a byte (bitsandbytes), of which only the whole has the shape.
            shape = getattr(getattr(parameter, "quant_state", None), "shape", None)
            count = parameter.numel() if shape is None else math.prod(shape)
            yield HeldNumbers(id(parameter), count, name_dtype(parameter.dtype))

    @property
    def weights_bytes(self) -> int:
        """The memory of the weights, in bytes."""
        return sum(parameter.numel() * parameter.element_size() for parameter in self.inner.parameters())

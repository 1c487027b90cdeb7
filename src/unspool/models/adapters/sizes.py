"""Bounds on the sizes in a folder's config before transformers builds the model: what the folder's tensors can fill."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from unspool.errors import LoadError, UnsupportedError
from unspool.models.weights import WeightSource

_MOST: Final = 1 << 31  # for any integer
_MOST_EXPERTS: Final = 4_096
_MOST_POSITIONS: Final = 1 << 25
_MOST_PAIR_POSITIONS: Final = 1 << 15  # encoder-decoders build their position tables in Python
_SPARE_LAYERS: Final = 64  # beyond one per tensor, for layers that share their weights
_SPARE_NUMBERS: Final = 1 << 24  # tables that are computed, not stored
_SPARE_BYTES: Final = 1 << 28
_PACKED: Final = 8  # numbers that one stored byte may encode

_LAYERS = re.compile(r"(^|_)(n_?)?layers?$|(^|_)depths?$|(^|_)(n|num)_blocks?$")
_EXPERTS = re.compile(r"experts?($|_)")
_POSITIONS = re.compile(r"positions?($|_)|_ctx$|seq_len|seq_length|context")


def check_claims(config: Mapping[str, Any], tensors: WeightSource, where: str) -> None:
    """Raise for a count that the tensors of a folder can't account for, before anything is built."""
    num_tensors = sum(1 for _ in tensors.names())
    most_positions = _MOST_PAIR_POSITIONS if config.get("is_encoder_decoder") else _MOST_POSITIONS
    for key, value in _list_numbers(config):
        most = _MOST
        if _LAYERS.search(key):
            most = num_tensors + _SPARE_LAYERS
        elif _EXPERTS.search(key):
            most = _MOST_EXPERTS
        elif _POSITIONS.search(key):
            most = most_positions
        if not -_MOST <= value <= most:
            raise LoadError(
                f"{where} has {key}={value!r:.40}; with the {num_tensors} tensors that lie beside it, and in any model "
                f"that is known, at most {most} can be"
            )
    for key in ("attn_implementation", "_attn_implementation"):
        if "/" in str(config.get(key)):
            raise UnsupportedError(
                f"{where} has {key}={config[key]!r:.80}: code from the hub is never run; leave it out"
            )


def check_built(model: Any, tensors: WeightSource, where: str) -> None:
    """Raise if a model, built on the meta device, is larger than its folder's tensors."""
    held = sum(math.prod(tensors.info(name).shape) for name in tensors.names())
    needed = sum(parameter.numel() for parameter in model.parameters())
    if needed > _PACKED * held + _SPARE_NUMBERS:
        raise LoadError(
            f"{where} describes a model of {needed} numbers, and its files hold {held}: do they belong together?"
        )
    buffers = sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
    if buffers > 4 * needed + _SPARE_BYTES:
        raise LoadError(
            f"{where} describes a model with tables of {buffers} bytes beside {needed} numbers of weights, which is "
            "out of all proportion; check its sizes"
        )


def _list_numbers(value: Any, key: str = "") -> Iterator[tuple[str, int]]:
    """Every integer in a config, with its key."""
    stack = [(key, value)]
    while stack:
        key, value = stack.pop()
        if isinstance(value, Mapping):
            stack += value.items()
        elif isinstance(value, list | tuple):
            stack += [(key, one) for one in value]
        elif isinstance(value, int) and not isinstance(value, bool):
            yield key, value

"""How many parameters weights have, and in which formats they are held."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import fields
from typing import Any, Final, NamedTuple

import torch

from unspool.models.weights import MxLinear, PackedRows, TableLinear, WordRows

_NAMES: Final = {"q4_k": "Q4_K", "q5_k": "Q5_K", "q6_k": "Q6_K", "q5": "Q5"}  # of GGUF's formats, as files write them
_LEAST: Final = 1 / 100  # of all parameters: a format that fewer have is not named


class HeldNumbers(NamedTuple):
    """A tensor that holds parameters: packed, it has fewer elements than these."""

    address: int
    number: int
    format: str  # a dtype or a format of blocks


def iterate_held(holder: Any) -> Iterator[HeldNumbers]:
    """What a tree of the containers of `weights` holds (a shared tensor as often as it is held)."""
    if isinstance(holder, torch.Tensor):
        yield HeldNumbers(holder.data_ptr(), holder.numel(), name_dtype(holder.dtype))
    elif isinstance(holder, PackedRows):
        (rows, columns), rest = holder.shape, holder.rest
        own = rows - (rest.shape[0] if rest is not None else 0)
        yield HeldNumbers(holder.tiles.data_ptr(), own * columns, _NAMES.get(holder.kind, holder.kind))
        yield from iterate_held([holder.bias, rest])
    elif isinstance(holder, WordRows):
        rows, columns = holder.operand.shape
        yield HeldNumbers(holder.words.data_ptr(), rows * columns, holder.kind)
        yield from iterate_held(holder.bias)
    elif isinstance(holder, MxLinear):
        yield HeldNumbers(holder.words.data_ptr(), holder.words.numel() * 8, "mxfp4")
        yield from iterate_held(holder.bias)
    elif isinstance(holder, TableLinear):
        yield HeldNumbers(holder.words.data_ptr(), holder.words.numel() * 8, holder.kind)
        yield from iterate_held(holder.bias)
    elif isinstance(holder, list):
        for item in holder:
            yield from iterate_held(item)
    elif hasattr(holder, "__dataclass_fields__"):
        for item in fields(holder):
            yield from iterate_held(getattr(holder, item.name))


def count_parameters(held: Iterable[HeldNumbers]) -> int:
    """The number of parameters; a tensor that is held twice is counted once."""
    return sum({item.address: item.number for item in held}.values())


def name_formats(held: Iterable[HeldNumbers]) -> str:
    """The formats in which parameters are held, that of the most first: "float32", "int4 and int8", "Q4_K and Q6_K"."""
    counts: Counter[str] = Counter()
    for item in {item.address: item for item in held}.values():
        counts[item.format] += item.number
    least = _LEAST * counts.total()
    names = [name for name, count in counts.most_common() if count >= least] or ["nothing"]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def name_dtype(dtype: torch.dtype) -> str:
    """A dtype's name, without torch's."""
    return str(dtype).removeprefix("torch.")


def describe_weights(model: Any) -> str:
    """How a model's weights are held, if that is not the dtype which it computes in; and that."""
    dtype = name_dtype(model.dtype)
    held = getattr(model, "weights_format", dtype)  # a model of someone else's need not say
    return dtype if held == dtype else f"{held} weights, {dtype}"

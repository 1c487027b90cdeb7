"""Whether two models' encoders hold the same numbers: compared once, and again when a number of theirs was written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from unspool.kernels.bit_sums import sum_bits


class _Found(NamedTuple):
    sums: list[int]  # over the bits of both models' tensors, as they were compared
    answer: bool


_known: WeakKeyDictionary[Any, WeakKeyDictionary[Any, _Found]] = WeakKeyDictionary()


def hold_same_numbers(
    one: object, one_tensors: Sequence[torch.Tensor], two: object, two_tensors: Sequence[torch.Tensor]
) -> bool:
    """Whether the tensors of one model are equal to those of another, each to its counterpart."""
    pairs = list(zip(one_tensors, two_tensors, strict=False))
    if len(one_tensors) != len(two_tensors) or any(_describe(a) != _describe(b) for a, b in pairs):
        return False
    # A count of changes such as torch's misses what is written through `.data` or another view of the memory.
    sums = [total for device in dict.fromkeys(a.device for a in one_tensors) for total in _sum_on(device, pairs)]
    known = _known.setdefault(one, WeakKeyDictionary())
    found = known.get(two)
    if found is None or found.sums != sums:
        found = known[two] = _Found(sums, all(torch.equal(a, b) for a, b in pairs))
    return found.answer


def _describe(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


def _sum_on(device: torch.device, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[int]:
    return sum_bits([tensor for pair in pairs for tensor in pair if tensor.device == device])

"""Whether two models' encoders hold the same numbers: compared once, and again when one of their tensors changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch


class _Stamp(NamedTuple):
    """What a tensor was when it was compared; nothing is kept alive by it."""

    tensor: ref[torch.Tensor]  # an address alone may come back with another tensor
    address: int
    version: int  # rises with every change in place


class _Found(NamedTuple):
    stamps: list[_Stamp]
    answer: bool


_known: WeakKeyDictionary[Any, WeakKeyDictionary[Any, _Found]] = WeakKeyDictionary()


def hold_same_numbers(
    one: object, one_tensors: Sequence[torch.Tensor], two: object, two_tensors: Sequence[torch.Tensor]
) -> bool:
    """Whether the tensors of one model are equal to those of another, each to its counterpart."""
    if len(one_tensors) != len(two_tensors):
        return False
    tensors = (*one_tensors, *two_tensors)
    known = _known.setdefault(one, WeakKeyDictionary())
    found = known.get(two)
    if found is None or not _are_unchanged(found.stamps, tensors):
        answer = all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(one_tensors, two_tensors, strict=True))
        if any(tensor.is_inference() for tensor in tensors):  # such a tensor does not count its changes
            known.pop(two, None)
            return answer
        found = known[two] = _Found(
            [_Stamp(ref(tensor), tensor.data_ptr(), tensor._version) for tensor in tensors], answer
        )
    return found.answer


def _are_unchanged(stamps: Sequence[_Stamp], tensors: Sequence[torch.Tensor]) -> bool:
    return len(stamps) == len(tensors) and all(
        stamp.tensor() is tensor
        and not tensor.is_inference()
        and stamp.address == tensor.data_ptr()
        and stamp.version == tensor._version
        for stamp, tensor in zip(stamps, tensors, strict=True)
    )

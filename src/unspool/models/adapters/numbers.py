"""The numbers of a transformers object that a native model has copies of: whether the copies have them still."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import nn

from unspool.kernels.bit_sums import sum_bits
from unspool.models.adapters.modules import walk_decoder
from unspool.models.paths.library import PACKING_LIMIT
from unspool.models.sharing import SharedSource

_SHARE_OF_FREE: Final = 0.5  # of a device's free memory that copies may take: keys need the rest


def find_room(device: torch.device) -> int | None:
    """The bytes that copies of an object's matrices may take; None if that is not known."""
    if device.type != "cuda":
        return None
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # by torch, for what comes
    return int((torch.cuda.mem_get_info(device)[0] + held) * _SHARE_OF_FREE)


class Numbers:
    """Every tensor of an object by its place in memory, and those that are held twice by the sums of their bits.

    Held twice is what was stacked, reordered or widened, the head, which greedy steps have a sketch of, and in a small
    model everything, because steps on a CPU may read copies in 16 bits. What is read where it lies needs no look.
    """

    def __init__(self, model: nn.Module, source: SharedSource) -> None:
        self._named = [
            (held, name)
            for part in walk_decoder(model).values()
            for held in (part._parameters, part._buffers)
            for name, tensor in held.items()
            if tensor is not None
        ]
        self._tensors = [tensor for held, name in self._named if (tensor := held[name]) is not None]
        self._at = list(map(_describe, self._tensors))
        self._copied = self._list_copied(model, source)
        self._sums = self._sum()

    def are_same(self) -> bool:
        """Whether all tensors are those that they were, and every number that is held twice has its bits."""
        for (held, name), tensor, known in zip(self._named, self._tensors, self._at, strict=True):
            now = held.get(name)
            if now is not tensor or _describe(now) != known:
                return False
        return self._sum() == self._sums

    def _list_copied(self, model: Any, source: SharedSource) -> list[torch.Tensor]:
        apart = {id(one): one for one in self._tensors if not isinstance(one, nn.Parameter)}
        held = {id(one): one for one in self._tensors}
        if sum(one.nbytes for one in held.values()) <= PACKING_LIMIT:
            return list(held.values())
        head = model.get_output_embeddings()
        for one in (*source.list_copied(), getattr(head, "weight", None)):
            if one is not None:
                apart[id(one)] = one
        return list(apart.values())

    def _sum(self) -> list[int]:
        # Buffers may be on another device than parameters.
        made: list[int] = []
        for device in {one.device: None for one in self._copied}:
            made += sum_bits([one for one in self._copied if one.device == device])
        return made


def _describe(tensor: Any) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device

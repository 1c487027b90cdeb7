"""Blocks for models that draft: requests with one draft model keep its keys in one pool, so that their passes over it
can be one."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from unspool.cache import BlockPool, PagedCache, find_kind
from unspool.cache.paged.joint import JointRows
from unspool.protocols import Model


@dataclass(slots=True, eq=False)
class DraftPool:
    """A draft model that requests use, and their keys of it."""

    model: Model  # held, so that its number is nobody else's
    pool: BlockPool
    caches: list[PagedCache] = field(default_factory=list)
    joint: dict[Hashable, JointRows] = field(default_factory=dict)  # rows of several, by what is asked of them


class DraftPools:
    """The pools of the draft models that requests use now; each grows as it must and goes with its last request."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._held: dict[int, DraftPool] = {}  # by the model's number

    def open(self, model: Model) -> PagedCache | None:
        """A cache without rows for a request's draft model; None if its keys do not lie in blocks."""
        if not can_page(model):
            return None
        held = self._held.get(id(model))
        if held is None:
            held = self._held[id(model)] = DraftPool(model, BlockPool(self._block_size))
        cache = PagedCache(held.pool)
        held.caches.append(cache)
        return cache

    def close(self, cache: PagedCache) -> None:
        """Forget a cache whose blocks were given back."""
        for number, held in self._held.items():
            if any(one is cache for one in held.caches):
                held.caches = [one for one in held.caches if one is not cache]
                if not held.caches:
                    del self._held[number]
                return

    def clear(self) -> None:
        """Let the memory of all pools go."""
        while self._held:
            _, held = self._held.popitem()
            held.joint.clear()
            held.pool.close()

    def find(self, model: Model) -> DraftPool | None:
        """What requests have of a draft model; None if none uses it."""
        return self._held.get(id(model))


def can_page(model: Model) -> bool:
    """Whether a model's keys can lie in blocks."""
    info, refuse = model.info, find_kind("paged").refuse
    has_keys = not info.is_encoder_decoder and "state" not in info.layer_kinds
    return has_keys and (refuse is None or refuse(info) is None)

"""What is made for a transformers object and kept with it."""

from __future__ import annotations

import weakref
from typing import Any, Final

_PLACE: Final = "_unspool_kept"  # attribute of the object


class Kept(dict[str, Any]):
    """Adapters and native models by their kind. They go with their object, and into no copy or pickle of it."""

    def __init__(self, owner: Any) -> None:
        super().__init__()
        self._owner = weakref.ref(owner)

    def is_of(self, model: Any) -> bool:
        """Whether it was made for this object, and not for the one that it is a copy of."""
        return self._owner() is model

    def __reduce__(self) -> tuple[type[dict[str, Any]], tuple[()]]:
        return dict, ()  # so that a pickle of the object is read without unspool


def find_kept(model: Any) -> Kept:
    """What is kept with an object."""
    kept = model.__dict__.get(_PLACE)
    if isinstance(kept, Kept) and kept.is_of(model):
        return kept
    made = model.__dict__[_PLACE] = Kept(model)
    if isinstance(kept, Kept) and "native" in kept:  # copy.copy's has the same parameters: it is looked at before use
        made["native"] = kept["native"]
    return made

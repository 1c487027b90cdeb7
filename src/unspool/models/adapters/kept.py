"""What is made for a transformers object and kept with it."""

from __future__ import annotations

from typing import Any, Final

_PLACE: Final = "_unspool_kept"  # attribute of the object


class Kept(dict[str, Any]):
    """Adapters and native models by their kind. They go with their object, and into no copy or pickle of it."""

    def __reduce__(self) -> tuple[type[dict[str, Any]], tuple[()]]:
        return dict, ()  # so that a pickle of the object is read without unspool


def find_kept(model: Any) -> Kept:
    """What is kept with an object."""
    kept = model.__dict__.get(_PLACE)
    if not isinstance(kept, Kept):  # none, or what a copy has in its place
        kept = model.__dict__[_PLACE] = Kept()
    return kept

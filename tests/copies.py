"""Copies of things by pickle, which only tests make: the library reads no pickle."""

from __future__ import annotations

import pickle
from typing import Any


def copy_by_pickle(thing: Any) -> Any:
    """The thing, written and read again."""
    return pickle.loads(pickle.dumps(thing))  # noqa: S301 - our own

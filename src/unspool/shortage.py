"""Memory that runs out: what says so, and how it becomes an error of ours."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from unspool.errors import ResourceError, UnspoolError

P = ParamSpec("P")
T = TypeVar("T")

_SHORTAGES = ("can't allocate memory", "not enough memory", "out of memory", "bad_alloc", "cannot allocate memory")


class ShortageError(ResourceError):
    """Memory ran out, as the allocator says; callers that know more of the request say it again in their own words."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of Python's or torch's says that memory ran out, a machine's or a GPU's."""
    if isinstance(error, UnspoolError):
        return isinstance(error, ShortageError)
    message = str(error)[:2000].lower()
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError | OSError) and any(mark in message for mark in _SHORTAGES)
    )


def explain_shortage(what: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorator: memory that runs out in the function is a `ShortageError` that names what was done."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return function(*args, **kwargs)
            except (MemoryError, RuntimeError, OSError) as error:
                if not is_out_of_memory(error):
                    raise
                traceback.clear_frames(error.__traceback__)  # they hold what there was no room for
                cause = error.__cause__ if isinstance(error, ShortageError) and error.__cause__ else error
                raise ShortageError(
                    f"memory ran out while {what}; nothing else is affected. Give less at once, or use a cache or a "
                    f"model that takes less. The allocator says: {str(cause)[:200] or type(cause).__name__}"
                ) from cause

        return run

    return decorate

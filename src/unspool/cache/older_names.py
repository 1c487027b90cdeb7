"""Older names of arguments that caches are made with."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from unspool.errors import SettingError


def takes_batch_size(make: Callable[..., None]) -> Callable[..., None]:
    """A constructor that takes `batch_size` for `max_batch_size`, as older documents have it."""

    @functools.wraps(make)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if "batch_size" in kwargs:
            if "max_batch_size" in kwargs or len(args) > 1:
                raise SettingError("`batch_size` is the older name of `max_batch_size`; give one of them")
            kwargs["max_batch_size"] = kwargs.pop("batch_size")
        make(self, *args, **kwargs)

    return init

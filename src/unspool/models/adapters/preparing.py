"""Models whose class has a generate() of its own that prepares inputs and leaves decoding to transformers' common one.

A captioner reads its picture and has its text decoder generate; Bark's parts add a processor and go window by window.
Such a method is run as it is, with our generate() in the place of the common one, for this call alone.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

from unspool.errors import SettingError, UnsupportedError
from unspool.forks import make_lock
from unspool.models.adapters.columns import has_codebooks
from unspool.models.adapters.door import find_mixin, runs_own_generate
from unspool.models.adapters.hooks import is_theirs

Generate = Callable[..., Any]
KEPT: Final = "_unspool_kept"  # attribute of transformers' mixin that holds its own generate while ours is attached

_OURS: ContextVar[Generate | None] = ContextVar("unspool_generate", default=None)
_LOCK = make_lock(sys.modules[__name__], "_LOCK")
_calls = 0  # under way, in all threads
_common: Generate | None = None  # transformers' own, while ours stands in its place
_LOOPS = {"_sample", "_beam_search", "_greedy_search", "_assisted_decoding"}


def find_preparing(model: Any) -> Generate | None:
    """The generate() of a model's class, if it calls the common one for a part of its work; None while it runs."""
    own = getattr(type(model), "generate", None)
    owner = next((kind for kind in type(model).__mro__ if "generate" in vars(kind)), None)
    if own is None or owner is find_mixin():
        return None
    if runs_own_generate(model) or has_codebooks(model):
        return None
    names = _find_names(own)
    helpers = [getattr(type(model), name, None) for name in names - {"generate"}]
    if names & _LOOPS or any(_find_names(helper) & _LOOPS for helper in helpers if inspect.isfunction(helper)):
        raise UnsupportedError(
            f"{type(model).__name__} has a generate() with a decoding loop of its own; use that one: model.generate(…)"
        )
    if "generate" not in names:
        if not is_theirs(own):
            raise UnsupportedError(
                f"the generate() of {type(model).__name__} is somebody's own and leaves nothing to the common one; use "
                "that one: model.generate(…)"
            )
        return None
    found: Generate = own
    return found


def find_common() -> Generate:
    """transformers' own generate(), whatever stands in its place."""
    mixin = find_mixin()
    found: Generate = _common or mixin.generate
    if getattr(mixin, KEPT, None) is not None:
        found = getattr(mixin, KEPT)
    return found


def _find_names(function: Any) -> set[str]:
    """The names that a function's code uses."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return set() if code is None else set(code.co_names)


def prepare_with(own: Generate, model: Any, generate: Generate, *args: Any, **kwargs: Any) -> Any:
    """Run a model's own generate() with `generate` in the place of transformers' common one."""
    try:
        with _decoding_with(generate):
            return own(model, *args, **kwargs)
    except TypeError as error:
        found = re.search(r"multiple values for keyword argument '(\w+)'", str(error))
        if found is None:
            raise
        raise SettingError(
            f"the generate() of {type(model).__name__} sets `{found[1]}` itself; leave it out"
        ) from error


@contextmanager
def _decoding_with(generate: Generate) -> Iterator[None]:
    global _calls, _common
    mixin = find_mixin()
    with _LOCK:
        if _calls == 0:
            _common, mixin.generate = mixin.generate, _dispatch
        _calls += 1
    token = _OURS.set(generate)
    try:
        yield
    finally:
        _OURS.reset(token)
        with _LOCK:
            _calls -= 1
            if _calls == 0:
                mixin.generate, _common = _common, None


def _dispatch(self: Any, *args: Any, **kwargs: Any) -> Any:
    chosen = _OURS.get() or _common
    assert chosen is not None
    return chosen(self, *args, **kwargs)

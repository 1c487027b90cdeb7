"""`attach`: transformers models whose `generate` is unspool's."""

from __future__ import annotations

from typing import Any

from unspool.api.calls import generate
from unspool.errors import SettingError
from unspool.models.adapters import (
    KEPT,
    drop_twin,
    ends_itself,
    find_mixin,
    has_own_loop,
    is_transformers_model,
    prepare_twin,
    set_native,
)

_FOLLOWS = "_unspool_follows"  # attribute of a class's __copy__ that knows of attached objects


def attach(model: Any = None, *, native: bool = True) -> Any:
    """Give a transformers model our `generate`, and return it; without a model, give it to all of transformers.

    A model whose architecture unspool has natively runs natively on its own parameters, unless `native` is False; see
    docs/transformers.md for what happens to them.
    """
    if model is None:
        mixin = find_mixin()
        if KEPT not in mixin.__dict__:
            setattr(mixin, KEPT, mixin.generate)
            mixin.generate = _generate
        return None
    _check(model, "attach")
    set_native(model, native)
    model.__dict__["generate"] = Attached(model)
    if native:
        prepare_twin(model)
    return model


def detach(model: Any = None) -> Any:
    """Undo `attach`: the model, or all of transformers, has its own `generate` again."""
    if model is None:
        mixin = find_mixin()
        if KEPT in mixin.__dict__:
            mixin.generate = getattr(mixin, KEPT)
            delattr(mixin, KEPT)
        return None
    _check(model, "detach")
    model.__dict__.pop("generate", None)
    set_native(model, None)
    drop_twin(model)
    return model


class Attached:
    """The `generate` of an attached object. A copy of the object has one of its own, and so has what a pickle holds."""

    def __init__(self, model: Any) -> None:
        self._model = model
        _follow_copies(type(model))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """unspool.generate with the object."""
        return _generate(self._model, *args, **kwargs)

    def __reduce__(self) -> tuple[type[Attached], tuple[Any]]:
        return Attached, (self._model,)


def _follow_copies(kind: Any) -> None:
    """Let `copy.copy` of a class's attached objects make attached ones: what lies in an object does not hear of it."""
    known = getattr(kind, "__copy__", None)
    if getattr(known, _FOLLOWS, False):
        return

    def copy_object(self: Any) -> Any:
        if known is not None:
            made = known(self)
        else:
            made = object.__new__(type(self))
            made.__setstate__(dict(self.__dict__))  # as copy.copy does
        if isinstance(made.__dict__.get("generate"), Attached):
            made.__dict__["generate"] = Attached(made)
        return made

    setattr(copy_object, _FOLLOWS, True)
    kind.__copy__ = copy_object


def _check(model: Any, name: str) -> None:
    if not is_transformers_model(model):
        hint = f"; {name} the model that it wraps, and go on calling this" if _wraps(model) else ""
        raise SettingError(
            f"{name}() takes a transformers model, or nothing for all of them, not a {type(model).__name__}{hint}"
        )


def _wraps(model: Any) -> bool:
    """Whether an object is a transformers model in a wrapper: torch.compile's, PEFT's or one for several devices."""
    inside = (getattr(model, "_orig_mod", None), getattr(model, "base_model", None), getattr(model, "module", None))
    return any(is_transformers_model(getattr(one, "model", None)) or is_transformers_model(one) for one in inside)


def _generate(self: Any, *args: Any, **kwargs: Any) -> Any:
    """unspool.generate as a method; a model whose decoding loop or end is its own keeps transformers' generate()."""
    if has_own_loop(self) or ends_itself(self):
        mixin = find_mixin()
        return getattr(mixin, KEPT, mixin.generate)(self, *args, **kwargs)
    return generate(self, *args, **kwargs)

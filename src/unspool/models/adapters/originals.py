"""Whether the code that a transformers object runs is that of the installed transformers and torch, unpatched.

Every function is compared with the code that its module's file compiles to. What was looked at is remembered by
identity, so that a later call compares a few hundred names.
"""

from __future__ import annotations

import dis
import inspect
import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import pairwise
from types import BuiltinFunctionType, CodeType, FunctionType, MappingProxyType, ModuleType
from typing import Any, Final

import torch
from torch import nn

_ORIGINS: Final = ("transformers", "torch")
_MODELS: Final = "transformers.models."
_READ: Final = ("transformers.", "torch.nn.modules.")  # the modules of which the names that functions use are looked at
_MISSING: Final = object()
# What unspool itself puts into classes, and what Python adds to them.
_OWN_NAMES: Final = frozenset({"generate", "__copy__", "_unspool_kept"})
_CALLED: Final = ("forward", "__call__", "_call_impl", "_wrapped_call_impl", "__getattr__")  # of torch's base classes
# The functions that are registered for an attention implementation and for its masks.
_REGISTERED: Final = {
    "sdpa": ("sdpa_attention_forward", "sdpa_mask"),
    "flex_attention": ("flex_attention_forward", "flex_attention_mask"),
    **{f"flash_attention_{number}": ("flash_attention_forward", "flash_attention_mask") for number in (2, 3, 4)},
}
_EAGER: Final = ("eager_mask",)  # a modelling module's own attention has masks alone


class Originals:
    """The code behind an object's modules: what differs from its source, and whether anything was exchanged since."""

    def __init__(self, kinds: set[type[nn.Module]], attention: str | None) -> None:
        self._attention = attention or "eager"
        self._classes: dict[type, dict[str, Any]] = {}
        self._names: dict[int, tuple[Mapping[str, Any], dict[str, Any]]] = {}
        self._codes: dict[int, tuple[FunctionType, CodeType]] = {}
        self._tables: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
        self.used: set[str] = set()  # names in the code
        self.reason = ""
        for kind in sorted(kinds, key=lambda one: one.__qualname__):
            for base in kind.__mro__[:-1]:
                if base not in self._classes:
                    self._classes[base] = dict(vars(base))
                    self._look_at_class(base)
        for base in _list_caches():
            self._classes[base] = dict(vars(base))
            for name, value in vars(base).items():
                self._look_at_member(base, name, value)
        for base in self._classes:
            if base.__module__.startswith("transformers.") and not base.__module__.startswith(_MODELS):
                for name in self.used & vars(base).keys() - _OWN_NAMES:
                    self._look_at_member(base, name, vars(base)[name])

    def are_unchanged(self) -> bool:
        """Whether every class, function, name and table that was looked at is what it was."""
        try:
            return (
                all(vars(kind) == held for kind, held in self._classes.items())
                and all(function.__code__ is code for function, code in self._codes.values())
                and all(table == held for table, held in self._tables)
                and all(
                    space.get(name, _MISSING) is value
                    for space, held in self._names.values()
                    for name, value in held.items()
                )
            )
        except Exception:  # whatever was put there compares itself in a way of its own
            return False

    def _note(self, reason: str) -> None:
        self.reason = self.reason or reason

    def _look_at_class(self, kind: type) -> None:
        module = kind.__module__
        if module.startswith(_MODELS):
            names = _find_body_names(kind)
            for name, value in vars(kind).items():
                if names is None:
                    self._note(f"the source of {kind.__name__} is not there")
                elif name in names:
                    self._look_at_member(kind, name, value)
                elif name not in _OWN_NAMES and not self._is_added_by_decorator(name, value):
                    self._note(f"{kind.__name__}.{name} was put there by other code")
        elif module.split(".")[0] in _ORIGINS:
            for name in _CALLED:
                if name in vars(kind):
                    self._look_at_member(kind, name, vars(kind)[name])

    def _is_added_by_decorator(self, name: str, value: Any) -> bool:
        """Whether something in a class that does not stand in its body is no code, or of transformers' decorators."""
        if isinstance(value, FunctionType) and not name.startswith("__"):
            return not value.__module__.startswith(_MODELS) and self._look_at(value, None, value.__module__)
        return _is_added_by_python(name, value)

    def _look_at_member(self, kind: type, name: str, value: Any) -> None:
        functions = [getattr(value, part, None) for part in ("fget", "__func__")] if not callable(value) else [value]
        if isinstance(value, staticmethod | classmethod):
            functions = [value.__func__]
        for function in functions:
            if not isinstance(function, FunctionType) or (name.startswith("__") and name != "__call__"):
                continue
            wanted = None if kind is nn.Module else f"{kind.__qualname__}.{name}"  # whose __call__ has another name
            if not self._look_at(function, wanted, kind.__module__):
                self._note(f"{kind.__name__}.{name} is not transformers' own")
        if name == "forward" and not isinstance(value, FunctionType):
            self._note(f"{kind.__name__}.{name} is not transformers' own")

    def _look_at(self, function: FunctionType, name: str | None, module: str) -> bool:
        """Whether a function is the one of that (or any) name in that module's source; what it calls is too."""
        reached = list(_reach(function))
        if any(not _is_original(one) for one in reached):
            return False
        if name is not None and (name, module) not in {(one.__code__.co_qualname, _find_home(one)) for one in reached}:
            return False
        for one in reached:
            self._look_at_names(one)
        return True

    def _look_at_names(self, function: FunctionType) -> None:
        if id(function) in self._codes:
            return
        self._codes[id(function)] = (function, function.__code__)
        if not _find_home(function).startswith(_READ):
            return
        used = set(_find_names(function.__code__))
        self.used |= used
        space = function.__globals__
        modules: list[ModuleType] = []
        for name in used & space.keys():
            value = space[name]
            if isinstance(value, ModuleType):
                modules.append(value)
            elif isinstance(value, FunctionType):
                self._look_at_global(space, name, value)
            elif hasattr(value, "_global_mapping"):
                self._look_at_table(value)
            self._watch(space, name, value)
        for module in modules:  # grows with the modules that lie in them
            if module.__name__.split(".")[0] not in _ORIGINS:
                continue
            for name in used & vars(module).keys():
                value = vars(module)[name]
                if isinstance(value, ModuleType) and value not in modules and len(modules) < 50:
                    modules.append(value)
                elif isinstance(value, FunctionType):
                    self._watch(vars(module), name, value)
                    if not all(map(_is_original, _reach(value))):
                        self._note(f"{module.__name__}.{name} was replaced")
                elif isinstance(value, BuiltinFunctionType):
                    self._watch(vars(module), name, value)
        for name in used & vars(torch.Tensor).keys():
            value = vars(torch.Tensor)[name]
            self._watch(vars(torch.Tensor), name, value)
            if isinstance(value, FunctionType) and not all(map(_is_original, _reach(value))):
                self._note(f"torch.Tensor.{name} was replaced")

    def _look_at_global(self, space: dict[str, Any], name: str, value: FunctionType) -> None:
        module = str(space["__name__"])
        home = value.__module__ or ""
        if home.split(".")[0] not in _ORIGINS:
            if home.split(".")[0] in sys.stdlib_module_names and name not in _find_codes(module):
                return
            self._note(f"{module}.{name} is a function of {home or 'other code'}")
        elif name in _find_codes(module):
            if not self._look_at(value, name, module):
                self._note(f"{module}.{name} is not transformers' own")
        elif _find_imports(module).get(name, value.__name__) != value.__name__:
            self._note(f"{module}.{name} is {value.__name__}")
        elif id(value) not in self._codes and not self._look_at(value, value.__qualname__, home):
            self._note(f"{module}.{name} is not transformers' own")

    def _look_at_table(self, interface: Any) -> None:
        """The functions that are registered under the attention's name."""
        for table in (interface._global_mapping, interface._local_mapping):
            if not any(held is table for held, _ in self._tables):
                self._tables.append((table, dict(table)))
        found = {**interface._global_mapping, **interface._local_mapping}.get(self._attention)
        if found is None:
            if self._attention not in ("eager", *_REGISTERED):
                self._note(f"its attention ({self._attention}) is not one of transformers' own")
            return
        allowed = _REGISTERED.get(self._attention, _EAGER if self._attention == "eager" else ())
        name = getattr(found, "__name__", "")
        if (
            name not in allowed
            or not isinstance(found, FunctionType)
            or not self._look_at(found, name, found.__module__)
        ):
            self._note(f"its attention ({self._attention}) is not one of transformers' own")

    def _watch(self, space: Mapping[str, Any], name: str, value: Any) -> None:
        # A class's dictionary is a new proxy at every access, and its names are compared as a whole elsewhere.
        if isinstance(space, MappingProxyType):
            self._names.setdefault(0, (space, {}))[1][name] = value
        else:
            self._names.setdefault(id(space), (space, {}))[1][name] = value


@lru_cache(maxsize=1)
def _list_caches() -> tuple[type, ...]:
    """transformers' caches and their layers, to which an object's own forward gives its keys."""
    module = sys.modules.get("transformers.cache_utils")
    kinds = () if module is None else (value for value in vars(module).values() if isinstance(value, type))
    return tuple(kind for kind in kinds if kind.__module__ == "transformers.cache_utils")


def _reach(function: FunctionType, most: int = 20) -> Iterator[FunctionType]:
    """A function, those that it wraps, and those in its closure."""
    ahead: list[Any] = [function]
    seen: set[int] = set()
    while ahead and len(seen) < most:
        one = ahead.pop()
        if not isinstance(one, FunctionType) or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        ahead.append(getattr(one, "__wrapped__", None))
        for cell in one.__closure__ or ():
            try:
                ahead.append(cell.cell_contents)
            except ValueError:  # it is empty yet
                continue


def _find_home(function: FunctionType) -> str:
    """The module whose names a function reads: decorators change what `__module__` says."""
    return str(function.__globals__.get("__name__", ""))


def _is_original(function: FunctionType) -> bool:
    """Whether a function's code is one of those that its module's file compiles to."""
    module = _find_home(function)
    if module.split(".")[0] in sys.stdlib_module_names:
        return True
    if module.split(".")[0] not in _ORIGINS:
        return False
    code = function.__code__
    return any(code is one or code == one for one in _find_codes(module).get(code.co_qualname, ()))


@lru_cache(maxsize=256)
def _find_codes(module: str) -> dict[str, list[CodeType]]:
    """Every code object of a module's file by its qualified name; none if there is no file to read."""
    spec = getattr(sys.modules.get(module), "__spec__", None)
    loader = getattr(spec, "loader", None)
    try:
        whole = loader.get_code(module)  # type: ignore[union-attr]  # what has none raises, as what has no file
    except (AttributeError, ImportError, OSError, SyntaxError, ValueError):
        return {}
    found: dict[str, list[CodeType]] = {"<module>": [whole]}
    ahead = [whole]
    while ahead:
        for inner in ahead.pop().co_consts:
            if isinstance(inner, CodeType):
                found.setdefault(inner.co_qualname, []).append(inner)
                ahead.append(inner)
    return found


@lru_cache(maxsize=256)
def _find_imports(module: str) -> dict[str, str]:
    """What a module's file imports by name: under which name, and what it is called there."""
    found: dict[str, str] = {}
    for code in _find_codes(module).get("<module>", ()):
        steps = list(dis.get_instructions(code))
        for one, after in pairwise(steps):
            if one.opname == "IMPORT_FROM" and after.opname.startswith("STORE_"):
                found[after.argval] = one.argval
    return found


def _find_body_names(kind: type) -> set[str] | None:
    """The names in the body of a class in its module's file; None if it is not there."""
    bodies = _find_codes(kind.__module__).get(kind.__qualname__)
    return None if bodies is None else {name for body in bodies for name in body.co_names}


def _find_names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _find_names(inner)


def _is_added_by_python(name: str, value: Any) -> bool:
    """Whether something in a class stands in no source: what Python and decorators note there, and no code."""
    is_noted = name.startswith("__") and name.endswith("__") and name not in ("__call__", "__getattr__")
    if is_noted and name not in ("__getattribute__", "__setattr__", "__new__"):
        return True
    if name == "_abc_impl":
        return True
    return isinstance(value, type) or not (
        callable(value) or inspect.isdatadescriptor(value) or hasattr(value, "__get__")
    )

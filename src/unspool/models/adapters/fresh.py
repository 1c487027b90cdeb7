"""A transformers object beside one that is made anew of the same class and config: what is different in it."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Iterable, Mapping
from enum import Enum
from types import FunctionType
from typing import Any, Final

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from unspool.models.adapters.modules import walk_decoder

_PLAIN: Final = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.Size, torch.device, slice, range)
_DEEPEST: Final = 6
_NEAR: Final = 1e-6  # buffers are computed on several devices, whose powers differ in the last bits
# Attributes that change no answer: modes are looked at elsewhere, and so are numbers and modules.
FREE: Final = frozenset(
    {
        *("training", "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_is_full_backward_hook"),
        *("_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks", "_state_dict_pre_hooks"),
        *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks", "_is_hf_initialized"),
        *("gradient_checkpointing", "_gradient_checkpointing_func", "generate", "generation_config"),
        *("name_or_path", "warnings_issued", "_loss_function", "loss_type", "hf_device_map", "_tp_size"),
        "rope_deltas",  # what a call with pictures left for its own later passes
        *("_unspool_kept", "_unspool_runs_natively", "_require_grads_hook", "_require_grads_hooks"),
    }
)

_HOOKS: Final = frozenset(  # which are looked at by themselves (structure.py)
    {
        *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
        *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
    }
)


class _WithoutMatrices(TorchFunctionMode):
    """Inside it, what modules allocate for their parameters takes no memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        if func is torch.empty:
            named["device"] = "meta"
        return func(*args, **named)


def explain_difference(model: nn.Module, used: Iterable[str]) -> str:
    """What of an object is not as its class makes it of its config; empty if nothing is. `used` are names in its code.

    Both dtypes are tried that an object may have been made in: its own, and the one that it was cast from.
    """
    reason, known = "", frozenset(used)
    dtype = next(model.parameters()).dtype
    for made_in in dict.fromkeys((dtype, torch.float32)):
        try:
            fresh = _make(model, made_in)
        except Exception as error:  # a class that is not made of its config alone
            return f"a {type(model).__name__} to compare it with can't be made: {type(error).__name__}"
        found = _compare(model, fresh, known)
        if not found:
            return ""
        reason = reason or found
    return reason


def _make(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad(), _WithoutMatrices():
            made: nn.Module = type(model)(copy.deepcopy(model.config))
    finally:
        torch.set_default_dtype(before)
    return made


def _compare(model: nn.Module, fresh: nn.Module, used: frozenset[str]) -> str:
    parts, others = walk_decoder(model), walk_decoder(fresh)
    kind = type(model).__name__
    for name in [*parts, *others]:
        if name not in others:
            return f"{name} was put into it"
        if name not in parts:
            return f"{name} is missing"
        part, other = parts[name], others[name]
        if type(part) is not type(other):
            return f"{name or kind} is a {type(part).__name__}, and made as a {type(other).__name__}"
        reason = _compare_attributes(name or kind, part, other, used) or _compare_numbers(name or kind, part, other)
        if reason:
            return reason
    if list_ties(model) != list_ties(fresh):
        return "other parameters are tied than its config says"
    return ""


def list_ties(model: nn.Module) -> list[tuple[str, ...]]:
    """The names of parameters that are one."""
    found: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), []).append(name)
    return sorted(tuple(names) for names in found.values() if len(names) > 1)


def _compare_attributes(where: str, part: nn.Module, other: nn.Module, used: frozenset[str]) -> str:
    mine, theirs = part.__dict__, other.__dict__
    for name in [*mine, *theirs]:
        if name in FREE or name in _HOOKS:
            continue
        if name not in mine:
            return f"{where}.{name} is missing"
        if name not in theirs:
            if (name in used or hasattr(type(part), name)) and not _is_own_method(part, name):
                return f"{where}.{name} was put into it"
            continue  # a name that no code of its modules reads
        if not _are_alike(mine[name], theirs[name], 0):
            return f"{where}.{name} is {_show(mine[name])}, and made as {_show(theirs[name])}"
    return ""


def _is_own_method(part: nn.Module, name: str) -> bool:
    """Whether an attribute is the method of that name of the part's class, put back by what had replaced it."""
    value = part.__dict__[name]
    own = getattr(type(part), name, None)
    return own is not None and getattr(value, "__func__", None) is own and value.__self__ is part


def _show(value: Any) -> str:
    return repr(value)[:40] if isinstance(value, _PLAIN) else f"a {type(value).__name__}"


def _compare_numbers(where: str, part: nn.Module, other: nn.Module) -> str:
    for mine, theirs in ((part._parameters, other._parameters), (part._buffers, other._buffers)):
        for name in [*mine, *theirs]:
            one, made = mine.get(name), theirs.get(name)
            if (one is None) is not (made is None):
                return f"{where}.{name} {'is missing' if one is None else 'was put into it'}"
            if one is not None and made is not None and one.shape != made.shape:
                return f"{where}.{name} has the shape {list(one.shape)}, and its config makes {list(made.shape)}"
    for name, buffer in part._buffers.items():
        made = other._buffers[name]
        if buffer is None or made is None or name not in part._non_persistent_buffers_set:
            continue  # what a file holds is read as it is
        if buffer.dtype != made.dtype:
            return f"{where}.{name} is of {buffer.dtype}, and made in {made.dtype}"
        if not _are_near(buffer, made):
            return f"{where}.{name} has other numbers than its config makes"
    return ""


def _are_near(one: torch.Tensor, other: torch.Tensor) -> bool:
    if other.device.type == "meta":
        return True
    mine = one.detach().to(other.device)
    if mine.dtype != other.dtype or mine.shape != other.shape:
        return False
    return bool(torch.allclose(mine, other, rtol=_NEAR, atol=0, equal_nan=True))


def _are_alike(one: Any, other: Any, depth: int) -> bool:
    """Whether two attributes are the same: numbers and texts by value, functions by their code, objects by theirs."""
    if one is other:
        return True
    if depth > _DEEPEST or type(one) is not type(other):
        return False
    if isinstance(one, float) and math.isnan(one):
        return math.isnan(other)
    if isinstance(one, (_PLAIN, Enum | set | frozenset)):
        return bool(one == other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(lambda a, b: _are_alike(a, b, depth + 1), one, other))
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_are_alike(one[key], other[key], depth + 1) for key in one)
    if isinstance(one, torch.Tensor):
        return _are_near(one, other)
    if isinstance(one, FunctionType):
        return one.__code__ is other.__code__ and _are_alike(_list_held(one), _list_held(other), depth + 1)
    if isinstance(one, functools.partial):
        mine, theirs = ((each.func, each.args, each.keywords) for each in (one, other))
        return _are_alike(mine, theirs, depth + 1)
    if isinstance(one, nn.Module):  # beside the tree
        return one.extra_repr() == other.extra_repr() and not any(one.children())
    if hasattr(one, "to_dict"):
        return bool(one.to_dict() == other.to_dict())
    if hasattr(one, "__func__"):  # a method bound to a part of it
        return one.__func__ is other.__func__
    return hasattr(one, "__dict__") and _are_alike(vars(one), vars(other), depth + 1)


def _list_held(function: FunctionType) -> list[Any]:
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    return [cells, function.__defaults__, function.__kwdefaults__]

"""What a transformers object is beside its numbers: whether that is what its class says, and whether it is so still."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from unspool.models.adapters.fresh import FREE, explain_difference
from unspool.models.adapters.modules import find_misplaced, walk_decoder
from unspool.models.adapters.originals import Originals

_OF_ROOT: Final = FREE - {"_parameters", "_buffers", "_modules"}  # what of an object itself is not compared
_GLOBAL_HOOKS: Final = ("_global_forward_hooks", "_global_forward_pre_hooks")
_PLAIN_TYPES: Final = (nn.Parameter, torch.Tensor)


def explain_context(model: nn.Module) -> str:
    """What around a call lets the object's own forward compute something else; empty if nothing does."""
    for name in _GLOBAL_HOOKS:
        if getattr(torch_module, name, None):
            return "torch has hooks for all modules"
    kind = next((parameter.device.type for parameter in model.parameters()), "cpu")
    if any(torch.is_autocast_enabled(one) for one in {kind, "cpu"} - {"meta"}):
        return "torch.autocast is on"
    modes: list[TorchFunctionMode] = _get_current_function_mode_stack()
    if any(not isinstance(mode, DeviceContext) for mode in modes) or torch._C._len_torch_dispatch_stack():
        return "a mode of torch stands between operators and what they compute"
    return ""


_ALIGNMENT: Final = 16  # bytes that kernels on a GPU read at once


def explain_tensors(parts: Mapping[str, nn.Module]) -> str:
    """Why an object's numbers can't be looked into; empty if all are plain tensors."""
    for name, part in parts.items():
        for tensors in (part._parameters, part._buffers):
            for own, tensor in tensors.items():
                if tensor is not None and not _is_plain(tensor):
                    kind = type(tensor).__name__ if type(tensor) not in _PLAIN_TYPES else f"{tensor.layout} tensor"
                    return f"{name + '.' if name else ''}{own} is a {kind}, no plain tensor"
                if tensor is not None and tensor.is_cuda and tensor.data_ptr() % _ALIGNMENT:
                    whole = f"{name + '.' if name else ''}{own}"
                    return f"{whole} lies at an address that is no multiple of {_ALIGNMENT}, where kernels can't read"
    return ""


def _is_plain(tensor: torch.Tensor) -> bool:
    is_known = type(tensor) in _PLAIN_TYPES and tensor.layout == torch.strided
    return is_known and not (tensor.is_conj() or tensor.is_neg() or tensor.is_nested)


class Structure:
    """An object's modules, their attributes, hooks and code as they were when they were looked at, and what was found.

    Everything is held by identity or by value, so that a look at all of it takes about a millisecond.
    """

    def __init__(self, model: Any) -> None:
        parts = [part for part in walk_decoder(model).values() if part is not model]
        self._parts = [(part, type(part), _freeze(part.__dict__)) for part in parts]
        self._kind, self._root = type(model), _freeze_root(model)
        configs = {id(one): one for one in (model.config, *(held.get("config") for _, _, held in self._parts))}
        self._configs = [(config, _describe(config)) for config in configs.values() if config is not None]
        originals = Originals({type(model), *(kind for _, kind, _ in self._parts)}, _name_attention(model))
        self._originals = originals
        self.reason = self._explain(model)

    def _explain(self, model: nn.Module) -> str:
        parts = walk_decoder(model)
        for name, part in parts.items():
            where = name or type(model).__name__
            if not type(part).__module__.startswith(("transformers.", "torch.")):
                return f"{where} is a {type(part).__name__} of another package"
            hooks = (*part._forward_hooks.values(), *part._forward_pre_hooks.values())
            if not all(map(_records_alone, hooks)) or "_hf_hook" in part.__dict__:
                return f"{where} has hooks"
            if "forward" in part.__dict__:
                return f"the forward of {where} was replaced"
        misplaced = find_misplaced(parts)
        return misplaced or self._originals.reason or explain_difference(model, self._originals.used)

    def is_current(self, model: nn.Module) -> bool:
        """Whether all of it is as it was."""
        try:
            if type(model) is not self._kind or _freeze_root(model) != self._root:
                return False
            for part, kind, held in self._parts:
                if type(part) is not kind:
                    return False
                now = part.__dict__
                if now != held:
                    held["training"] = now.get("training")  # which is looked at elsewhere
                    if now != held:
                        return False
        except Exception:  # what was put there compares itself in a way of its own, as tensors do
            return False
        return all(_describe(config) == held for config, held in self._configs) and self._originals.are_unchanged()

    def explain_mode(self, model: nn.Module) -> str:
        """What is in training mode while the object is not, and so is by chance; empty if nothing is."""
        if model.training:
            return ""
        found = next((part for part, _, _ in self._parts if part.__dict__.get("training")), None)
        return "" if found is None else f"a {type(found).__name__} in it is in training mode"


def _records_alone(hook: Any) -> bool:
    """Whether a hook is one of those that transformers leaves in an object whose states were asked for once."""
    return getattr(hook, "__globals__", {}).get("__name__") == "transformers.utils.output_capturing"


def _freeze_root(model: nn.Module) -> dict[str, Any]:
    return _freeze({name: value for name, value in model.__dict__.items() if name not in _OF_ROOT})


def _freeze(values: Mapping[str, Any]) -> dict[str, Any]:
    """A module's attributes with copies of what can be written into; its tensors are looked at elsewhere."""
    return {
        name: value if name in ("_parameters", "_buffers") else _copy_containers(value)
        for name, value in values.items()
    }


def _copy_containers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy_containers(inner) for key, inner in value.items()}
    if type(value) is list:
        return [_copy_containers(inner) for inner in value]
    return set(value) if type(value) is set else value


def _describe(config: Any) -> str:
    return repr(getattr(config, "__dict__", None))


def _name_attention(model: Any) -> str | None:
    return getattr(getattr(model, "config", None), "_attn_implementation", None)

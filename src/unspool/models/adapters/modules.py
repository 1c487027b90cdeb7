"""The modules of a transformers object, and whether they stand where they were made to stand."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn


def walk(model: nn.Module) -> dict[str, nn.Module]:
    """A model's modules by their names, each once: of several names that one has, the last.

    Every call looks at all of them, and torch's own walk takes ten times as long.
    """
    found, seen, ahead = dict[str, nn.Module](), set[int](), [("", model)]
    while ahead:
        name, part = ahead.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        found[name] = part
        before = name and f"{name}."
        ahead += [(before + inside, one) for inside, one in part._modules.items() if one is not None]
    return found


def find_misplaced(parts: Mapping[str, nn.Module]) -> str | None:
    """Why transformers' own cache must hold the keys: a layer stands at another place than its number, which says where
    its keys are kept. A program has put it there, or has it there twice. None if all stand at theirs."""
    for name, part in parts.items():
        number = part.__dict__.get("layer_idx")
        if type(number) is not int or number < 0:
            continue
        place = next((int(one) for one in name.split(".") if one.isdigit()), number)
        if place != number:
            return f"{name} is layer {number} by its layer_idx"
    return None

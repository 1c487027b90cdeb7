"""The modules of a transformers object, and whether they stand where they were made to stand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from torch import nn

_LANGUAGES: Final = ("model.language_model", "model.text_model")  # where models that read pictures have theirs


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


def walk_decoder(model: nn.Module) -> dict[str, nn.Module]:
    """The same without what reads pictures beside the language part: that runs its own forward, whatever it is."""
    parts = walk(model)
    inside = next((name for name in _LANGUAGES if name in parts), None)
    if inside is None:
        return parts
    beside = f"{inside.split('.')[0]}."
    return {
        name: part
        for name, part in parts.items()
        if not name.startswith(beside) or name == inside or name.startswith(f"{inside}.")
    }


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

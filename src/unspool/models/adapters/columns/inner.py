"""States that a model's modules keep between passes as attributes of their own, as RecurrentGemma's do.

They belong to the rows of one cache, which keeps them too and puts them in before each of its passes. Those of the last
pass stay where they are, as transformers leaves them: a call that is given transformers' own cache goes on from there.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

_NAMES = ("recurrent_states", "conv1d_state")
Inner = Sequence[torch.Tensor | None]


def find_places(model: Any) -> list[tuple[Any, str]]:
    """The modules that keep states, with the attributes that do; none for nearly all models."""
    if not hasattr(model.base_model, "_setup_cache"):
        return []
    return [(part, name) for part in model.modules() for name in _NAMES if name in part.__dict__]


def keeps_rows(model: Any) -> bool:
    """Whether a model's class writes in the model while it prepares a pass, as Moshi's does the sound of each row.

    Nothing of that is taken back, and it has as many rows as the prompt.
    """
    code = getattr(inspect.unwrap(type(model).prepare_inputs_for_generation), "__code__", None)
    if code is None:
        return False
    return any(
        step.opname == "STORE_ATTR" and before.opname.startswith("LOAD_FAST") and _name_last(before.argval) == "self"
        for before, step in pairwise(dis.get_instructions(code))
    )


def _name_last(loaded: Any) -> Any:
    """The name that an instruction loads last: some load two."""
    return loaded[-1] if isinstance(loaded, tuple) else loaded


def put_states(places: Sequence[tuple[Any, str]], states: Inner) -> None:
    """Give modules the states of a cache; one that holds nothing has none."""
    for place, (part, name) in enumerate(places):
        setattr(part, name, states[place] if states else None)


def take_states(places: Sequence[tuple[Any, str]]) -> Inner:
    """What modules keep now."""
    return [getattr(part, name) for part, name in places]


def pick_states(states: Inner, index: torch.Tensor) -> Inner:
    """The states of the rows at `index`."""
    return [None if state is None else state.index_select(0, index.to(state.device)) for state in states]

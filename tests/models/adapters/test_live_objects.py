"""transformers objects that are changed between two calls: what is answered is what the object is at that time."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from tests.models.adapters.live_changes import CHANGES, PREPARED, AbsentError
from tests.models.adapters.live_models import FAMILIES, check_alike, make

pytest.importorskip("transformers")


def prepare(name: str, family: str, *, is_narrow: bool = False) -> Any:
    model = make(family, is_narrow=is_narrow)
    if name in PREPARED:
        model.__dict__["prepared"] = PREPARED[name](model)
    return model


def list_cases() -> list[tuple[str, str]]:
    """Every change in a third of the families, each family with a third of the changes: `make fuzz KIND=live` has all."""
    pairs = itertools.product(enumerate(CHANGES), enumerate(FAMILIES))
    return [(name, family) for (row, name), (column, family) in pairs if (row + column) % 3 == 0]


@pytest.mark.parametrize(("name", "family"), list_cases())
def test_what_is_changed_between_two_calls_is_seen(name: str, family: str) -> None:
    model = prepare(name, family)
    check_alike(model, native=True)
    try:
        with CHANGES[name](model, torch.Generator().manual_seed(1)):
            check_alike(model)
    except AbsentError:
        pytest.skip(f"{family} has nothing to change")


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_undone_runs_natively_again(family: str) -> None:
    model = make(family)
    check_alike(model, native=True)
    for name in ("register_a_hook_for_all_modules", "enter_autocast", "replace_forward_of_the_stack"):
        with CHANGES[name](model, torch.Generator().manual_seed(1)):
            check_alike(model, native=False)
        check_alike(model, native=True)

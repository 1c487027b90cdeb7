"""transformers objects that are changed between two calls: what is answered beside transformers' own `generate`."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch

from tests.fuzz.findings import Difference
from tests.models.adapters.live_changes import CHANGES, PREPARED, AbsentError
from tests.models.adapters.live_models import FAMILIES, PAIRS, check_alike
from tests.models.adapters.live_models import make as make_model

NAME = "live"
SHORT = 12


@dataclass(frozen=True)
class Life:
    """An object and what happens to it; before the first change it has answered, or not yet."""

    family: str
    changes: tuple[str, ...]
    has_answered: bool
    is_narrow: bool
    device: str
    seed: int


def make(rng: Random) -> Life:
    """One object, and one to three changes, all of which last."""
    changes = rng.sample(list(CHANGES), rng.choice((1, 1, 1, 2, 3)))
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    return Life(
        family=rng.choice([*FAMILIES, *PAIRS]),
        changes=(
            *[name for name in changes if name in PREPARED][:1],
            *[name for name in changes if name not in PREPARED],
        ),
        has_answered=rng.random() < 0.8,
        is_narrow=rng.random() < 0.5,
        device=rng.choice(devices),
        seed=rng.randrange(1 << 31),
    )


def run(given: Life, folder: Path) -> None:
    """Change the object, and compare what it answers after each change and when all are undone that can be."""
    if given.device == "cuda" and "write_shared_memory" in given.changes:
        return  # memory of a GPU is shared otherwise
    model = make_model(given.family, given.device, is_narrow=given.is_narrow)
    random = torch.Generator().manual_seed(given.seed)
    try:
        for name in given.changes:
            if name in PREPARED:
                model.__dict__["prepared"] = PREPARED[name](model)
        if given.has_answered:
            check_alike(model)
        _change(model, given.changes, random)
        check_alike(model)
    except AssertionError as error:
        raise Difference(f"{given}: {error}"[:2000]) from error


def _change(model: object, names: tuple[str, ...], random: torch.Generator) -> None:
    if not names:
        return
    with ExitStack() as made:
        try:
            made.enter_context(CHANGES[names[0]](model, random))
        except (AbsentError, AttributeError):  # or what it is made to is gone by another change
            _change(model, names[1:], random)
            return
        check_alike(model)
        _change(model, names[1:], random)

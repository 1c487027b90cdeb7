"""What counts as a finding, and how one input is tried."""

from __future__ import annotations

import importlib
import pkgutil
import random
import traceback
import unicodedata
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from tests.fuzz import kinds
from unspool.errors import UnspoolError

LONGEST_ERROR = 2_000  # characters of an error's text

# The outcomes that are findings, in the order of the table; "clean" and "refused" are the others.
FAULTS = ("uncaught", "hung", "excess", "crashed", "different")


class Difference(Exception):  # noqa: N818 - not an error of the library, a finding about it
    """Two ways that must give the same result did not, or an error's text breaks its promise."""


@dataclass(frozen=True)
class Kind:
    """One kind of input, as its file in `kinds/` describes it."""

    name: str
    make: Callable[[random.Random], Any]
    run: Callable[[Any, Path], None]
    share: float  # how often it is drawn, beside the others
    short: int  # how many inputs `make test` tries
    warm: Callable[[], None]  # what is slow and done once a process, before inputs are timed


@dataclass(frozen=True)
class Outcome:
    """What became of one input: "clean", "refused" or one of `FAULTS`, and for a fault the details."""

    verdict: str
    details: str = ""


def list_kinds() -> list[str]:
    """The names of all kinds."""
    return sorted(found.name for found in pkgutil.iter_modules(kinds.__path__) if not found.name.startswith("_"))


def find_kind(name: str) -> Kind:
    """The kind in the file `kinds/<name>.py`."""
    module: ModuleType = importlib.import_module(f"{kinds.__name__}.{name}")
    assert name == module.NAME, f"kinds/{name}.py calls itself {module.NAME}"
    share, short = getattr(module, "SHARE", 1.0), getattr(module, "SHORT", 40)
    return Kind(name, module.make, module.run, share, short, getattr(module, "warm", lambda: None))


def make_input(kind: Kind, seed: int) -> Any:
    """The input of a kind and a seed; the same one every time."""
    return kind.make(random.Random(f"{kind.name}:{seed}"))


def try_input(kind: Kind, seed: int, folder: Path) -> Outcome:
    """Make and run one input in an empty folder. Running out of memory counts as an excess."""
    given = make_input(kind, seed)
    random.seed(seed)
    torch.manual_seed(seed)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            kind.run(given, folder)
    except UnspoolError as error:
        try:
            check_error(error)
        except Difference as difference:
            return Outcome("different", f"{difference}\n{_describe(error)}")
        return Outcome("refused")
    except Difference as difference:
        return Outcome("different", _describe(difference))
    except BaseException as error:  # a panic of Rust is no Exception
        if isinstance(error, KeyboardInterrupt):
            raise
        return Outcome("excess" if _is_out_of_memory(error) else "uncaught", _describe(error))
    return Outcome("clean")


def check_error(error: BaseException) -> None:
    """An error's text is short and holds nothing that a terminal obeys."""
    text = str(error)
    if not text.strip():
        raise Difference(f"{type(error).__name__} has no text")
    if len(text) > LONGEST_ERROR:
        raise Difference(f"{type(error).__name__} has a text of {len(text)} characters; at most {LONGEST_ERROR}")
    for character in text:
        if unicodedata.category(character) in ("Cc", "Cs") and character not in "\n\t":
            raise Difference(f"{type(error).__name__} has the character U+{ord(character):04X} in its text")


def _is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or "can't allocate memory" in str(error)


def _describe(error: BaseException) -> str:
    """The last lines of a traceback; the error's own text is cut, as it may be long."""
    frames = traceback.format_tb(error.__traceback__)[-8:]
    text = "".join(traceback.format_exception_only(error))
    return "".join(frames) + (text if len(text) <= 600 else f"{text[:600]}… ({len(text)} characters)\n")

"""A benchmark's parameters, checked before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from unspool.errors import SettingError
from unspool.kernels.cpu.library import MOST_THREADS
from unspool.loading.source import open_source

WORKS: Final = ("decode", "prefill", "beam", "batch")
QUANTIZE: Final = ("auto", "none", "int8", "int4", "fp8")
BOUNDS: Final = {
    "new": (2, 4096),
    "prompt": (1, 65_536),
    "prefill": (1, 65_536),
    "batch": (1, 512),
    "rounds": (1, 100),
    "threads": (1, MOST_THREADS),
}


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One benchmark: the model, and the sizes of what is measured."""

    model: str
    location: Path
    kind: Literal["folder", "gguf"]
    device: str | None = None
    threads: int | None = None
    quantize: tuple[str, ...] = ("auto",)
    new: int = 64
    prompt: int = 64
    prefill: int = 512
    batch: int = 16
    rounds: int = 3
    only: tuple[str, ...] = WORKS

    @property
    def longest(self) -> int:
        """Positions of the longest text."""
        return max(self.prompt + self.new, self.prefill + 1)

    @property
    def most_rows(self) -> int:
        """Rows of the largest batch."""
        return max(8, self.batch if "batch" in self.only else 1)


def make_benchmark(model: str, *, offline: bool | None = None, **asked: Any) -> Benchmark:
    """A benchmark of a model; raises an error that names an invalid parameter."""
    given = {name: value for name, value in asked.items() if value is not None}
    for name, (least, most) in BOUNDS.items():
        value = given.get(name, least)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise SettingError(f"--{name} {value!r:.40} is no whole number from {least} to {most}")
    _check_names("only", given.get("only", WORKS), WORKS)
    _check_names("quantize", given.get("quantize", ("auto",)), QUANTIZE)
    source = open_source(model, offline=offline)
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    return Benchmark(model, source.location, source.kind, **given)


def _check_names(option: str, names: Sequence[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            raise SettingError(f"--{option} {name[:40]!r} is not known; use {', '.join(known)}")
    if not names or len(set(names)) < len(names):
        raise SettingError(f"--{option} names each of its words once")

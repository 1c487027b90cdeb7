"""A benchmark's parameters, checked before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from unspool.errors import SettingError
from unspool.kernels.cpu.library import MOST_THREADS
from unspool.loading.source import open_source
from unspool.protocols import ModelInfo

WORKS: Final = ("decode", "prefill", "beam", "batch")
QUANTIZE: Final = ("auto", "none", "int8", "int4", "nf4", "fp4", "fp8")
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
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt."""
        prefill = self.prefill if "prefill" in self.only else 0
        return prefill if self.only == ("prefill",) else max(self.prompt, prefill)

    @property
    def longest(self) -> int:
        """Positions of the longest text."""
        prefill = self.prefill + 1 if "prefill" in self.only else 0
        return prefill if self.only == ("prefill",) else max(self.prompt + self.new, prefill)

    @property
    def most_rows(self) -> int:
        """Rows of the largest batch."""
        return max(8, self.batch if "batch" in self.only else 1)


def check_sizes(info: ModelInfo, prompt: int, new: int, text: int, options: str) -> None:
    """Raise if a model has no room for a prompt, for new tokens, or for a text of both; `options` are what sets them.

    An encoder reads the prompt, so that the text of an encoder-decoder is a start token and the new ones.
    """
    if info.features is not None:
        raise SettingError(f"a {info.family} model reads sound, and prompts of tokens are measured; use another model")
    if info.is_encoder_decoder:
        text = 1 + new
        if info.longest_source is not None and prompt > info.longest_source:
            raise SettingError(
                f"the longest prompt would have {prompt} tokens, and the model's encoder reads at most "
                f"{info.longest_source}; lower {options}"
            )
    if info.max_context is not None and text > info.max_context:
        raise SettingError(
            f"the longest text would have {text} tokens, and the model's context ends at {info.max_context}; lower "
            f"{options}"
        )


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

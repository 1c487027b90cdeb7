"""How a step is compiled, and whether."""

from __future__ import annotations

import copy
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from unspool.config.named import NamedSettings
from unspool.errors import SettingError
from unspool.wording import Setting, word


@dataclass
class CompileConfig:
    """The arguments for `torch.compile` of the decoding step."""

    fullgraph: bool = True
    dynamic: bool | None = None
    backend: str | Any = "inductor"
    mode: str = "reduce-overhead"
    options: dict[str, Any] | None = None
    _compile_all_devices = False  # transformers' code asks for it: on a CPU nothing is compiled

    def to_dict(self) -> dict[str, Any]:
        """These arguments as a dict, ready for `torch.compile(**…)`."""
        return {name: copy.deepcopy(getattr(self, name)) for name in self.__dataclass_fields__}

    def validate(self) -> None:
        """Raise for options that no backend takes."""
        for name, is_sound, wanted in (
            ("fullgraph", isinstance(self.fullgraph, bool), "True or False"),
            ("dynamic", self.dynamic is None or isinstance(self.dynamic, bool), "True, False or None"),
            ("backend", callable(self.backend) or isinstance(self.backend, str), "a backend's name or a function"),
            ("mode", self.mode is None or isinstance(self.mode, str), "a mode's name"),
            ("options", self.options is None or _has_names(self.options), "a dict of inductor's options"),
        ):
            if not is_sound:
                raise SettingError(f"`compile_config` has {name}={getattr(self, name)!r:.60}; give {wanted}")


def _has_names(options: Any) -> bool:
    return isinstance(options, dict) and all(isinstance(name, str) for name in options)


@dataclass(frozen=True)
class Compiling:
    """What a call says about compiling."""

    config: CompileConfig
    is_forced: bool  # by `compile_config`; `compile=True` leaves alone what runs faster than a compiled step


def read_compiling(settings: NamedSettings, asked: Collection[str]) -> Compiling | None:
    """What is to be compiled, or None; two settings of one caller that contradict each other are refused."""
    wishes = [name for name in ("compile_config", "compile") if getattr(settings, name)]
    refusals = [name for name in ("disable_compile", "compile") if _says_no(settings, name)]
    if not wishes:
        return None
    is_asked, is_refused = wishes[0] in asked, bool(refusals) and refusals[0] in asked
    if is_asked and is_refused:
        raise SettingError(
            word(
                "{wish} asks for a compiled step and {refusal:is {value}} for none; leave one of them out",
                wish=Setting(wishes[0]),
                refusal=Setting(refusals[0]),
                value=getattr(settings, refusals[0]),
            )
        )
    if refusals and not is_asked:  # what the caller says counts for more than what the model's settings say
        return None
    return Compiling(settings.compile_config or CompileConfig(), settings.compile_config is not None)


def _says_no(settings: NamedSettings, name: str) -> bool:
    return bool(settings.disable_compile) if name == "disable_compile" else settings.compile is False

"""Tables of pairs about a call: a method beside a model, a cache, prompts or arguments.

Numbers that must fit are checked elsewhere (`lengths`, `memory`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from unspool.config import pairs
from unspool.plan.prompt_shape import PromptShape

if TYPE_CHECKING:
    from unspool.config import GenerationConfig
    from unspool.protocols import ModelInfo


@dataclass(frozen=True)
class Facts(pairs.ConfigFacts):
    """What the rules about a call look at."""

    settings: GenerationConfig
    info: ModelInfo
    shape: PromptShape
    asked: frozenset[str] = frozenset()  # settings that the caller set, not the model's file
    spoken: Mapping[str, str] = field(default_factory=dict)  # who set each, in words
    cache_kind: str = ""

    def is_asked(self, name: str) -> bool:
        """Whether the caller switched it on."""
        return name in self.asked and self.is_on(name)

    def name_values(self) -> dict[str, Any]:
        """What messages may name in braces."""
        return {
            **super().name_values(),
            "info": self.info,
            "shape": self.shape,
            "spoken": self.spoken,
            "cache_kind": self.cache_kind,
        }


CallPair: TypeAlias = pairs.Pair[Facts]
CallMethod: TypeAlias = pairs.Method[Facts]

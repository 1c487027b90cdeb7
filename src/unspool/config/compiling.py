"""How a step is compiled."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any


@dataclass
class CompileConfig:
    """The arguments for `torch.compile` of the decoding step."""

    fullgraph: bool = True
    dynamic: bool | None = None
    backend: str | Any = "inductor"
    mode: str = "reduce-overhead"
    options: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """These arguments as a dict, ready for `torch.compile(**…)`."""
        return {name: copy.deepcopy(getattr(self, name)) for name in self.__dataclass_fields__}

"""Settings as the rules about them read and fill them."""

from __future__ import annotations

from typing import Any, Protocol


class NamedSettings(Protocol):
    """Settings by name, and which of them were set: a `GenerationConfig`."""

    @property
    def explicit(self) -> frozenset[str]: ...

    def __getattr__(self, name: str) -> Any: ...

    def __setattr__(self, name: str, value: Any) -> None: ...

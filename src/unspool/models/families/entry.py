"""The entry of a family of checkpoints: the names that select it, and how its model is built."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from unspool.models.assembly import Progress
from unspool.models.native import NativeModel
from unspool.models.paths.captured_ahead import META, prepare_step
from unspool.models.sharing import without_numbers
from unspool.models.weights import WeightSource


@dataclass(frozen=True, kw_only=True)
class FamilyEntry(ABC):
    """A family of checkpoints that becomes a native model."""

    table: ClassVar[str] = "unspool.models.registry:FAMILIES"

    name: str
    architectures: tuple[str, ...]  # names of config.json's `architectures`
    model_types: tuple[str, ...]  # names of its `model_type`
    gguf: tuple[str, ...] = ()  # names of a GGUF file's general.architecture

    @abstractmethod
    def build(
        self,
        config: Mapping[str, Any],
        tensors: WeightSource,
        *,
        is_gguf: bool,
        device: torch.device,
        dtype: torch.dtype,
        progress: Progress | None = None,
    ) -> NativeModel:
        """The model of a config (or a GGUF header) and its weights."""

    def prepare(
        self, config: Mapping[str, Any], tensors: WeightSource, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Start compiling the kernels of the model that `build` would make of the same, if it is for a GPU."""
        if device.type != "cuda":
            return
        source = without_numbers(tensors, dtype)

        def build() -> NativeModel:
            return self.build(config, source, is_gguf=False, device=META, dtype=dtype)

        prepare_step((self.name, repr(config), dtype), device, build)

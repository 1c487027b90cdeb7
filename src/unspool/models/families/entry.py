"""The entry of a family of checkpoints: the names that select it, and how its model is built."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from unspool.models.assembly import Progress
from unspool.models.native import NativeModel
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

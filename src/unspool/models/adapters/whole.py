"""Objects of transformers that no adapter decodes token by token: they run by the generate() of their class, in which
unspool decodes what it can."""

from __future__ import annotations

from typing import Any, Self

import torch

from unspool.errors import UnsupportedError
from unspool.models.adapters.settings import ObjectSettings
from unspool.models.handing import Origin


class WholeObject(ObjectSettings):
    """An object that writes sound or captions as a whole: more than a decoder with its prompt."""

    def __init__(self, model: Any, why: str) -> None:
        super().__init__(model)
        self.why = why  # it has no adapter
        self.origin: Origin | None = None

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        device: torch.device = self.inner.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        dtype: torch.dtype = self.inner.dtype
        return dtype

    @property
    def weights_bytes(self) -> int:
        """The memory of the weights, in bytes."""
        return sum(one.numel() * one.element_size() for one in self.inner.parameters())

    def num_parameters(self) -> int:
        """The number of parameters."""
        return sum(one.numel() for one in self.inner.parameters())

    def __copy__(self) -> Self:
        return type(self)(self.inner, self.why)

    def refuse(self, name: str) -> UnsupportedError:
        """Why it is no language model."""
        return UnsupportedError(
            f"{name} is no language model that is decoded token by token ({self.why}); use AutoModelForTextToWaveform, "
            "pipeline('text-to-speech') or `unspool speak` for sound, pipeline('image-to-text') for captions"
        )

"""What reads the pictures of a model that was loaded from a folder: its processor, and its vision part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unspool.errors import UnsupportedError
from unspool.forks import make_lock
from unspool.kernels.seats import ALONE, NUM_AXES, Seats
from unspool.models.adapters.folder import read_object
from unspool.models.adapters.pictures.embedding import EmbeddedPrompts, embed_prompts
from unspool.models.adapters.pictures.processor import PictureProcessor, import_transformers
from unspool.models.families.pictures import PictureFamily
from unspool.models.native import NativeModel
from unspool.models.registry import find_family
from unspool.models.weights import WeightSource

_LANGUAGES = ("language_model", "text_model")


@dataclass(frozen=True)
class PicturePrompt:
    """A text with the pictures that stand in it."""

    text: str
    pictures: Sequence[Any]
    is_rendered: bool  # a chat template wrote it, special tokens included


class PictureReader:
    """The processor and the vision part of a folder, each loaded when it is first needed."""

    def __init__(self, folder: Path, config: Mapping[str, Any], tensors: WeightSource, inner: Any = None) -> None:
        self.folder = folder
        self._config, self._tensors = dict(config), tensors
        self.inner = inner  # the whole model, if it runs as an object of transformers
        family = find_family(config)
        self._family = family if isinstance(family, PictureFamily) else None
        self._processor: PictureProcessor | None = None
        self._vision: Any = None
        self._lock = make_lock(self, "_lock")

    @property
    def is_native(self) -> bool:
        """Whether the language part is a native model, which reads embeddings of pictures."""
        return self.inner is None

    @property
    def processor(self) -> PictureProcessor:
        """The folder's processor."""
        with self._lock:
            if self._processor is None:
                self._processor = PictureProcessor(self.folder)
            return self._processor

    def load(self, native: NativeModel) -> None:
        """Load what the first prompt with pictures would load."""
        _ = self.processor
        if self.is_native:
            self._open_vision(native)

    def read(self, native: NativeModel, prompts: Sequence[PicturePrompt], pad: int) -> EmbeddedPrompts:
        """Prompts with their pictures as embeddings, left-padded rows of one width."""
        return _join([self.embed(native, self.prepare(prompt)) for prompt in prompts], pad)

    def prepare(self, prompt: PicturePrompt) -> dict[str, torch.Tensor]:
        """A prompt's ids and pixels, as the model's forward takes them."""
        return self.processor.prepare(prompt.text, prompt.pictures, is_rendered=prompt.is_rendered)

    def embed(self, native: NativeModel, given: Mapping[str, Any]) -> EmbeddedPrompts:
        """What a processor returned, with the pictures as embeddings."""
        assert self._family is not None
        return embed_prompts(self._family, self._open_vision(native), native, given)

    def _open_vision(self, native: NativeModel) -> Any:
        with self._lock:
            if self._vision is None:
                self._vision = _load_vision(self.folder, self._config, self._tensors, native.dtype)
            place = next(iter(self._vision.parameters()))
            if place.device != native.device or place.dtype != native.dtype:
                self._vision.to(native.device, native.dtype)
            return self._vision


def _load_vision(folder: Path, config: Mapping[str, Any], tensors: WeightSource, dtype: torch.dtype) -> Any:
    """A folder's whole model without the language part, which is native."""
    transformers = import_transformers("a model that reads pictures")
    model = read_object(transformers, folder, config, tensors, dtype)
    language = next((name for name in _LANGUAGES if hasattr(model.model, name)), None)
    if language is None:
        raise UnsupportedError(f"this release of transformers has no language part in a {type(model).__name__}")
    setattr(model.model, language, nn.Module())
    model.lm_head = nn.Module()
    return model


def _join(rows: Sequence[EmbeddedPrompts], pad: int) -> EmbeddedPrompts:
    """Prompts of one row each as the rows of one batch."""
    width = max(row.ids.shape[1] for row in rows)
    has_seats = any(row.seats is not None for row in rows)
    ids, masks, embeds, turns, groups = [], [], [], [], []
    for row in rows:
        fill = width - row.ids.shape[1]
        ids.append(nn.functional.pad(row.ids, (fill, 0), value=pad))
        masks.append(nn.functional.pad(torch.ones_like(row.ids), (fill, 0)))
        embeds.append(nn.functional.pad(row.embeds, (0, 0, fill, 0)))
        if has_seats:
            seats = row.seats or _sit_in_line(row.ids)
            turns.append(nn.functional.pad(seats.turns, (0, 0, fill, 0)))
            groups.append(nn.functional.pad(seats.groups, (fill, 0), value=ALONE))
    joined = Seats(torch.cat(turns), torch.cat(groups)) if has_seats else None
    return EmbeddedPrompts(torch.cat(ids), torch.cat(masks), torch.cat(embeds), joined)


def _sit_in_line(ids: torch.Tensor) -> Seats:
    """The places of tokens that stand one after the other."""
    turns = torch.arange(ids.shape[1], device=ids.device)[None, :, None].expand(ids.shape[0], -1, NUM_AXES)
    return Seats(turns, torch.full_like(ids, ALONE))

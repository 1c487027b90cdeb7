"""Loading a token classifier from a folder or the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from unspool.errors import UnsupportedError
from unspool.loading.hub import NO_OPTIONS, HubOptions
from unspool.loading.model import choose_device
from unspool.loading.source import OpenedModel, open_source
from unspool.models.encoder.classifier import TokenClassifier
from unspool.models.encoder.spec import is_token_classifier, read_encoder
from unspool.models.encoder.weights import assemble_classifier
from unspool.text import Tokenizer, open_tokenizer


def open_classifier(
    name: str | Path, *, revision: str | None = None, hub: HubOptions = NO_OPTIONS
) -> OpenedModel | None:
    """A token classifier's files; None if the model of that name is of another kind."""
    source = open_source(name, revision=revision, hub=hub)
    return source if source.kind == "folder" and is_token_classifier(source.config) else None


def load_classifier(
    source: OpenedModel, device: Any = None, dtype: torch.dtype = torch.float32
) -> tuple[TokenClassifier, Tokenizer]:
    """The classifier and its tokenizer; in float32 unless another type is asked for."""
    where = choose_device(device)
    if where.type not in ("cpu", "cuda"):
        raise UnsupportedError(f"token classifiers run on CPUs and CUDA GPUs; give another device than {where}")
    spec = read_encoder(source.config)
    weights = assemble_classifier(spec, source.tensors, where, dtype)
    return TokenClassifier(spec, weights, where, dtype), open_tokenizer(source.location)

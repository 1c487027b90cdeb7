"""Language models of twenty lines that an engine can drive."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

import unspool
from tests.fakes import FakeEncoderDecoder, FakeLayers, FakeModel, make_tokenizer
from unspool.api import LanguageModel
from unspool.cache import KeyShape
from unspool.config import GenerationConfig
from unspool.decoding.select import take_likeliest
from unspool.loading.model import LoadedParts

SHAPE = KeyShape(num_layers=1, num_kv_heads=1, head_dim=1, dtype=torch.float32, device=torch.device("cpu"))
BLOCK_BYTES = 2 * 4 * 16  # of 16 positions
ENDLESS: dict[str, Any] = {"max_new_tokens": 1000, "eos_token_id": None}


class Fake(FakeModel):
    key_shape = SHAPE


class Slow(Fake):
    """A model that takes its time."""

    def forward(self, *args: Any, **named: Any) -> Any:
        time.sleep(0.002)
        return super().forward(*args, **named)


class Terse(Fake):
    """A model that tells the likeliest tokens alone where nobody else is asked for, as captured steps do."""

    num_told = 0

    def forward(self, *args: Any, **named: Any) -> Any:
        forward = super().forward(*args, **named)
        if named["want"].likeliest_only:
            self.num_told += 1
            forward.likeliest, forward.logits = take_likeliest(forward.logits), forward.logits[:, :0]
        return forward


class FakeWithLayers(FakeLayers):
    key_shape = SHAPE


class FakePair(FakeEncoderDecoder):
    key_shape = SHAPE


def make_lm(model: Any = None, *, has_tokenizer: bool = False) -> LanguageModel:
    config = GenerationConfig(eos_token_id=[2, 11], pad_token_id=0)
    tokenizer = make_tokenizer() if has_tokenizer else None
    return LanguageModel(LoadedParts("fake", Path(), model or Fake(), tokenizer, config))


def make_engine(lm: Any, num_blocks: int = 200, **options: Any) -> unspool.Engine:
    return unspool.Engine(lm, **{"memory": BLOCK_BYTES * num_blocks, "block_size": 16, **options})

"""Passes of the CPU library over keys wherever they lie: blocks, rings, mapped files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.models.paths.test_library import make, make_tokens, pytestmark

from unspool import generate
from unspool.cache import Cache
from unspool.models.decoder.model import Decoder
from unspool.protocols import Want

__all__ = ["pytestmark"]

LAYOUTS: list[tuple[str, dict[str, Any] | None]] = [
    ("static", None),
    ("paged", None),
    ("paged", {"block_size": 16}),
    ("hybrid", None),
    ("offloaded", None),
    ("offloaded_hybrid", None),
]


def read_history(model: Decoder, cache: Cache) -> list[torch.Tensor]:
    """Prompts, steps, drafts and a long pass, over rows that leave: the logits of each."""
    made = []

    def read(rows: int, length: int, counts: list[int] | None = None, wanted: Any = "last") -> None:
        forward = model.forward(make_tokens(rows, length, len(made)), cache, counts=counts, want=Want(wanted))
        assert forward.path == "library"
        made.append(forward.logits)

    read(3, 13, [13, 4, 9])
    for _ in range(3):
        read(3, 1)
    read(3, 7, [7, 3, 1])
    cache.select_rows([2, 0])
    for _ in range(4):
        read(2, 1)
    read(2, 70, [70, 33])  # more than a window, and more than one call
    read(2, 4, None, "all")
    read(2, 1)
    return made


@pytest.mark.parametrize(("kind", "config"), LAYOUTS)
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gemma3"])
def test_every_layout_gives_the_same_bits(
    pair_of: Callable[[str], Any], name: str, kind: str, config: dict[str, Any] | None
) -> None:
    model = make(pair_of(name))
    expected = read_history(model, model.new_cache("dynamic", 3, 120))
    for mine, theirs in zip(read_history(model, model.new_cache(kind, 3, 120, config=config)), expected, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("config", [None, {"block_size": 16}])
def test_forks_of_rows_in_blocks(pair_of: Callable[[str], Any], config: dict[str, Any] | None) -> None:
    model = make(pair_of("llama"))
    found = []
    for cache in (model.new_cache("dynamic", 2, 60), model.new_cache("paged", 2, 60, config=config)):
        model.forward(make_tokens(2, 18), cache, counts=[18, 14])
        tried = [
            model.forward(make_tokens(6, 1), cache.fork(range(3))),
            model.forward(make_tokens(2, 1), cache.fork(range(3, 4))),
        ]
        assert [forward.path for forward in tried] == ["library", "library"]
        cache.keep_fork(torch.tensor([2, 3]))
        found.append([*(forward.logits for forward in tried), model.forward(make_tokens(2, 1, 5), cache).logits])
    for mine, theirs in zip(*found, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(("kind", "config"), [*LAYOUTS, ("paged", {"block_size": 16, "num_blocks": 4})])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_stretches_over_every_layout(
    pair_of: Callable[[str], Any], name: str, kind: str, config: dict[str, Any] | None
) -> None:
    model = make(pair_of(name))
    settings: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None}
    rows = 1 if config and "num_blocks" in config else 2
    expected = generate(model, make_tokens(rows, 9), **settings)
    made = generate(model, make_tokens(rows, 9), cache_implementation=kind, cache_config=config, **settings)
    assert torch.equal(made, expected)

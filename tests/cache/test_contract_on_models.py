"""One suite for every kind of cache under real models, native and adapted: whatever rows go through, they answer as
they do without a cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cache.plain_cache import Rows
from tests.conformance.cases import load_adapted, load_model

from unspool.api.core import as_model
from unspool.cache import KINDS, Cache
from unspool.errors import SettingError, UnsupportedError
from unspool.protocols import Want

SOURCES: dict[str, Callable[[str], Any]] = {
    "native": lambda name: load_model(name).model,
    "adapted": lambda name: as_model(load_adapted(name)),
}
# Groups of one number lose nothing, so packed kinds are held to the same bound as the others.
LOSSLESS = {"nbits": 8, "axis_value": 1, "q_group_size": 1, "residual_length": 2, "compute_dtype": torch.float32}
TOLD: dict[str, dict[str, Any]] = {
    **{kind: LOSSLESS for kind in KINDS if "quantized" in kind},
    "sink": {"window_length": 200, "num_sink_tokens": 3},  # as long as nothing is let go, it is exact too
}
# All layers see all, all a window, some one; ALiBi, which an adapted model takes from a 2-D mask; learned positions.
MODELS = {
    "llama": [kind for kind in KINDS if kind not in ("mamba", "sliding_window")],
    "mistral": ["dynamic", "sliding_window", "hybrid", "quantized_hybrid"],
    "gemma2": ["dynamic", "hybrid", "offloaded_quantized_hybrid"],
    "bloom": ["dynamic", "static", "quantized"],
    "gpt2": ["dynamic", "offloaded_static", "quantized_static"],
}
CASES = [(source, name, kind) for source in SOURCES for name, kinds in MODELS.items() for kind in kinds]
ROOM, MOST_ROWS = 60, 6


@dataclass
class Batch(Rows):
    """Rows of tokens; every pass is checked against a model without a cache."""

    model: Any
    generator: torch.Generator

    def read(self, num_new: int, counts: list[int] | None = None) -> None:
        shape = (len(self.rows), num_new)
        tokens = torch.randint(3, self.model.info.vocab_size, shape, generator=self.generator)
        real = counts or [num_new] * len(self.rows)
        for row, count in enumerate(real):
            self.rows[row] = self.rows[row] + tokens[row, :count].tolist()
        found = self.model.forward(tokens, self.cache, counts=counts, want=Want("all")).logits
        assert found.shape == (*shape, self.model.info.vocab_size)
        assert self.cache.lengths == [len(row) for row in self.rows]
        expected = self.answer()
        for row, (count, stop) in enumerate(zip(real, self.cache.lengths, strict=True)):
            torch.testing.assert_close(found[row, :count], expected[row, stop - count : stop], atol=2e-3, rtol=1e-3)

    def answer(self) -> torch.Tensor:
        """What the model says of every position where whole rows are read at once (rows, longest, vocab)."""
        longest, counts = max(map(len, self.rows)), [len(row) for row in self.rows]
        tokens = torch.tensor([row + [0] * (longest - len(row)) for row in self.rows])
        cache = self.model.new_cache(rows=len(self.rows))
        logits: torch.Tensor = self.model.forward(tokens, cache, counts=counts, want=Want("all")).logits
        return logits


def open_batch(source: str, name: str, kind: str, rows: int) -> Batch:
    model = SOURCES[source](name)
    cache = model.new_cache(kind, MOST_ROWS, ROOM, config=TOLD.get(kind))
    return Batch(cache, [[] for _ in range(rows)], model, torch.Generator().manual_seed(7))


@pytest.mark.parametrize(("source", "name", "kind"), CASES)
def test_rows_answer_as_without_a_cache(source: str, name: str, kind: str, tmp_path: Path) -> None:
    """Ragged prompts past a window of 8, steps, drafts taken back, rows repeated and dropped, a copy, a file."""
    batch = open_batch(source, name, kind, 3)
    batch.read(13, [13, 4, 9])
    batch.read(1)
    batch.read(3, [3, 0, 2])
    batch.attempt(4, [1, 4, 0])
    batch.select([2, 0, 0, 1])
    batch.read(1)
    batch.attempt(2, [2, 0, 1, 1])
    batch.select([3, 1])
    batch.read(2, [2, 1])
    copied = Batch(batch.cache.clone(), [list(row) for row in batch.rows], batch.model, torch.Generator())
    batch.read(1)
    copied.select([1, 0, 1])
    copied.read(2)
    batch.cache.save(tmp_path / "cache.safetensors", model=batch.model)
    loaded = Cache.load(tmp_path / "cache.safetensors", model=batch.model)
    assert type(loaded) is type(batch.cache) and loaded.lengths == batch.cache.lengths
    again = Batch(loaded, [list(row) for row in batch.rows], batch.model, torch.Generator())
    again.read(1)
    again.truncate([0, len(again.rows[1])])
    again.read(2)


@pytest.mark.parametrize("kind", ["dynamic", "static", "offloaded", "quantized", "hybrid", "sink"])
def test_a_failed_pass_leaves_the_cache_as_it_was(kind: str) -> None:
    """Also where the model breaks amid its layers, and where the cache was fresh: other rows may follow then."""
    batch = open_batch("adapted", "llama", kind, 2)
    layer = batch.model.inner.model.layers[1]

    def fail(*_: Any) -> None:
        raise ArithmeticError("broken amid a pass")

    hook = layer.register_forward_hook(fail)
    try:
        with pytest.raises(UnsupportedError, match="broken amid a pass"):
            batch.read(4)
        assert batch.cache.lengths == []
        hook.remove()
        batch.rows = [[], [], []]
        batch.read(4, [4, 1, 3])
        held, rows = list(batch.cache.lengths), [list(row) for row in batch.rows]
        hook = layer.register_forward_hook(fail)
        with pytest.raises(UnsupportedError, match="broken amid a pass"):
            batch.read(2)
    finally:
        hook.remove()
    assert batch.cache.lengths == held
    batch.rows = rows
    batch.read(1)
    with pytest.raises(SettingError, match="holds 3 rows and the forward pass has 2"):
        batch.model.forward(torch.tensor([[5], [6]]), batch.cache)

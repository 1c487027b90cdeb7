"""Steps of one graph choose what they do in graphs of their own: nothing is loaded before the step before wrote it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.gpu.kernel_checks import needs_gpu
from tests.gpu.test_captured import FAMILIES
from tests.gpu.test_captured import load as load_decoder
from tests.gpu.test_captured_pairs import RESIDENT, SHAPES, WIDE, draw_sources
from tests.gpu.test_captured_pairs import load as load_pair

import unspool
from unspool.decoding.strategies import ahead
from unspool.models.paths import captured_step
from unspool.models.paths.captured_step import CapturedStep

pytestmark = [pytest.mark.gpu, needs_gpu]
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "forbidding": {"suppress_tokens": [4, 5, 6]},
    "sampling": {"do_sample": True, "seed": 5, "top_k": 0, "temperature": 1.3},
}


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Up to eight steps are launched together from now on, whatever they take; how many each graph had."""
    replayed: list[int] = []
    has_graph = CapturedStep._has_graph

    def note(self: CapturedStep, num_steps: int) -> bool:
        found = has_graph(self, num_steps)
        if found:
            replayed.append(num_steps)
        return found

    monkeypatch.setattr(CapturedStep, "_has_graph", note)
    monkeypatch.setattr(ahead, "SECONDS_AT_ONCE", 1e3)
    return replayed


def check(model: Any, given: dict[str, Any], sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {"pad_token_id": 1, "eos_token_id": None, **given}
    monkeypatch.setattr(captured_step, "OFTEN", 10**9)
    expected = unspool.generate(model, **asked)
    assert set(sizes) == {1}
    monkeypatch.setattr(captured_step, "OFTEN", 0)
    for _ in range(2):
        assert unspool.generate(model, **asked).tolist() == expected.tolist()
    assert max(sizes) == ahead.MOST_STEPS


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_decoder(name: str, rows: int, way: str, sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.randint(3, 90, (rows, 7), generator=torch.Generator().manual_seed(rows)).cuda()
    check(load_decoder(name).model, {"inputs": ids, "max_new_tokens": 76, **WAYS[way]}, sizes, monkeypatch)


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", [*SHAPES, *WIDE, *RESIDENT])
def test_an_encoder_decoder(name: str, rows: int, way: str, sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    dtype = torch.bfloat16 if name in RESIDENT else torch.float32
    source = {key: one.cuda() for key, one in draw_sources(name, rows, 11).items()}
    check(load_pair(name, "cuda", dtype), {**source, "max_new_tokens": 40, **WAYS[way]}, sizes, monkeypatch)

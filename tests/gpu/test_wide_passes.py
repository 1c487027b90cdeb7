"""Captured passes that read more than one token a row, or give more than its logits, beside the same pass eager."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from tests.conformance.cases import GOLDENS

import unspool
from unspool.protocols import Forward, Want

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FAMILIES = ("llama", "gemma2", "mistral", "qwen3", "bloom", "gpt2", "phi", "gpt_neox")


@lru_cache(maxsize=16)
def load(name: str) -> Any:
    return unspool.load(GOLDENS / "models" / name, device="cuda", dtype=torch.float32).model


def read_prompts(model: Any, counts: list[int]) -> Any:
    ids = torch.randint(3, 90, (len(counts), max(counts)), generator=torch.Generator().manual_seed(0)).cuda()
    cache = model.new_cache("dynamic", len(counts), 64)
    model.forward(ids, cache, counts=counts)
    return cache


def make_tokens(rows: int, new: int) -> torch.Tensor:
    return torch.randint(3, 90, (rows, new), generator=torch.Generator().manual_seed(1)).cuda()


def both_ways(model: Any, monkeypatch: pytest.MonkeyPatch, passes: Any) -> tuple[list[Forward], list[Forward]]:
    captured = passes()
    with monkeypatch.context() as patch:
        patch.setattr(model, "paths", [])
        eager = passes()
    assert {made.path for made in captured} == {"captured"} and {made.path for made in eager} == {"eager"}
    return captured, eager


def assert_close(made: torch.Tensor, expected: torch.Tensor) -> None:
    assert float((made - expected).abs().max()) <= 2e-5 * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("new", [2, 5, 9])
@pytest.mark.parametrize("name", FAMILIES)
def test_drafts(name: str, new: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens, counts = load(name), make_tokens(3, new), [new, 1, max(1, new - 2)]

    def passes() -> list[Forward]:
        cache = read_prompts(model, [11, 7, 1])
        tried = model.forward(tokens, cache, counts=counts, want=Want(logits="all"))
        cache.truncate([12, 8, 2])
        return [tried, model.forward(tokens[:, :1], cache)]

    captured, eager = both_ways(model, monkeypatch, passes)
    for row, count in enumerate(counts):
        assert_close(captured[0].logits[row, :count], eager[0].logits[row, :count])
    assert_close(captured[1].logits, eager[1].logits)


@pytest.mark.parametrize("forks", [2, 4, 6])
@pytest.mark.parametrize("name", FAMILIES)
def test_candidates(name: str, forks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = load(name), make_tokens(2 * forks, 1)

    def passes() -> list[Forward]:
        cache = read_prompts(model, [9, 4])
        tried = model.forward(tokens, cache.fork(range(forks)), want=Want(last_states=True))
        cache.keep_fork(torch.tensor([forks - 1, 0], device="cuda"))
        return [tried, model.forward(tokens[:2], cache)]

    captured, eager = both_ways(model, monkeypatch, passes)
    assert_close(captured[0].logits, eager[0].logits)
    assert captured[0].last_states is not None and eager[0].last_states is not None
    assert_close(captured[0].last_states, eager[0].last_states)
    assert_close(captured[1].logits, eager[1].logits)


@pytest.mark.parametrize("name", FAMILIES)
def test_early_layers_and_early_ends(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, token = load(name), make_tokens(2, 1)

    def passes() -> list[Forward]:
        early = model.forward(token, read_prompts(model, [9, 4]), want=Want(early=(0, 1)))
        return [early, model.forward(token, read_prompts(model, [9, 4]), want=Want(exit_layer=1))]

    captured, eager = both_ways(model, monkeypatch, passes)
    for made, expected in zip(captured, eager, strict=True):
        assert_close(made.logits, expected.logits)
    assert captured[0].early_logits is not None and eager[0].early_logits is not None
    for mine, other in zip(captured[0].early_logits, eager[0].early_logits, strict=True):
        assert_close(mine, other)


@pytest.mark.parametrize(
    "settings",
    [
        {"penalty_alpha": 0.6, "top_k": 4},
        {"prompt_lookup_num_tokens": 3},
        {"assistant_early_exit": 1, "num_assistant_tokens": 3},
        {"dola_layers": [0, 1]},
        {"guidance_scale": 1.5},
    ],
    ids=str,
)
def test_strategies_run_on_captured_passes(settings: dict[str, Any]) -> None:
    ids = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(5))
    asked = {"max_new_tokens": 12, "eos_token_id": None, "return_dict_in_generate": True, **settings}
    there = unspool.generate(load("llama"), ids.cuda(), **asked)
    here = unspool.generate(unspool.load(GOLDENS / "models" / "llama", device="cpu").model, ids, **asked)
    assert there.sequences.tolist() == here.sequences.tolist()
    assert there.stats.path == "captured"


@pytest.mark.parametrize(("alpha", "top_k"), [(0.6, 4), (1.0, 5), (0.3, 2)])
@pytest.mark.parametrize("name", FAMILIES)
def test_contests_are_decided_in_the_pass(name: str, alpha: float, top_k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of different lengths that leave one by one, and more positions than the past's first room."""
    model = load(name)
    ids = torch.randint(3, 90, (5, 9), generator=torch.Generator().manual_seed(7)).cuda()
    mask = torch.ones_like(ids)
    mask[1, :4] = mask[3, :7] = 0
    asked = {"attention_mask": mask, "penalty_alpha": alpha, "top_k": top_k, "pad_token_id": 0}
    for ends in ({"eos_token_id": None}, {"eos_token_id": list(range(0, 160, 9))}):
        captured = unspool.generate(model, ids, max_new_tokens=20, **asked, **ends)
        with monkeypatch.context() as patch:
            patch.setattr(model, "paths", [])
            assert captured.tolist() == unspool.generate(model, ids, max_new_tokens=20, **asked, **ends).tolist()


@pytest.mark.parametrize(
    "settings",
    [
        [{"guidance_scale": scale} for scale in (1.5, 3.0, 0.4, 1.5)],
        [{"penalty_alpha": alpha, "top_k": 4} for alpha in (0.6, 0.1, 0.9, 0.6)],
    ],
    ids=["scales", "alphas"],
)
def test_numbers_of_a_call_are_inputs_of_its_graph(
    settings: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls that differ in a number alone capture nothing anew, and each goes by its own."""
    from unspool.models.paths import captured as module

    model, ids = load("llama"), make_tokens(2, 9)
    made = []

    class Counted(module.CapturedStep):
        def __init__(self, *given: Any) -> None:
            made.append(given[-1])
            super().__init__(*given)

    monkeypatch.setattr(module, "CapturedStep", Counted)
    asked = {"max_new_tokens": 10, "eos_token_id": None, "pad_token_id": 0}
    model.find_path("captured")._waiting.clear()
    captured = [unspool.generate(model, ids, **asked, **one).tolist() for one in settings]
    assert len(made) == len(set(made)) and len({str(tokens) for tokens in captured}) > 1
    with monkeypatch.context() as patch:
        patch.setattr(model, "paths", [])
        assert captured == [unspool.generate(model, ids, **asked, **one).tolist() for one in settings]


def test_a_contest_outgrows_the_room_of_its_past(monkeypatch: pytest.MonkeyPatch) -> None:
    from unspool.decoding.strategies import past_states

    monkeypatch.setattr(past_states, "CHUNK", 8)
    model, ids = load("llama"), make_tokens(1, 5)
    asked = {"penalty_alpha": 0.6, "top_k": 4, "max_new_tokens": 40, "eos_token_id": None}
    captured = unspool.generate(model, ids, **asked)
    monkeypatch.setattr(model, "paths", [])
    assert captured.tolist() == unspool.generate(model, ids, **asked).tolist()

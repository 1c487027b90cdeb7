"""Branches over one copy of a prompt hold what copies of it would, whatever is reordered, dropped or rolled back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conformance.cases import load_model, read_cases

import unspool
from unspool.api.starting import start
from unspool.cache import BranchingCache, DynamicCache, StaticCache
from unspool.errors import SettingError, UnsupportedError

LAYERS, HEADS, WIDTH = 2, 2, 3


def fill(cache: DynamicCache, lengths: list[int]) -> None:
    rows, longest = len(lengths), max(lengths)
    cache.begin(rows, longest, lengths)
    for layer in range(LAYERS):
        cache.write(layer, torch.randn(rows, longest, 2, HEADS, WIDTH))
    cache.end()


def step(caches: list[BranchingCache | DynamicCache], rows: int) -> None:
    """One more position in every row, the same in all caches."""
    spans = [cache.begin(rows, 1) for cache in caches]
    assert all(torch.equal(span.positions, spans[0].positions) for span in spans)
    for layer in range(LAYERS):
        kv = torch.randn(rows, 1, 2, HEADS, WIDTH)
        for cache in caches:
            cache.write(layer, kv)
    for cache in caches:
        cache.end()


def assert_same(branching: BranchingCache, plain: DynamicCache) -> None:
    merged = branching.merge()
    assert merged.lengths == plain.lengths == branching.lengths
    for layer in range(LAYERS):
        for mine, theirs in zip(merged[layer], plain[layer], strict=True):
            for row, length in enumerate(plain.lengths):
                assert torch.equal(mine[row, :, :length], theirs[row, :, :length])


@settings(max_examples=30)
@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    branches=st.integers(2, 4),
    seed=st.integers(0, 10_000),
    num_steps=st.integers(1, 7),
)
def test_equals_copies_of_the_prompt(lengths: list[int], branches: int, seed: int, num_steps: int) -> None:
    torch.manual_seed(seed)
    prompt = DynamicCache()
    fill(prompt, lengths)
    plain = prompt.take_rows([row for row in range(len(lengths)) for _ in range(branches)])
    branching = BranchingCache(prompt, branches)
    rows = len(lengths) * branches
    assert_same(branching, plain)
    for _ in range(num_steps):
        step([branching, plain], rows)
        parents = [
            prompt_row * branches + int(torch.randint(branches, ()))
            for prompt_row in range(len(lengths))
            for _ in range(branches)
        ]
        branching.select_rows(parents)
        plain.select_rows(parents)
        assert_same(branching, plain)
    back = [length - 1 for length in plain.lengths]
    branching.truncate(back)
    plain.truncate(back)
    step([branching, plain], rows)
    assert_same(branching, plain)
    if len(lengths) > 1:  # a prompt leaves with all its branches
        staying = list(range(branches, rows))
        branching.select_rows(staying)
        plain.select_rows(staying)
        step([branching, plain], len(staying))
        assert_same(branching, plain)


def test_only_positions_after_the_parting_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = DynamicCache()
    fill(prompt, [5])
    branching = BranchingCache(prompt, 2)
    copied: list[int] = []
    real = DynamicCache.copy_rows
    monkeypatch.setattr(
        DynamicCache, "copy_rows", lambda self, index, first: (copied.append(first), real(self, index, first))[1]
    )
    step([branching], 2)
    branching.select_rows([0, 0])  # both go on from row 0: row 1 takes position 0
    step([branching], 2)
    step([branching], 2)
    branching.select_rows([1, 1])  # they share own position 0 and part at 1
    step([branching], 2)
    branching.select_rows([0, 1])  # nothing moves
    assert copied == [0, 1, 4]


def test_what_can_not_be_is_refused() -> None:
    prompt = DynamicCache()
    fill(prompt, [4, 2])
    branching = BranchingCache(prompt, 2)
    step([branching], 4)
    with pytest.raises(UnsupportedError, match="stay with their prompt"):
        branching.select_rows([0, 2, 2, 3])
    with pytest.raises(SettingError, match="shared"):
        branching.truncate([3, 3, 3, 3])
    with pytest.raises(UnsupportedError, match="merge"):
        branching.update(torch.zeros(4, 2, 1, 3), torch.zeros(4, 2, 1, 3), 0)


@pytest.mark.parametrize("name", ["llama", "bloom", "gemma2", "mistral", "gpt2", "qwen3"])
@pytest.mark.parametrize("more", [{}, {"num_beam_groups": 2, "diversity_penalty": 1.0}, {"force_words_ids": [[7, 9]]}])
def test_beams_over_branches_are_beams_over_copies(name: str, more: dict[str, object]) -> None:
    """A static cache holds a copy of the prompt for every beam; the answers are the same."""
    case = next(case for case in read_cases() if case.model == name)
    inputs = {key: torch.tensor(value) for key, value in case.inputs.items()}
    model = load_model(name).model
    common = {"num_beams": 4, "max_new_tokens": 12, "return_dict_in_generate": True, "output_scores": True, **more}
    run = start(model, **inputs, **common)
    for _ in run:
        assert isinstance(run.cache.held, BranchingCache)
    shared = run.output()
    assert isinstance(shared.past_key_values, DynamicCache)  # callers get a plain one
    copied = unspool.generate(model, **inputs, **common, cache_implementation="static")
    assert isinstance(copied.past_key_values, StaticCache)
    assert torch.equal(shared.sequences, copied.sequences)
    torch.testing.assert_close(shared.sequences_scores, copied.sequences_scores, atol=1e-4, rtol=1e-4)
    for mine, theirs in zip(shared.scores, copied.scores, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-3, rtol=1e-3)


def test_beams_that_end_at_once_hold_their_prompts() -> None:
    """Nothing was written by any of them, and the caller gets what copies hold."""
    model, ids = load_model("llama").model, torch.tensor([[5, 6, 7], [8, 9, 10]])
    ends = list(range(2, model.info.vocab_size))
    common = {"num_beams": 3, "eos_token_id": ends, "suppress_tokens": [0, 1], "return_dict_in_generate": True}
    found = unspool.generate(model, ids, max_new_tokens=4, **common)
    copied = unspool.generate(model, ids, max_new_tokens=4, cache_implementation="static", **common)
    assert found.sequences.shape == (2, 4) and torch.equal(found.sequences, copied.sequences)
    cache, expected = found.past_key_values, copied.past_key_values
    assert cache.lengths == expected.lengths == [3] * 6 and len(cache) == len(expected)
    for layer in range(len(expected)):
        for mine, theirs in zip(cache[layer], expected[layer], strict=True):
            assert torch.equal(mine[:, :, :3], theirs[:, :, :3])


def test_the_prompt_is_held_once() -> None:
    prompt = DynamicCache(capacity=1024)
    fill(prompt, [1000])
    before = prompt.nbytes
    branching = BranchingCache(prompt, 8)
    step([branching], 8)
    assert branching.nbytes - before == 8 * 64 * 2 * HEADS * WIDTH * 4 * LAYERS  # one chunk of own positions

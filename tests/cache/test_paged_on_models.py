"""Models over a cache in blocks: answers are those of every other exact kind."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tests.cache.blocks import count_holders
from tests.conformance.cases import Case, load_model, read_cases, run_case

import unspool
from unspool.cache import BlockPool, EncoderDecoderCache, PagedCache
from unspool.errors import ResourceError, SettingError, UnsupportedError

SIZE = 16  # positions of a block, here

FAMILIES = ("llama", "gemma2", "t5")
CASES = [case for case in read_cases() if case.model in FAMILIES and case.to_come is None]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_goldens_hold_in_blocks(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The references' tokens for every strategy; prompts and answers outgrow a block."""
    real = unspool.generate
    told = {"cache_implementation": "paged", "cache_config": {"block_size": SIZE}}
    monkeypatch.setattr(unspool, "generate", lambda *a, **k: real(*a, **k, **told))
    output = run_case(case)
    if "sequences" in case.expected:
        assert output.sequences.tolist() == case.sequences
    cache = output.past_key_values
    assert isinstance(cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache, PagedCache)


WAYS: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 3},
    "beams in parts": {"num_beams": 3, "low_memory": True},
    "drafts": {"prompt_lookup_num_tokens": 3},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 4},
    "contrastive one by one": {"penalty_alpha": 0.6, "top_k": 4, "low_memory": True},
    "samples": {"do_sample": True, "seed": 11, "num_return_sequences": 3},
}


@pytest.mark.parametrize("config", [{}, {"block_size": 16}, {"block_size": 32, "max_cache_len": 90}], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_ragged_prompts_decode_as_with_one_buffer(way: str, config: dict[str, Any]) -> None:
    model = load_model("mistral").model
    ids = torch.randint(3, model.info.vocab_size, (3, 22), generator=torch.Generator().manual_seed(4))
    mask = torch.ones_like(ids)
    mask[0, :9], mask[1, :19] = 0, 0
    common = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 50, "eos_token_id": None, **WAYS[way]}
    expected = unspool.generate(model, **common)
    found = unspool.generate(model, **common, cache_implementation="paged", cache_config=config or None)
    assert torch.equal(found, expected)


def test_a_pool_is_checked_before_anything_is_read() -> None:
    model, ids = load_model("llama").model, [[5, 6, 7]]
    more: dict[str, Any] = {"cache_implementation": "paged", "max_new_tokens": 40}
    with pytest.raises(SettingError, match=r"32 positions together, and one alone may need 43: 11 are missing"):
        unspool.generate(model, ids, cache_config={"block_size": 16, "num_blocks": 2}, **more)
    with pytest.raises(SettingError, match=r"=20 is too little .* 23 more"):
        unspool.generate(model, ids, max_cache_len=20, **more)
    with pytest.raises(SettingError, match="power of two"):
        unspool.generate(model, ids, cache_config={"block_size": 24}, **more)
    with pytest.raises(SettingError, match="block_size"):
        unspool.generate(model, ids, cache_config={"block_sise": 16}, **more)
    cache = PagedCache(BlockPool(16, 2))
    with pytest.raises(SettingError, match=r"have room for 32 positions.*needs 42, 10 more"):
        unspool.generate(model, ids, past_key_values=cache, max_new_tokens=40)
    with pytest.raises(ResourceError, match="are missing"):  # every row fits, not all of them
        told = {"block_size": 16, "num_blocks": 3}
        unspool.generate(model, ids * 2, cache_config=told, eos_token_id=None, **more)
    assert unspool.generate(model, ids, max_cache_len=48, eos_token_id=None, **more).shape == (1, 43)


def test_a_failed_call_gives_its_blocks_back() -> None:
    model = load_model("llama").model
    pool = BlockPool(16, 12)
    held = PagedCache(pool)
    model(torch.tensor([[5, 6, 7] * 6]), past_key_values=held)
    ids = [[5, 6, 7] * 6 + [9]]
    with pytest.raises(ResourceError):
        unspool.generate(
            model, ids, past_key_values=held, max_new_tokens=100, num_return_sequences=3, do_sample=True,
            eos_token_id=None,
        )  # fmt: skip
    gc.collect()
    assert held.lengths == [18] and pool.num_free == 10
    count_holders(pool, held)


def test_calls_share_the_blocks_of_a_prefix() -> None:
    lm = load_model("llama")
    ids = torch.randint(3, 90, (70,), generator=torch.Generator().manual_seed(3)).tolist()
    prefix = lm.prefix(ids, cache_implementation="paged", cache_config={"block_size": 16, "num_blocks": 30})
    assert isinstance(prefix.cache, PagedCache)
    pool = prefix.cache.pool
    more = [[5, 6], [40, 41, 42, 43], [12]]
    most = 0

    def watch(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        nonlocal most
        most = max(most, pool.num_blocks - pool.num_free)
        return scores

    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(lambda row: prefix.generate([row] * 2, max_new_tokens=20, eos_token_id=None), more))
    expected = [lm.generate([ids + row] * 2, max_new_tokens=20, eos_token_id=None).token_ids for row in more]
    assert [each.token_ids for each in found] == expected
    gc.collect()
    assert pool.num_free == 25  # the prefix's five
    prefix.generate(more, max_new_tokens=20, eos_token_id=None, logits_processor=[watch])
    assert most == 5 + 3 * 2  # the prefix's once, the last of which each row has copied, and another for each
    with pytest.raises(UnsupportedError, match="takes its room at once"):
        lm.prefix(ids, cache_implementation="paged", cache_config={"max_cache_len": 100})

"""The engine on a GPU: steps that feed themselves, and rows of all kinds beside them, give what calls alone give."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from tests.conformance.cases import GOLDENS

import unspool
from unspool.cache import BlockPool, PagedCache
from unspool.models.paths.captured_step import CapturedStep
from unspool.protocols import Want

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PROMPTS = [[3 + (7 * place + step) % 40 for step in range(3 + 5 * place % 30)] for place in range(24)]
ASKED: tuple[dict[str, Any], ...] = (
    {},
    {"max_new_tokens": 5},
    {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "seed": 4},
    {"repetition_penalty": 1.3},
    {"eos_token_id": None, "max_new_tokens": 90},
    {"logprobs": 2},
    {"num_return_sequences": 2, "do_sample": True, "seed": 9},
)
DRAWN: tuple[dict[str, Any], ...] = (
    {"temperature": 0.8, "top_p": 0.9},
    {"top_k": 7},
    {"min_p": 0.05},
    {"repetition_penalty": 1.2, "top_k": 20, "top_p": 0.8},
    {"top_k": 0, "top_p": 0.9},
)


@lru_cache
def load() -> unspool.LanguageModel:
    return unspool.load(GOLDENS / "models" / "llama", device="cuda", dtype=torch.float32)


def count_equal(asked: list[dict[str, Any]], **options: Any) -> int:
    lm = load()
    with unspool.Engine(lm, **options) as engine:
        requests = [engine.submit(prompt, **one) for prompt, one in zip(PROMPTS, asked, strict=True)]
        found = [request.result(60).token_ids for request in requests]
    alone = [lm.generate(prompt, **one).token_ids for prompt, one in zip(PROMPTS, asked, strict=True)]
    return sum(one == two for one, two in zip(found, alone, strict=True))


def test_greedy_rows_that_feed_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    run, fed = CapturedStep.run, []

    def watch(step: CapturedStep, tokens: torch.Tensor, *args: Any) -> Any:
        fed.append(tokens is step._fed)
        return run(step, tokens, *args)

    monkeypatch.setattr(CapturedStep, "run", watch)
    with unspool.Engine(load()) as engine:
        engine.submit(PROMPTS[0], max_new_tokens=40, eos_token_id=None).result(60)
    assert sum(fed) >= 36  # all but those after the prompt and where a block is taken
    asked = [{"max_new_tokens": 3 + 3 * place, "eos_token_id": None} for place in range(len(PROMPTS))]
    assert count_equal(asked) == len(PROMPTS)
    assert count_equal([{"max_new_tokens": 40}] * len(PROMPTS)) == len(PROMPTS)  # some end earlier


def test_a_log_has_what_the_last_steps_chose() -> None:
    model, cache, brief = load().model, PagedCache(BlockPool(64, 40)), Want(is_brief=True)
    prompts = torch.arange(3, 30, device="cuda").view(3, 9)
    with torch.no_grad():
        tokens = model.forward(prompts, cache, counts=[4, 9, 7]).logits.argmax(-1)[:, None]
        found = []
        for _ in range(40):
            forward = model.forward(tokens, cache, want=brief)
            assert forward.likeliest is not None and forward.fed is not None and forward.log is not None
            found.append(forward.likeliest.clone())
            tokens, log = forward.fed, forward.log
            for behind, count in ((0, 1), (1, 14), (0, 16)):
                if behind + count <= len(found):
                    wanted = torch.stack(found[len(found) - behind - count : len(found) - behind], dim=1)
                    assert torch.equal(log.read_log(log.num_logged - behind, count), wanted)


def test_rows_of_all_kinds() -> None:
    asked = [{"max_new_tokens": 30, **ASKED[place % len(ASKED)]} for place in range(len(PROMPTS))]
    assert count_equal(asked) == len(PROMPTS)


@pytest.mark.parametrize(
    "asked",
    [
        {"num_beams": 3},
        {"num_beams": 4, "num_return_sequences": 2, "length_penalty": 0.5, "repetition_penalty": 1.2},
        {"num_beams": 2, "do_sample": True, "seed": 3},
        {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
        {"num_beams": 3, "force_words_ids": [[7, 8]]},
        {"penalty_alpha": 0.6, "top_k": 4},
        {"guidance_scale": 1.7},
        {"dola_layers": "high"},
        {"prompt_lookup_num_tokens": 3},
    ],
)
def test_special_requests_beside_plain_rows(asked: dict[str, Any]) -> None:
    pytest.importorskip("greenlet")
    every = [{"max_new_tokens": 20, **(asked if place % 3 else ASKED[place % 7])} for place in range(12)]
    lm = load()
    with unspool.Engine(lm) as engine:
        requests = [engine.submit(prompt, **one) for prompt, one in zip(PROMPTS, every, strict=False)]
        found = [request.result(60).token_ids for request in requests]
    assert found == [lm.generate(prompt, **one).token_ids for prompt, one in zip(PROMPTS, every, strict=False)]


def test_tails_that_are_drawn_together() -> None:
    asked = [
        {"max_new_tokens": 30, "do_sample": True, "seed": place, **DRAWN[place % len(DRAWN)]}
        for place in range(len(PROMPTS))
    ]
    assert count_equal(asked) == len(PROMPTS)


def test_draft_models_share_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("greenlet")
    lm, drafts = load(), unspool.load(GOLDENS / "models" / "llama", device="cuda", dtype=torch.float32)
    asked = {"assistant_model": drafts, "max_new_tokens": 20, "eos_token_id": None}
    alone = [lm.generate(prompt, **asked).token_ids for prompt in PROMPTS[:4]]
    calls, forward = [], type(drafts.model).forward

    def count(model: Any, *given: Any, **more: Any) -> Any:
        calls.append(model)
        return forward(model, *given, **more)

    monkeypatch.setattr(type(drafts.model), "forward", count)
    for prompt in PROMPTS[:4]:
        lm.generate(prompt, **asked)
    num_alone = sum(one is drafts.model for one in calls)
    calls.clear()
    with unspool.Engine(lm) as engine:
        requests = [engine.submit(prompt, **asked) for prompt in PROMPTS[:4]]
        assert [request.result(60).token_ids for request in requests] == alone
    assert sum(one is drafts.model for one in calls) <= num_alone // 2


def test_little_memory() -> None:
    shape = load().model.key_shape
    block = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * 4 * 64
    asked = [{"max_new_tokens": 90, "eos_token_id": None}] * len(PROMPTS)
    assert count_equal(asked, memory=20 * block, max_rows=16) == len(PROMPTS)


def test_a_stream_beside_others() -> None:
    lm = load()
    with unspool.Engine(lm) as engine:
        others = [engine.submit(prompt, max_new_tokens=60, eos_token_id=None) for prompt in PROMPTS[:6]]
        request = engine.submit(PROMPTS[7], max_new_tokens=40, eos_token_id=None)
        tokens = [token for piece in request for token in piece.token_ids]
        assert tokens == lm.generate(PROMPTS[7], max_new_tokens=40, eos_token_id=None).token_ids[0]
        late = [token for piece in others[2] for token in piece.token_ids]
        assert late == lm.generate(PROMPTS[2], max_new_tokens=60, eos_token_id=None).token_ids[0]


@pytest.mark.parametrize(
    "asked", [{"num_beams": 3}, {"penalty_alpha": 0.6, "top_k": 4}, {"prompt_lookup_num_tokens": 3}]
)
def test_little_memory_moves_what_is_not_plain(asked: dict[str, Any]) -> None:
    pytest.importorskip("greenlet")
    lm, shape = load(), load().model.key_shape
    block = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * 4 * 16
    asked = {"max_new_tokens": 60, "eos_token_id": None, **asked}
    with unspool.Engine(lm, memory=24 * block, block_size=16, max_rows=16) as engine:
        requests = [engine.submit(prompt, **asked) for prompt in PROMPTS[:5]]
        found = [request.result(60).token_ids for request in requests]
        assert engine.stats.preemptions > 0 and not engine.stats.blocks_used
    assert found == [lm.generate(prompt, **asked).token_ids for prompt in PROMPTS[:5]]


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("gemma2", {"cache_implementation": "paged_hybrid"}),
        ("llama", {"cache_implementation": "paged_quantized", "cache_config": {"nbits": 4, "residual_length": 64}}),
        ("llama", {"cache_implementation": "paged_quantized", "cache_config": {"nbits": 8, "residual_length": 0}}),
    ],
)
def test_blocks_of_other_kinds(family: str, options: dict[str, Any]) -> None:
    lm = unspool.load(GOLDENS / "models" / family, device="cuda", dtype=torch.float32)
    asked = [{"max_new_tokens": 30 + 7 * place, **ASKED[place % 4]} for place in range(8)]
    with unspool.Engine(lm, max_rows=16, **options) as engine:
        requests = [engine.submit(prompt, **one) for prompt, one in zip(PROMPTS[8:], asked, strict=False)]
        found = [request.result(60).token_ids for request in requests]
        assert not engine.stats.blocks_used
    alone = [lm.generate(prompt, **one, **options).token_ids for prompt, one in zip(PROMPTS[8:], asked, strict=False)]
    assert sum(one == two for one, two in zip(found, alone, strict=True)) >= len(found) - 1  # up to rounding

"""An engine's memory on a GPU: all of it is given back, and what passes take beside the keys is left to them."""

from __future__ import annotations

import gc
from functools import lru_cache
from typing import Any

import pytest
import torch
from tests.conformance.cases import GOLDENS

import unspool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.whole_card,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ASKED: tuple[dict[str, Any], ...] = (
    {},
    {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "seed": 4},
    {"repetition_penalty": 1.3},
    {"logprobs": 2},
    {"num_beams": 3},
    {"penalty_alpha": 0.6, "top_k": 4},
    {"prompt_lookup_num_tokens": 3},
)
MIB = 1 << 20


@lru_cache
def load() -> unspool.LanguageModel:
    return unspool.load(GOLDENS / "models" / "llama", device="cuda", dtype=torch.float32)


def measure() -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()


class Refuse:
    def __call__(self, ids: Any, scores: Any) -> Any:
        raise ZeroDivisionError("by a caller's own code")


def serve(lm: unspool.LanguageModel, **options: Any) -> list[Any]:
    held: list[Any] = []
    with unspool.Engine(lm, **options) as engine:
        prompts = [[3 + (place * step) % 40 for step in range(60)] for place in range(1, 22)]
        requests = [
            engine.submit(prompt, max_new_tokens=30, **ASKED[place % len(ASKED)])
            for place, prompt in enumerate(prompts)
        ]
        held += [request.result(120) for request in requests] + requests + [engine.stats, engine]
        failing = engine.submit(prompts[0], max_new_tokens=4, logits_processor=[Refuse()])
        try:
            failing.result(60)
        except ZeroDivisionError as error:
            held += [error, error.__traceback__, failing]
        streamed = engine.submit(prompts[0], max_new_tokens=60, eos_token_id=None)
        held += [next(iter(streamed)), streamed]
    return held


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "paged_quantized"}, {"memory": 512 * MIB}])
def test_all_memory_is_given_back(options: dict[str, Any]) -> None:
    pytest.importorskip("greenlet")
    lm = load()
    held = [serve(lm, memory=64 * MIB)]  # what the model itself prepares
    before, free = measure(), torch.cuda.mem_get_info()[0]
    for _ in range(2):
        held.append(serve(lm, **options))
        assert measure() - before < 16 * MIB
        assert free - torch.cuda.mem_get_info()[0] < 512 * MIB  # and a second engine, or another program, gets it


def test_calls_beside_a_closed_engine() -> None:
    lm, prompt = load(), [3, 4, 5, 6]
    wanted = lm.generate(prompt, max_new_tokens=20).token_ids
    with unspool.Engine(lm) as engine:
        assert engine.submit(prompt, max_new_tokens=20).result(60).token_ids == wanted
    assert lm.generate(prompt, max_new_tokens=20).token_ids == wanted
    with unspool.Engine(lm) as engine:
        assert engine.submit(prompt, max_new_tokens=20).result(60).token_ids == wanted


def test_shortages_make_passes_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes of more than so many tokens or rows find no memory: once before they begin, once after their keys."""
    lm = load()
    prompts = [[3 + (7 * place + step) % 40 for step in range(3 + 9 * place % 50)] for place in range(24)]
    alone = [lm.generate(prompt, max_new_tokens=20).token_ids for prompt in prompts]
    forward = type(lm.model).forward
    for is_late in (False, True):

        def refuse(model: Any, tokens: Any, *given: Any, is_late: bool = is_late, **named: Any) -> Any:
            is_large = tokens is not None and (tokens.numel() > 100 or (tokens.shape[1] == 1 and len(tokens) > 5))
            answer = forward(model, tokens, *given, **named) if is_late or not is_large else None
            if is_large:
                raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 616.00 MiB")
            return answer

        with monkeypatch.context() as patch:
            patch.setattr(type(lm.model), "forward", refuse)
            with unspool.Engine(lm) as engine:
                requests = [engine.submit(prompt, max_new_tokens=20) for prompt in prompts]
                assert [request.result(120).token_ids for request in requests] == alone
                assert not engine.stats.requests_failed


def test_a_card_that_is_almost_full() -> None:
    lm = load()
    free = torch.cuda.mem_get_info()[0]
    filled = torch.empty(max(0, free - 3 * (1 << 30)), dtype=torch.uint8, device="cuda")
    prompts = [[3 + (place + step) % 40 for step in range(70)] for place in range(64)]
    with unspool.Engine(lm) as engine:
        requests = [engine.submit(prompt, max_new_tokens=50, eos_token_id=None) for prompt in prompts]
        assert all(len(request.result(120).token_ids[0]) == 50 for request in requests)
    del filled

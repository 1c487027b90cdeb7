"""Captured steps give the torch path's tokens: goldens in float32, ragged rows, rows that leave, several caches."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from tests.conformance import cases
from tests.conformance.cases import GOLDENS, Case, read_cases, run_case

import unspool
from unspool.errors import NoTokenLeftError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
RUNNING = [case for case in read_cases() if case.to_come is None and "sequences" in case.expected]
GREEDY = [case for case in RUNNING if case.name == "greedy"]
# test_captured_pairs.py has encoder-decoders, test_state_step.py has Mamba
WITHOUT_CAPTURE = ("t5", "bart", "pegasus", "marian", "whisper", "mamba")
FAMILIES = [case.model for case in GREEDY if case.model not in WITHOUT_CAPTURE]


@lru_cache(maxsize=32)
def load(name: str, dtype: torch.dtype = torch.float32) -> unspool.LanguageModel:
    return unspool.load(GOLDENS / "models" / name, device="cuda", dtype=dtype)


# On a CPU, weights that differ by 2e-7 change the second row's beams of the first one time in four; the second has a
# beam of score -inf, whose last token says nothing.
TIES = ("marian-diverse4_ret4", "pegasus-force_mixed_ret")


@pytest.mark.parametrize("case", RUNNING, ids=str)
def test_every_golden(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "load_model", load)
    found = run_case(case)
    if str(case) not in TIES:
        assert found.sequences.tolist() == case.sequences
        return
    scores = torch.tensor([float(score) for score in case.expected["sequences_scores"]])
    torch.testing.assert_close(found.sequences_scores.cpu(), scores, atol=2e-3, rtol=0)


@pytest.mark.parametrize("case", [case for case in GREEDY if case.model != "whisper"], ids=str)  # it returns text alone
def test_steps_ahead_give_the_goldens(case: Case) -> None:
    """Without an output object rows leave when they end, and steps are launched before tokens are read."""
    inputs = {name: torch.tensor(value) for name, value in case.inputs.items()}
    found = unspool.generate(load(case.model).model, **inputs, max_new_tokens=case.max_new_tokens)
    assert found.tolist() == case.expected["sequences"]


def run(name: str, ids: torch.Tensor, **settings: Any) -> Any:
    settings = {"max_new_tokens": 12, "return_dict_in_generate": True, **settings}
    return unspool.generate(load(name).model, ids, **settings)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_path_is_told(name: str) -> None:
    ids = torch.randint(3, 90, (2, 6), device="cuda")
    assert run(name, ids).stats.path == "captured"
    eager = run(name, ids, output_hidden_states=True).stats
    assert eager.path == "eager" and "hidden states" in eager.path_reason


@pytest.mark.parametrize("name", FAMILIES)
def test_one_graph_serves_many_caches_and_rows(name: str) -> None:
    """Lengths, rows and buffers change between calls; nothing of an earlier call may be read."""
    generator = torch.Generator().manual_seed(1)
    here = unspool.load(GOLDENS / "models" / name, device="cpu").model
    for rows, width in [(1, 5), (1, 40), (5, 9), (3, 17), (9, 4), (1, 5)]:
        ids = torch.randint(3, 90, (rows, width), generator=generator)
        mask = (torch.arange(width) >= torch.randint(0, width - 1, (rows, 1), generator=generator)).long()
        settings = {"attention_mask": mask, "max_new_tokens": 14, "pad_token_id": 0}
        there = unspool.generate(load(name).model, ids.cuda(), **{**settings, "attention_mask": mask.cuda()})
        assert there.tolist() == unspool.generate(here, ids, **settings).tolist()


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_cache_that_grows_and_one_that_is_given(name: str) -> None:
    ids = torch.randint(3, 90, (1, 6), device="cuda")
    long = unspool.generate(load(name).model, ids, max_new_tokens=80, eos_token_id=None)
    cache = unspool.DynamicCache()
    part = ids
    for count in (30, 50):
        part = unspool.generate(load(name).model, part, max_new_tokens=count, eos_token_id=None, past_key_values=cache)
        assert cache.lengths == [part.shape[1] - 1]  # the last token has not been read
    assert part.tolist() == long.tolist()


def test_rows_leave_one_by_one() -> None:
    """End tokens fall at different steps; the tokens of those that stay do not change."""
    ids = torch.randint(3, 90, (6, 7), generator=torch.Generator().manual_seed(3)).cuda()
    whole = unspool.generate(load("llama").model, ids, max_new_tokens=24, eos_token_id=None)
    ends = sorted({int(whole[row, 10 + 2 * row]) for row in range(6)})
    found = unspool.generate(load("llama").model, ids, max_new_tokens=24, eos_token_id=ends, pad_token_id=0)
    for row in range(6):
        new = whole[row, 7:].tolist()
        stop = next(at for at, token in enumerate(new) if token in ends) + 1
        assert found[row, 7 : 7 + stop].tolist() == new[:stop]
        assert not found[row, 7 + stop :].any()


def test_no_token_left_is_told_although_a_step_was_launched_after_it() -> None:
    vocab = load("llama").model.info.vocab_size
    ids = torch.randint(3, 90, (2, 7), device="cuda")
    with pytest.raises(NoTokenLeftError, match="position 7"):
        unspool.generate(load("llama").model, ids, suppress_tokens=list(range(vocab)), max_new_tokens=5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_captured_steps_are_as_near_as_torchs(name: str, dtype: torch.dtype) -> None:
    """A step's logits, captured and by operators, beside float64's: sums of another order round otherwise."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 90, (3, 20), generator=generator).cuda()

    def read(kept_in: torch.dtype, path: str) -> torch.Tensor:
        model = load(name).model.to(kept_in)
        cache = model.new_cache()
        model.forward(ids[:, :-1], cache)
        with model.without_paths(*(["captured"] if path == "eager" else [])):
            forward = model.forward(ids[:, -1:], cache)
        assert forward.path == path
        return forward.logits.double()

    exact = read(torch.float64, "eager")
    captured, eager = (float((read(dtype, path) - exact).norm() / exact.norm()) for path in ("captured", "eager"))
    assert captured < 1.5 * eager + {torch.float32: 5e-5, torch.bfloat16: 1e-3}[dtype]

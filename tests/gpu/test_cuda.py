"""On a GPU the same tokens come out: goldens in float32, and half precision that runs and agrees with itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.conformance.cases import GOLDENS, Case, as_scores, read_cases

import unspool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NAMES = ("greedy", "greedy_multi_eos", "cfg_1.5", "cfg_negative", "dola_high", "dola_list")
GREEDY = [case for case in read_cases() if case.to_come is None and case.name in NAMES]


def load(case: Case, dtype: torch.dtype = torch.float32) -> unspool.LanguageModel:
    return unspool.load(GOLDENS / "models" / case.model, device="cuda", dtype=dtype)


@pytest.mark.parametrize("case", GREEDY, ids=str)
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_goldens_on_cuda(case: Case, kind: str) -> None:
    inputs = {name: torch.tensor(value) for name, value in case.inputs.items()}
    output = unspool.generate(
        load(case).model,
        **inputs,
        **case.settings,
        max_new_tokens=case.max_new_tokens,
        cache_implementation=kind,
        return_dict_in_generate=True,
        output_scores=True,
    )
    assert output.sequences.tolist() == case.expected["sequences"]
    if "scores_step3_row0" in case.expected:
        expected = as_scores(case.expected["scores_step3_row0"])
        torch.testing.assert_close(output.scores[3][0].cpu(), expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("case", [case for case in GREEDY if case.name == "greedy"], ids=str)
def test_half_precision_rows_alone_are_rows_in_the_batch(case: Case) -> None:
    """bfloat16 runs on every family; a row's first logits stay close to float32's."""
    inputs = {name: torch.tensor(value) for name, value in case.inputs.items()}
    settings = {"max_new_tokens": 4, "return_dict_in_generate": True, "output_scores": True}
    half = unspool.generate(load(case, torch.bfloat16).model, **inputs, **settings)
    full = unspool.generate(load(case).model, **inputs, **settings)
    assert half.sequences.shape == full.sequences.shape
    assert torch.isfinite(half.scores[0]).all()
    spread = full.scores[0].std()
    assert (half.scores[0] - full.scores[0]).abs().mean() < 0.1 * spread


def test_seeded_sampling_is_the_same_on_both_devices() -> None:
    case = replace(next(case for case in GREEDY if case.model == "llama"), name="sampled")
    inputs = {name: torch.tensor(value) for name, value in case.inputs.items()}
    settings = {"do_sample": True, "seed": 7, "max_new_tokens": 12, "num_return_sequences": 2}
    there = unspool.generate(load(case).model, **inputs, **settings)
    here = unspool.generate(unspool.load(GOLDENS / "models" / "llama", device="cpu").model, **inputs, **settings)
    assert there.tolist() == here.tolist()


@pytest.mark.parametrize("name", ["llama", "bloom", "gemma2"])
@pytest.mark.parametrize(
    "settings", [{}, {"num_beam_groups": 2, "diversity_penalty": 1.0}, {"force_words_ids": [[7, 9]]}], ids=str
)
def test_beams_are_the_same_on_both_devices(name: str, settings: dict[str, object]) -> None:
    ids = torch.randint(3, 160, (2, 6), generator=torch.Generator().manual_seed(0))
    common = {"num_beams": 4, "max_new_tokens": 20, **settings}
    folder = GOLDENS / "models" / name
    there = unspool.generate(unspool.load(folder, device="cuda").model, ids, **common)
    here = unspool.generate(unspool.load(folder, device="cpu").model, ids, **common)
    assert there.tolist() == here.tolist()

"""Transition scores: what the chosen tokens were worth, as the reference computes it."""

from __future__ import annotations

import pytest
import torch

import unspool
from tests.conformance.cases import GOLDENS, load_model, read_cases

INPUTS = next(case.inputs for case in read_cases() if case.model == "llama")
SETTINGS = {"return_dict_in_generate": True, "output_scores": True, "max_new_tokens": 8}


def run(**settings: object) -> unspool.GenerateDecoderOnlyOutput:
    inputs = {name: torch.tensor(value) for name, value in INPUTS.items()}
    output = unspool.generate(load_model("llama").model, **inputs, **SETTINGS, **settings)
    assert not isinstance(output, torch.Tensor)
    return output


def test_greedy_scores_are_those_of_the_likeliest_tokens() -> None:
    output = run()
    found = unspool.compute_transition_scores(output.sequences, output.scores)
    expected = torch.stack([step.max(dim=-1).values for step in output.scores], dim=1)
    torch.testing.assert_close(found, expected)
    normal = unspool.compute_transition_scores(output.sequences, output.scores, normalize_logits=True)
    assert bool((normal <= 0).all())


@pytest.mark.parametrize(
    "settings", [{}, {"length_penalty": 2.0}, {"eos_token_id": [2, 19, 67], "num_return_sequences": 3}]
)
def test_beam_scores_sum_to_the_sequences_scores(settings: dict[str, object]) -> None:
    output = run(num_beams=4, **settings)
    found = unspool.compute_transition_scores(output.sequences, output.scores, output.beam_indices)
    lengths = (output.beam_indices >= 0).sum(dim=1)
    penalty = float(settings.get("length_penalty", 1.0))
    torch.testing.assert_close(found.sum(dim=1) / lengths**penalty, output.sequences_scores, atol=1e-4, rtol=0)


def test_equals_the_reference() -> None:
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoModelForCausalLM.from_pretrained(GOLDENS / "models" / "llama")
    output = run(num_beams=3, num_return_sequences=2)
    for normalize in (False, True):
        expected = reference.compute_transition_scores(
            output.sequences, output.scores, output.beam_indices, normalize_logits=normalize
        )
        found = unspool.compute_transition_scores(output.sequences, output.scores, output.beam_indices, normalize)
        torch.testing.assert_close(found, expected)


def test_errors_say_what_is_missing() -> None:
    output = run(num_beams=2)
    with pytest.raises(unspool.InputError, match="beam_indices"):
        unspool.compute_transition_scores(output.sequences, output.scores)
    with pytest.raises(unspool.InputError, match="output_scores"):
        unspool.compute_transition_scores(output.sequences, ())


def test_a_beam_search_tells_the_prompts_logprobs_too() -> None:
    greedy, beams = run(prompt_logprobs=2), run(prompt_logprobs=2, num_beams=3)
    assert beams.prompt_logprobs is not None
    for mine, theirs in zip(beams.prompt_logprobs, greedy.prompt_logprobs, strict=True):
        assert mine == theirs and len(mine) > 1

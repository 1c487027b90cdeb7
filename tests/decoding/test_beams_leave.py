"""Searches that are over give their rows up; the others' answers and the numbers of beams stay what they were."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.conformance.cases import load_model


def count_rows(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of every pass to come."""
    seen: list[int] = []
    forward = model.forward

    def note(tokens: torch.Tensor, *rest: Any, **named: Any) -> Any:
        seen.append(tokens.shape[0])
        return forward(tokens, *rest, **named)

    monkeypatch.setattr(model, "forward", note)
    return seen


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_a_batch_is_its_prompts_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = load_model(name)
    generator = torch.Generator().manual_seed(7)
    prompts = [torch.randint(3, 160, (length,), generator=generator).tolist() for length in (5, 9, 3, 7, 12, 4)]
    # Many tokens end a text, so that searches are over at different steps.
    told: dict[str, Any] = {"num_beams": 3, "max_new_tokens": 12, "num_return_sequences": 2, "early_stopping": True}
    told["eos_token_id"] = list(range(2, 40))
    alone = [lm.generate([prompt], **told) for prompt in prompts]
    assert len({max(map(len, one.token_ids)) for one in alone}) > 1
    seen = count_rows(lm.model, monkeypatch)
    together = lm.generate(prompts, **told)
    assert together.token_ids == [ids for one in alone for ids in one.token_ids]
    assert together.finish_reasons == [reason for one in alone for reason in one.finish_reasons]
    assert max(seen) == 18 and min(seen[1:]) < 18 and sorted(seen[1:], reverse=True) == seen[1:]
    kept = lm.generate(prompts, **told, return_dict_in_generate=True, output_scores=True)
    assert kept.token_ids == together.token_ids
    plain = lm.generate(prompts, **told, return_dict_in_generate=True)
    assert torch.equal(plain.output.beam_indices, kept.output.beam_indices)

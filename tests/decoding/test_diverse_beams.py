"""Diverse beam search: groups that are chosen at once are those that are chosen in turn."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conformance.cases import load_model
from unspool.beams import BeamSearchScorer
from unspool.decoding.beams.scored import GroupBeams
from unspool.decoding.beams.selection import read_best, read_groups, select_groups
from unspool.decoding.beams.settings import BeamSettings
from unspool.decoding.scorer import Scorer
from unspool.logits import HammingDiversityLogitsProcessor

PROMPTS = [[5, 17, 90, 4], [40, 41], [100, 7, 8, 9, 60, 3]]
MANY_ENDS = list(range(2, 30))
SETTINGS: list[dict[str, Any]] = [
    {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5, "eos_token_id": None},
    {"num_beams": 6, "num_beam_groups": 3, "diversity_penalty": 1.5, "num_return_sequences": 6, "eos_token_id": 5},
    {"num_beams": 4, "num_beam_groups": 4, "diversity_penalty": 3.0, "eos_token_id": MANY_ENDS},
    {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.3, "logit_bias": {7: 3.0}, "eos_token_id": [9, 11]},
    {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.3, "guidance_scale": 1.4, "eos_token_id": 5},
]


@pytest.mark.parametrize("told", SETTINGS, ids=str)
@pytest.mark.parametrize("prompts", [PROMPTS, PROMPTS[:1]], ids=["three", "one"])
def test_groups_chosen_at_once(told: dict[str, Any], prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    lm, asked = load_model("llama"), {"max_new_tokens": 12, "return_dict_in_generate": True, **told}
    ways: list[str] = []
    for name in ("_choose_at_once", "_choose_in_turn"):
        choose = getattr(GroupBeams, name)
        monkeypatch.setattr(
            GroupBeams, name, lambda *args, choose=choose, name=name: ways.append(name) or choose(*args)
        )
    found = lm.generate(prompts, **asked)
    assert "_choose_at_once" in ways
    monkeypatch.setattr(Scorer, "diversity", None)
    ways.clear()
    expected = lm.generate(prompts, **asked)
    assert set(ways) == {"_choose_in_turn"}
    assert found.token_ids == expected.token_ids
    assert found.finish_reasons == expected.finish_reasons
    assert found.output.sequences.tolist() == expected.output.sequences.tolist()


@pytest.mark.parametrize("more", [{"output_scores": True}, {"repetition_penalty": 1.3}, {"return_beam_trace": True}])
def test_what_is_looked_at_is_chosen_in_turn(more: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GroupBeams, "_choose_at_once", lambda *_: pytest.fail("the scores are not what is looked at"))
    asked = {"return_dict_in_generate": True, "max_new_tokens": 4, **SETTINGS[0], **more}
    assert load_model("llama").generate(PROMPTS[0], **asked).output.sequences.shape[1] == 8


@settings(max_examples=60)
@given(st.data())
def test_selected_groups(data: st.DataObject) -> None:
    size, num_groups = data.draw(st.integers(1, 3)), data.draw(st.integers(2, 4))
    num_beams, vocab = size * num_groups, data.draw(st.sampled_from([6, 11, 200]))
    num_ends, num_prompts = data.draw(st.integers(0, 2)), data.draw(st.integers(1, 3))
    penalty = data.draw(st.sampled_from([0.1, 0.7, 5.0]))
    ends = tuple(range(3, 3 + num_ends))
    told = BeamSettings(num_beams, 1, 1.0, False, False, ends, 9, num_groups=num_groups)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1_000)))
    logprobs = (torch.randn(num_prompts * num_beams, vocab, generator=generator) * 2).log_softmax(-1)
    running = -torch.rand(len(logprobs), generator=generator)
    if vocab * size < (1 + num_ends) * size:
        return
    found = select_groups(logprobs, running, torch.tensor(ends), told, penalty, is_normalised=True)
    listed = read_groups(found.packed)
    diversity = HammingDiversityLogitsProcessor(penalty, num_beams, num_groups)
    judge = BeamSearchScorer(num_prompts, num_beams, "cpu", num_beam_groups=num_groups)
    current = torch.zeros(len(logprobs), dtype=torch.int64)
    for group in range(num_groups):
        rows = [prompt * num_beams + group * size + beam for prompt in range(num_prompts) for beam in range(size)]
        scores = diversity(current[:, None], logprobs[rows], current, group)
        count = told.count_candidates(size)
        expected = read_best(scores, running[rows], size, count)
        for prompt in range(num_prompts):
            tokens, beams, best = (part[prompt] for part in listed[group])
            assert [best, tokens, beams] == [part[prompt].tolist() for part in expected]
        told_ends = list(ends) or None
        verdict = judge.process(
            torch.zeros(len(rows), 1, dtype=torch.int64), *expected, pad_token_id=0, eos_token_id=told_ends,
            group_index=group, decoder_prompt_len=0,
        )  # fmt: skip
        current[rows] = verdict["next_beam_tokens"]
        assert found.tokens[rows].tolist() == verdict["next_beam_tokens"].tolist()
        assert found.running[rows].tolist() == verdict["next_beam_scores"].tolist()
        assert found.parents[rows].tolist() == [rows[beam] for beam in verdict["next_beam_indices"].tolist()]

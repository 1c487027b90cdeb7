"""`speculate="auto"` beside what no drafter goes with: nothing is drafted, and nothing refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.grammar.tiny import load_tiny
from unspool.errors import SettingError

PROMPTS = [[5, 6, 7, 8, 5, 6], [9, 9, 9]]
BESIDE: dict[str, dict[str, Any]] = {
    "guidance": {"guidance_scale": 1.5},
    "dola": {"dola_layers": "low"},
    "beams": {"num_beams": 3},
    "groups": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    "forced words": {"num_beams": 3, "force_words_ids": [[20]]},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 4},
    "mirostat": {"do_sample": True, "mirostat_tau": 3.0, "seed": [3, 4]},
    "no cache": {"use_cache": False},
}


@pytest.mark.parametrize("name", BESIDE)
def test_it_simply_does_not_draft(name: str) -> None:
    lm, told = load_tiny("llama"), {"max_new_tokens": 8, **BESIDE[name]}
    found = lm.generate(PROMPTS, speculate="auto", **told)
    assert found.token_ids == lm.generate(PROMPTS, **told).token_ids
    assert found.stats.speculation is None


def test_a_drafter_that_was_named_is_refused() -> None:
    for named in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": load_tiny("llama").model}):
        with pytest.raises(SettingError, match="does not go with a drafter"):
            load_tiny("llama").generate(PROMPTS, speculate="auto", num_beams=3, **named)


def test_alone_it_drafts() -> None:
    assert load_tiny("llama").generate(PROMPTS, speculate="auto", max_new_tokens=8).stats.speculation is not None

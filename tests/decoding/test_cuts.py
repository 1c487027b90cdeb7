"""What cuts a distribution beside what forbids tokens: as long as anything is allowed, something is written."""

from __future__ import annotations

import random
from typing import Any

import pytest

import unspool
from tests.grammar.tiny import load_tiny
from unspool.errors import NoTokenLeftError, SettingError, UnsupportedError

CUTTERS: dict[str, dict[str, Any]] = {
    "dola, low layers": {"dola_layers": "low"},
    "dola, one layer": {"dola_layers": [1]},
    "top_k": {"do_sample": True, "top_k": 1},
    "top_p": {"do_sample": True, "top_p": 0.01},
    "min_p": {"do_sample": True, "min_p": 0.99},
    "typical_p": {"do_sample": True, "typical_p": 0.01},
    "epsilon_cutoff": {"do_sample": True, "epsilon_cutoff": 0.9},
    "eta_cutoff": {"do_sample": True, "eta_cutoff": 0.9},
    "top_h": {"do_sample": True, "top_h": 0.05},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 2},
    "watermark": {"do_sample": True, "watermarking_config": unspool.WatermarkingConfig(bias=50.0)},
    "guidance": {"guidance_scale": 2.0},
    "drawn beams": {"num_beams": 3, "do_sample": True, "top_k": 1},
    "mirostat": {"do_sample": True, "mirostat_mode": 2, "mirostat_tau": 0.5},
}


def forbid(chosen: random.Random, vocab: int) -> dict[str, Any]:
    """A setting that leaves some tokens in every place."""
    allowed = chosen.sample(range(3, vocab), 25)
    rest = [token for token in range(3, vocab) if token not in allowed]
    return chosen.choice(
        [
            {"no_repeat_ngram_size": chosen.choice([1, 2])},
            {"bad_words_ids": [[token] for token in rest]},
            {"suppress_tokens": rest},
            {"begin_suppress_tokens": rest},
            {"min_new_tokens": 6},
            {"prefix_allowed_tokens_fn": lambda *_: allowed},
            {"encoder_no_repeat_ngram_size": 1},
            {"regex": "[a-z]{3,9}"},
        ]
    )


@pytest.mark.parametrize("cutter", CUTTERS)
def test_no_cut_leaves_only_what_is_forbidden(cutter: str) -> None:
    lm, chosen = load_tiny("llama"), random.Random(cutter)
    vocab = lm.model.info.vocab_size
    for number in range(12):
        asked = forbid(chosen, vocab) | (forbid(chosen, vocab) if number % 2 else {})
        prompt = [chosen.randrange(3, vocab) for _ in range(chosen.randint(2, 9))]
        told = {"max_new_tokens": 7, "eos_token_id": 2, "seed": number, **asked}
        try:
            found = lm.generate([prompt], **told, **CUTTERS[cutter])
        except NoTokenLeftError:
            with pytest.raises(NoTokenLeftError):  # nothing is allowed without the cut either
                lm.generate([prompt], **told)
            continue
        except (SettingError, UnsupportedError):
            continue  # the two don't go together
        text = found.token_ids[0]
        assert not set(text) & {token for (token,) in asked.get("bad_words_ids", [])}
        assert not set(text) & set(asked.get("suppress_tokens", []))
        if asked.get("no_repeat_ngram_size") == 1:
            assert len({*prompt, *text}) == len({*prompt}) + len(text)


@pytest.mark.parametrize("more", [{}, {"do_sample": True, "seed": 3}, {"return_dict_in_generate": True}])
def test_dola_goes_on_with_the_model_s_own_logits(more: dict[str, Any]) -> None:
    lm = load_tiny("llama")
    prompts = [[5, 6, 7, 8], [9, 9, 9], [100, 20, 100, 20, 100], [40]]
    told = {"dola_layers": "low", "no_repeat_ngram_size": 2, "max_new_tokens": 24, "eos_token_id": None, **more}
    alone = [lm.generate([prompt], **told).token_ids[0] for prompt in prompts]
    for prompt, text in zip(prompts, alone, strict=True):
        pairs = list(zip([*prompt, *text], [*prompt, *text][1:], strict=False))
        new = pairs[len(prompt) - 1 :]
        assert len(set(new)) == len(new)
    if "seed" not in more:
        assert lm.generate(prompts, **told).token_ids == alone
    observed = lm.trace([5, 6, 7, 8], **{name: value for name, value in told.items() if not name.startswith("return")})
    assert [event["id"] for event in observed if event["type"] == "token"] == alone[0]


def test_who_forbids_everything_is_named_not_the_cut() -> None:
    lm = load_tiny("llama")
    with pytest.raises(NoTokenLeftError, match=r"SuppressTokensLogitsProcessor \(\d+ tokens\) forbade all"):
        everything = list(range(lm.model.info.vocab_size))
        lm.generate([[5, 6]], dola_layers="low", suppress_tokens=everything, max_new_tokens=3)

"""Families that are unlike the usual decoder, against transformers' own generate; docs/adapters.md has their table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.models.adapters.unlike import FAMILIES, make_unlike

import unspool
from unspool.errors import SettingError, UnsupportedError

PAGE = Path(__file__).parents[3] / "docs" / "adapters.md"
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 5},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "groups": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.7},
    "forced words": {"num_beams": 4, "force_words_ids": [[[7]]]},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 4},
    "DoLa": {"dola_layers": "low"},
    "drafts, one row": {"num_assistant_tokens": 3},
    "drafts, rows": {"num_assistant_tokens": 3},
    "guidance": {"guidance_scale": 1.5},
}
NO_LAYERS = "an encoder's layers predict nothing"
NO_ROWS = "its inputs belong to the prompts"
REFUSED: dict[str, dict[str, str]] = {
    "xlnet": {
        "contrastive": "a state of the last token alone",
        "DoLa": "a state of the last token alone",
        "drafts, rows": "predicts once a pass",
        "guidance": NO_ROWS,
    },
    "openai-gpt": {"guidance": NO_ROWS},
    "ctrl": {},
    "xlm": {"drafts, rows": "predicts once a pass", "guidance": NO_ROWS},
    "git": {"guidance": NO_ROWS},
    "blip": {"guidance": NO_ROWS},
    "led": {"DoLa": NO_LAYERS, "guidance": "needs `negative_prompt_ids`"},
    "prophetnet": {
        "DoLa": NO_LAYERS,
        "drafts, one row": "reads one token at a time",
        "drafts, rows": "reads one token at a time",
        "guidance": "needs `negative_prompt_ids`",
    },
    "jamba": {"drafts, rows": "keeps states"},
    "bamba": {"drafts, rows": "keeps states"},
    "llava": {"guidance": NO_ROWS},
    "qwen2_vl": {"guidance": NO_ROWS},
}
SAME_AS_THEIRS = ("greedy", "beams")


def ask(name: str, way: str) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """The model, its inputs and the settings of a way to decode."""
    inputs = FAMILIES[name].inputs()
    is_compared = way in SAME_AS_THEIRS or way.startswith("drafts")
    settings = {"max_new_tokens": 4 if is_compared else 2, "do_sample": False, **WAYS[way]}
    if name != "blip":  # its own generate() sets it
        settings["eos_token_id"] = None
    model = make_unlike(name)
    if way.startswith("drafts"):  # its own, so that they are right
        settings["assistant_model"] = model.text_decoder if name == "blip" else model
    if way == "drafts, one row":
        inputs = {key: value[: value.shape[0] // 2] for key, value in inputs.items()}
    return model, inputs, settings


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", REFUSED)
def test_a_way_to_decode_runs_or_is_refused(name: str, way: str) -> None:
    model, inputs, settings = ask(name, way)
    if way in REFUSED[name]:
        reads = []
        handle = model.register_forward_pre_hook(lambda *_: reads.append(1))
        try:
            with pytest.raises((UnsupportedError, SettingError)):
                unspool.generate(model, **inputs, **settings)
        finally:
            handle.remove()
        assert not way.startswith("drafts") or not reads  # before the first pass
        return
    torch.manual_seed(0)
    found = unspool.generate(model, **inputs, **settings)
    assert isinstance(found, torch.Tensor) and found.shape[0] >= inputs["input_ids"].shape[0]
    if way in SAME_AS_THEIRS:
        assert torch.equal(found, model.generate(**inputs, **settings))
    if way.startswith("drafts"):
        plain = {key: value for key, value in settings.items() if "assistant" not in key}
        assert torch.equal(found, unspool.generate(model, **inputs, **plain))
    if way == "forced words":
        assert bool((found == 7).any(dim=-1).all())


@pytest.mark.parametrize("name", ["jamba", "xlnet", "xlm"])
def test_refused_drafts_leave_no_trace_in_states(name: str) -> None:
    """Drafts of the prompt's words are mostly wrong; the state goes back to before them."""
    model, inputs, settings = ask(name, "greedy")
    ids = inputs["input_ids"][:1] % 3 + 3
    expected = unspool.generate(model, ids, **settings)
    lookup = {"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 1, "return_dict_in_generate": True}
    output = unspool.generate(model, ids, **{**settings, "max_new_tokens": 12}, **lookup)
    assert torch.equal(output.sequences[:, : expected.shape[1]], expected)
    assert sum(output.stats.speculation.drafted) > sum(output.stats.speculation.accepted)


@pytest.mark.parametrize("name", ["ctrl", "jamba", "bamba"])
def test_guidance_compares_each_text_with_the_one_after_its_prompts_last_token(name: str) -> None:
    model, inputs, settings = ask(name, "guidance")
    width = inputs["input_ids"].shape[1]
    found = unspool.generate(model, **inputs, **settings)
    one = {"max_new_tokens": 1, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    texts = inputs["input_ids"]
    for _ in range(settings["max_new_tokens"]):
        own, other = (
            unspool.generate(model, text, attention_mask=torch.ones_like(text), **one).logits[0].log_softmax(-1)
            for text in (texts, texts[:, width - 1 :])
        )
        texts = torch.cat((texts, (other + 1.5 * (own - other)).argmax(-1, keepdim=True)), dim=1)
    assert torch.equal(found, texts)


def make_table() -> str:
    """The table of docs/adapters.md."""
    lines = ["| | " + " | ".join(WAYS) + " |", "|---" * (len(WAYS) + 1) + "|"]
    for name, refused in REFUSED.items():
        lines.append(f"| {name} | " + " | ".join(refused.get(way, "yes") for way in WAYS) + " |")
    return "\n".join(lines)


def test_the_page_has_the_table() -> None:
    assert make_table() in PAGE.read_text(encoding="utf-8")


# --- models whose class has a generate() of its own -----------------------------------------------------------


def test_settings_that_a_model_sets_itself_are_refused() -> None:
    with pytest.raises(SettingError, match="sets `eos_token_id` itself"):
        unspool.generate(make_unlike("blip"), **FAMILIES["blip"].inputs(), max_new_tokens=3, eos_token_id=5)


def test_a_decoding_loop_of_its_own_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="decoding loop of its own"):
        unspool.generate(make_unlike("musicgen").decoder, torch.full((8, 1), 32), max_new_tokens=3)


def test_transformers_own_generate_is_back_after_a_call() -> None:
    mixin: Any = transformers.GenerationMixin
    before = mixin.generate
    unspool.generate(make_unlike("blip"), **FAMILIES["blip"].inputs(), max_new_tokens=2)
    assert mixin.generate is before


def test_barks_codebooks_take_turns() -> None:
    """Its own generate() goes window by window and adds AlternatingCodebooksLogitsProcessor."""
    torch.manual_seed(0)
    config = transformers.BarkCoarseConfig(
        input_vocab_size=60, output_vocab_size=60, num_layers=2, num_heads=2, hidden_size=16, block_size=64
    )
    model: Any = transformers.BarkCoarseModel(config).eval()
    from transformers.models.bark.generation_configuration_bark import (
        BarkCoarseGenerationConfig,
        BarkSemanticGenerationConfig,
    )

    semantic = BarkSemanticGenerationConfig(semantic_vocab_size=20, semantic_pad_token=19, semantic_rate_hz=50)
    coarse = BarkCoarseGenerationConfig(
        coarse_semantic_pad_token=58,
        coarse_infer_token=59,
        coarse_rate_hz=50,
        n_coarse_codebooks=2,
        max_coarse_history=8,
        max_coarse_input_length=6,
        sliding_window_len=4,
    )
    coarse.do_sample = False

    def settings() -> dict[str, Any]:
        return {
            "semantic_output": torch.tensor([[3, 4, 5, 6, 7], [8, 9, 10, 11, 12]]),
            "semantic_generation_config": semantic,
            "coarse_generation_config": coarse,
            "codebook_size": 15,
        }

    for more in ({}, {"num_beams": 3}):
        found = unspool.generate(model, **settings(), **more)
        assert torch.equal(found, model.generate(**settings(), **more))
        assert bool((found[:, 0::2] < 35).all()) and bool((found[:, 1::2] >= 35).all())
        assert found.shape == (2, 10)

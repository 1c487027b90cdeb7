"""DoLa and guidance beside everything else: each pair works, or is refused with a reason before the first pass."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from tests.fakes import FakeEncoderDecoder, FakeLayers, FakeModel, make_tokenizer, pad_left
from unspool import UnbatchedClassifierFreeGuidanceLogitsProcessor, generate
from unspool.cache import DynamicCache
from unspool.errors import UnspoolError

PROMPT = [[3, 4], [5, 6]]
OUTPUT = {"return_dict_in_generate": True}
WORKS = "works"

# What is asked beside, and what DoLa and guidance say to it.
PAIRS: dict[str, tuple[dict[str, Any], str, str]] = {
    "sampling": ({"do_sample": True, "temperature": 2.0, "top_p": 0.9}, WORKS, WORKS),
    "sequences": ({"do_sample": True, "num_return_sequences": 2}, WORKS, WORKS),
    "beams": ({"num_beams": 2}, "not log-probabilities that beams could add up", WORKS),
    "beam sampling": ({"num_beams": 2, "do_sample": True}, "leave out `num_beams`", WORKS),
    "groups": ({"num_beams": 2, "num_beam_groups": 2, "diversity_penalty": 0.5}, "leave out `num_beams`", WORKS),
    "words": ({"num_beams": 2, "force_words_ids": [[7]]}, "leave out `num_beams`", WORKS),
    "processors": ({"repetition_penalty": 1.2, "no_repeat_ngram_size": 2, "bad_words_ids": [[4]]}, WORKS, WORKS),
    "custom processor": ({"logits_processor": [lambda ids, scores: scores.mul_(2)]}, WORKS, WORKS),
    "criteria": ({"stopping_criteria": [lambda ids, scores: ids[:, -1] == 4]}, WORKS, WORKS),
    "stop strings": ({"stop_strings": "e", "tokenizer": make_tokenizer()}, WORKS, WORKS),
    "healing": ({"token_healing": True, "tokenizer": make_tokenizer()}, WORKS, WORKS),
    "no cache": ({"use_cache": False}, WORKS, WORKS),
    "static cache": ({"cache_implementation": "static"}, WORKS, WORKS),
    "chunks": ({"prefill_chunk_size": 1}, WORKS, WORKS),
    "scores": ({**OUTPUT, "output_scores": True, "output_logits": True}, WORKS, WORKS),
    "states": ({**OUTPUT, "output_hidden_states": True, "output_attentions": True}, WORKS, WORKS),
    "logprobs": ({**OUTPUT, "logprobs": 1, "prompt_logprobs": 1}, WORKS, WORKS),
    "legacy cache": ({**OUTPUT, "return_legacy_cache": True}, WORKS, WORKS),
    "renormalised": ({"renormalize_logits": True}, WORKS, WORKS),
}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize(("method", "place"), [({"dola_layers": "high"}, 1), ({"guidance_scale": 1.5}, 2)])
def test_pairs(name: str, method: dict[str, Any], place: int) -> None:
    model = FakeLayers(160)
    settings, verdict = PAIRS[name][0], PAIRS[name][place]
    if verdict == WORKS:
        found = generate(model, PROMPT, max_new_tokens=4, seed=1, **method, **settings)
        sequences = found if isinstance(found, torch.Tensor) else found.sequences
        copies = settings.get("num_return_sequences", 1)
        assert sequences.shape[0] == 2 * copies and sequences.shape[1] > 2
        if name not in ("stop strings", "criteria"):
            assert sequences.shape[1] == 6
        if "guidance_scale" in method and not settings.get("do_sample"):
            for row, prompt in enumerate(PROMPT):  # and the neighbours don't matter
                alone = generate(model, [prompt], max_new_tokens=4, **method, **settings)
                ids = alone if isinstance(alone, torch.Tensor) else alone.sequences
                num_new = ids.shape[1] - 2
                assert ids[0, 2:].tolist() == sequences[row, 2 : 2 + num_new].tolist()
        return
    with pytest.raises(UnspoolError, match=re.escape(verdict)):
        generate(model, PROMPT, max_new_tokens=4, **method, **settings)
    assert model.num_passes == 0


def held(model: FakeModel) -> DynamicCache:
    cache = DynamicCache()
    model.forward(torch.tensor([[3], [5]]), cache)
    model.num_passes = 0
    return cache


NEGATIVE = {"negative_prompt_ids": [[4, 5], [6, 7]]}
EMBEDS = torch.ones(2, 3, 4)
SOURCE = {"decoder_start_token_id": 1}
REFUSED: dict[str, tuple[type[FakeModel], dict[str, Any], str]] = {
    "dola and guidance": (FakeLayers, {"dola_layers": [1], "guidance_scale": 2.0}, "differences between layers"),
    "dola without early logits": (FakeModel, {"dola_layers": "low"}, "this model can't return them"),
    "dola with an encoder": (FakeEncoderDecoder, {**SOURCE, "dola_layers": "low"}, "decoder-only models"),
    "last layer": (FakeLayers, {"dola_layers": [1, 6]}, "names layer 6, which is the model's last"),
    "no such layer": (FakeLayers, {"dola_layers": [9]}, "names layer 9, and the model has 6 layers"),
    "no layers": (FakeLayers, {"dola_layers": []}, "`dola_layers`"),
    "a word": (FakeLayers, {"dola_layers": "middle"}, "`dola_layers`"),
    "nan": (FakeModel, {"guidance_scale": float("nan")}, "`guidance_scale`"),
    "infinite": (FakeModel, {"guidance_scale": float("inf")}, "`guidance_scale`"),
    "no scale": (FakeModel, NEGATIVE, "add guidance_scale"),
    "mask alone": (
        FakeModel,
        {"guidance_scale": 2.0, "negative_prompt_attention_mask": [[1], [1]]},
        "without negative_prompt_ids",
    ),
    "rows": (FakeModel, {"guidance_scale": 2.0, "negative_prompt_ids": [[1]] * 3}, "3 rows for 2 prompts"),
    "ids": (FakeModel, {"guidance_scale": 2.0, "negative_prompt_ids": [[999]]}, "negative_prompt_ids holds the id 999"),
    "empty": (FakeModel, {"guidance_scale": 2.0, "negative_prompt_ids": [[]]}, "negative_prompt_ids is empty"),
    "zeros": (
        FakeModel,
        {"guidance_scale": 2.0, **NEGATIVE, "negative_prompt_attention_mask": [[1, 1], [0, 0]]},
        "row 1 is empty: its negative_prompt_attention_mask has no ones",
    ),
    "mask of another shape": (
        FakeModel,
        {"guidance_scale": 2.0, **NEGATIVE, "negative_prompt_attention_mask": [[1], [1]]},
        "negative_prompt_attention_mask has the shape (2, 1)",
    ),
    "an encoder without": (FakeEncoderDecoder, {**SOURCE, "guidance_scale": 2.0}, "pass negative_prompt_ids"),
    "a processor too": (
        FakeModel,
        {"guidance_scale": 2.0, "logits_processor": [UnbatchedClassifierFreeGuidanceLogitsProcessor(2.0, None)]},
        "the same thing twice",
    ),
    "embeddings alone": (
        FakeModel,
        {"inputs": None, "inputs_embeds": EMBEDS, "guidance_scale": 2.0},
        "starts from the prompt's last token, and inputs_embeds have none",
    ),
    "embeddings and states": (
        FakeModel,
        {
            "inputs": None,
            "inputs_embeds": EMBEDS,
            "guidance_scale": 2.0,
            **NEGATIVE,
            **OUTPUT,
            "output_hidden_states": True,
        },
        "read in two passes",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_not_be_is_told_before_the_first_pass(name: str) -> None:
    kind, settings, told = REFUSED[name]
    model = kind()
    with pytest.raises(UnspoolError, match=re.escape(told)):
        generate(model, **{"inputs": PROMPT, "max_new_tokens": 4} | settings)
    assert model.num_passes == 0


def test_caches_of_the_callers() -> None:
    model = FakeModel()
    small = model.new_cache("static", 2, 20)
    with pytest.raises(UnspoolError, match="room for 2 rows, and guidance reads 4"):
        generate(model, PROMPT, past_key_values=small, guidance_scale=2.0, max_new_tokens=3)
    assert model.num_passes == 0
    plain = generate(model, PROMPT, guidance_scale=2.0, max_new_tokens=3)
    assert torch.equal(
        generate(model, PROMPT, past_key_values=held(model), guidance_scale=2.0, max_new_tokens=3), plain
    )


def test_the_negative_prompt_must_fit_the_context() -> None:
    model = FakeModel(max_context=10)
    long = pad_left([[4] * 8])["input_ids"]
    settings = {"guidance_scale": 2.0, "negative_prompt_ids": long}
    with pytest.raises(UnspoolError, match=r"a negative prompt of 8, and the model's context ends at 10.*=2` fit"):
        generate(model, PROMPT, **settings, max_new_tokens=3)
    assert model.num_passes == 0
    assert generate(model, PROMPT, **settings).shape == (2, 4)  # a default is cut

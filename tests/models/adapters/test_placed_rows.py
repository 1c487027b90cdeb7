"""Moshi keeps the sound of every row in the model itself, so that each row has to keep its place."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import transformers

import unspool
from unspool.errors import SettingError, UnsupportedError

MIMI = {
    "model_type": "mimi",
    "hidden_size": 32,
    "num_filters": 8,
    "num_residual_layers": 1,
    "upsampling_ratios": [8, 4],
    "codebook_size": 64,
    "vector_quantization_hidden_dimension": 64,
    "codebook_dim": 64,
    "upsample_groups": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "sliding_window": 3,
    "sampling_rate": 800,
}
DEPTH = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "max_position_embeddings": 5,
    "num_attention_heads": 2,
    "ffn_dim": 16,
    "sliding_window": 4,
}
NEW: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "return_audio_waveforms": False}


@cache
def make_moshi() -> Any:
    torch.manual_seed(3)
    config = transformers.MoshiConfig(
        vocab_size=60,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        ffn_dim=32,
        max_position_embeddings=64,
        audio_vocab_size=64,
        num_codebooks=4,
        pad_token_id=25,
        bos_token_id=25,
        audio_encoder_config=MIMI,
        depth_decoder_config=DEPTH,
    )
    model: Any = transformers.MoshiForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)
    model.generation_config.eos_token_id = None
    return model


def make_inputs(rows: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(0, 25, (2, 7), generator=generator)
    codes = torch.randint(0, 64, (2, 4, 7), generator=generator)
    made = {"input_ids": ids, "moshi_audio_codes": codes, "user_audio_codes": codes.flip(-1)}
    made["attention_mask"] = torch.ones_like(ids)
    return {name: value[:rows].clone() for name, value in made.items()}


@pytest.mark.parametrize("ends", [False, True])
def test_a_row_that_ends_stays_where_it_is(ends: bool) -> None:
    """The last frame of sound is made after the last pass, of the state that the model keeps of it."""
    model = make_moshi()
    end = int(model.generate(**make_inputs(2), **NEW)[1, -4]) if ends else None
    told = {**NEW, "eos_token_id": end, "return_audio_codes": True}
    expected, found = model.generate(**make_inputs(2), **told), ours(model, **make_inputs(2), **told)
    assert torch.equal(found.sequences, expected.sequences)
    assert torch.equal(found.audio_codes, expected.audio_codes)


def ours(model: Any, **given: Any) -> Any:
    return unspool.generate(model, **given)


def test_beams_go_on_from_their_own_states() -> None:
    """A beam's score is that of its text alone, written by force. transformers' is another row's now and then."""
    model, told = make_moshi(), {**NEW, "return_dict_in_generate": True, "output_logits": True}
    found = ours(model, **make_inputs(1), **told, num_beams=3, num_return_sequences=3, length_penalty=0.0)
    for sequence, score in zip(found.sequences, found.sequences_scores, strict=True):

        def force(_: int, ids: torch.Tensor, text: torch.Tensor = sequence) -> list[int]:
            return [int(text[ids.shape[0]])]

        alone = model.generate(**make_inputs(1), **told, prefix_allowed_tokens_fn=force)
        assert torch.equal(alone.sequences[0], sequence)
        new = sequence[-len(alone.logits) :]
        steps = [logits.log_softmax(-1)[0, token] for logits, token in zip(alone.logits, new, strict=True)]
        torch.testing.assert_close(sum(steps), score, rtol=1e-4, atol=1e-4)


def test_what_would_be_tried_in_other_rows_is_refused() -> None:
    model = make_moshi()
    with pytest.raises(UnsupportedError, match="tries tokens in rows of their own, and Moshi"):
        unspool.generate(model, **make_inputs(1), **NEW, penalty_alpha=0.6, top_k=3)
    with pytest.raises(SettingError, match="keeps what it makes of each row itself, so it can't check several tokens"):
        unspool.generate(model, **make_inputs(1), **NEW, prompt_lookup_num_tokens=3)

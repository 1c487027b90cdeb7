"""CSM chooses a frame of codebooks a step, by a loop of its own, which unspool.generate prepares and runs."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import transformers

import unspool
from unspool.errors import SettingError, UnsupportedError

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 40,
    "num_codebooks": 4,
    "vocab_size": 9,
}
NEW = {"max_new_tokens": 5, "do_sample": False}


@cache
def make_csm() -> Any:
    torch.manual_seed(3)
    config = transformers.CsmConfig(
        **SIZES,
        text_vocab_size=40,
        bos_token_id=1,
        pad_token_id=2,
        eos_token_id=3,
        codebook_pad_token_id=2,
        codebook_eos_token_id=3,
        initializer_range=0.5,
        depth_decoder_config={**SIZES, "backbone_hidden_size": 32, "max_position_embeddings": 4},
        codec_config={
            "model_type": "mimi",
            "hidden_size": 16,
            "num_filters": 4,
            "num_residual_layers": 1,
            "upsampling_ratios": [4, 2],
            "codebook_size": 16,
            "codebook_dim": 16,
            "vector_quantization_hidden_dimension": 16,
            "upsample_groups": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "intermediate_size": 16,
            "head_dim": 8,
            "sliding_window": 4,
        },
    )
    return transformers.CsmForConditionalGeneration(config).eval()


def draw_frames() -> torch.Tensor:
    return torch.randint(4, 9, (2, 6, 4), generator=torch.Generator().manual_seed(1))


@pytest.mark.filterwarnings("ignore")  # of what its config says of tokens
def test_its_loop_is_run() -> None:
    model, frames = make_csm(), draw_frames()
    expected = model.generate(input_ids=frames, **NEW)
    assert torch.equal(unspool.generate(model, input_ids=frames, **NEW), expected)
    ours = unspool.GenerationConfig(max_new_tokens=5)
    assert torch.equal(unspool.generate(model, input_ids=frames, generation_config=ours), expected)
    output = unspool.generate(model, input_ids=frames, **NEW, return_dict_in_generate=True, output_scores=True)
    assert torch.equal(output.sequences, expected) and len(output.scores) == 5


@pytest.mark.filterwarnings("ignore")
def test_what_its_loop_does_not_read_is_refused() -> None:
    model, frames = make_csm(), draw_frames()
    with pytest.raises(SettingError, match="seed"):
        unspool.generate(model, input_ids=frames, **NEW, seed=3)
    with pytest.raises((SettingError, UnsupportedError, ValueError)):
        unspool.generate(model, input_ids=frames, **NEW, num_beams=2)
    with pytest.raises(UnsupportedError, match="decoding loop of its own"):
        unspool.stream(model, input_ids=frames, **NEW)

"""A tiny Whisper with random weights, and the settings that a real one's file has."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers

WINDOW = 60  # frames
FIRST_STAMP = 61
WORDS = [f" w{index}" for index in range(50)]
NEVER = {"eos_token_id": 50, "pad_token_id": 50, "bos_token_id": 50}


@cache
def make_whisper(seed: int = 0, scale: float = 0.35, **sizes: int) -> Any:
    """A model of three languages whose window is 0.6 s long; `sizes` are entries of its config."""
    torch.manual_seed(seed)
    usual = {
        "vocab_size": FIRST_STAMP + WINDOW // 2 + 1,
        "num_mel_bins": 16,
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
        "max_source_positions": WINDOW // 2,
        "max_target_positions": 48,
    }
    config = transformers.WhisperConfig(
        **{**usual, **sizes},
        decoder_start_token_id=51,
        init_std=scale,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        **NEVER,
    )
    model = transformers.WhisperForConditionalGeneration(config).eval()
    model.generation_config = transformers.GenerationConfig(
        **NEVER,
        decoder_start_token_id=51,
        max_length=48,
        suppress_tokens=[1, 2, 51, 58, 59],
        begin_suppress_tokens=[3, 50],
    )
    extra = {
        "lang_to_id": {"<|en|>": 52, "<|de|>": 53, "<|fr|>": 54},
        "task_to_id": {"translate": 55, "transcribe": 56},
        "is_multilingual": True,
        "no_timestamps_token_id": 60,
        "prev_sot_token_id": 58,
        "max_initial_timestamp_index": 5,
        "return_timestamps": False,
        "alignment_heads": [[0, 1], [1, 0], [1, 3]],
    }
    for name, value in extra.items():
        setattr(model.generation_config, name, value)
    return model


@cache
def distil(seed: int) -> Any:
    """A draft model for `make_whisper(seed)`: its encoder, and a decoder of its first layer, a little off."""
    model, draft = make_whisper(seed), make_whisper(seed, decoder_layers=1)
    draft.load_state_dict(model.state_dict(), strict=False)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in draft.model.decoder.layers.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return draft


@cache
def distil_decoder(seed: int) -> Any:
    """The decoder of `distil(seed)` alone, as distilled Whispers are loaded to draft."""
    whole = distil(seed)
    config = transformers.WhisperConfig(**whole.config.to_dict())
    half = transformers.WhisperForCausalLM(config).eval()
    half.load_state_dict(whole.state_dict(), strict=False)
    return half


def draw_features(rows: int, frames: int, seed: int = 0) -> torch.Tensor:
    """Random features (rows, mels, frames)."""
    return torch.randn(rows, 16, frames, generator=torch.Generator().manual_seed(seed))


def save_speech_model(folder: Path) -> None:
    """Write the tiny model with a tokenizer whose tokens are words."""
    make_whisper(1).save_pretrained(folder)
    marks = [f"<|{index}|>" for index in range(50, FIRST_STAMP)]
    stamps = [f"<|{index * 0.02:.2f}|>" for index in range(WINDOW // 2 + 1)]
    vocabulary = {word: index for index, word in enumerate([*WORDS, *marks, *stamps])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=" w0"))
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.add_special_tokens(marks)
    tokenizer.save(str(folder / "tokenizer.json"))

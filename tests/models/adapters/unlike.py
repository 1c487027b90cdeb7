"""Tiny random models of families that are unlike the usual decoder: no cache, states, pictures, codebooks."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import transformers

IDS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
PAIR: dict[str, Any] = {
    "vocab_size": 60,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "decoder_start_token_id": 2,
    **IDS,
}
VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
TEXT: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    **IDS,
}
IMAGE = 55  # the token whose embeddings are a picture's


@dataclass(frozen=True)
class Unlike:
    """A family: how its model is made, and what it reads."""

    make: Callable[[], Any]
    inputs: Callable[[], dict[str, torch.Tensor]]
    num_rows: int = 2


def _draw(rows: int, width: int, vocab_size: int = 50) -> torch.Tensor:
    return torch.randint(3, vocab_size, (rows, width), generator=torch.Generator().manual_seed(4))


def _read_tokens(width: int = 7) -> dict[str, torch.Tensor]:
    ids = _draw(2, width)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _draw_pixels(rows: int = 2) -> torch.Tensor:
    return torch.randn(rows, 3, 8, 8, generator=torch.Generator().manual_seed(6))


def _read_picture() -> dict[str, torch.Tensor]:
    return {"pixel_values": _draw_pixels(), **_read_tokens(3)}


def _make_xlnet() -> Any:
    config = transformers.XLNetConfig(vocab_size=60, d_model=16, n_layer=2, n_head=2, d_inner=24, **IDS)
    return transformers.XLNetLMHeadModel(config)


def _make_openai_gpt() -> Any:
    config = transformers.OpenAIGPTConfig(vocab_size=60, n_positions=64, n_embd=16, n_layer=2, n_head=2, **IDS)
    return transformers.OpenAIGPTLMHeadModel(config)


def _make_ctrl() -> Any:
    config = transformers.CTRLConfig(vocab_size=60, n_positions=64, n_embd=16, dff=24, n_layer=2, n_head=2, **IDS)
    return transformers.CTRLLMHeadModel(config)


def _make_xlm() -> Any:
    config = transformers.XLMConfig(
        vocab_size=60, emb_dim=16, n_layers=2, n_heads=2, n_langs=1, max_position_embeddings=64, mask_token_id=5, **IDS
    )
    return transformers.XLMWithLMHeadModel(config)


def _make_git() -> Any:
    config = transformers.GitConfig(vision_config={**VISION, "num_channels": 3}, **TEXT)
    return transformers.GitForCausalLM(config)


def _make_blip() -> Any:
    text = {**TEXT, "encoder_hidden_size": 16, "projection_dim": 16, "sep_token_id": 59}
    config = transformers.BlipConfig(
        text_config=text, vision_config={**VISION, "projection_dim": 16}, projection_dim=16
    )
    return transformers.BlipForConditionalGeneration(config)


def _make_led() -> Any:
    settings = {name: value for name, value in PAIR.items() if name != "max_position_embeddings"}
    positions = {
        "max_encoder_position_embeddings": 64,
        "max_decoder_position_embeddings": 64,
        "attention_window": [4, 4],
    }
    return transformers.LEDForConditionalGeneration(transformers.LEDConfig(**settings, **positions))


def _make_prophetnet() -> Any:
    config = transformers.ProphetNetConfig(
        vocab_size=60,
        hidden_size=16,
        encoder_ffn_dim=24,
        num_encoder_layers=2,
        num_encoder_attention_heads=2,
        decoder_ffn_dim=24,
        num_decoder_layers=2,
        num_decoder_attention_heads=2,
        max_position_embeddings=64,
        ngram=2,
        num_buckets=8,
        relative_max_distance=16,
        decoder_start_token_id=2,
        **IDS,
    )
    return transformers.ProphetNetForConditionalGeneration(config)


def _make_jamba() -> Any:
    config = transformers.JambaConfig(
        **TEXT,
        num_key_value_heads=2,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=2,
        num_experts_per_tok=1,
        use_mamba_kernels=False,
        mamba_d_state=4,
        mamba_d_conv=3,
        mamba_dt_rank=4,
    )
    return transformers.JambaForCausalLM(config)


def _make_bamba() -> Any:
    config = transformers.BambaConfig(
        **TEXT,
        num_key_value_heads=2,
        attn_layer_indices=[1],
        mamba_n_heads=4,
        mamba_d_head=8,
        mamba_n_groups=1,
        mamba_d_state=4,
        mamba_d_conv=3,
        mamba_expand=2,
        mamba_chunk_size=4,
    )
    return transformers.BambaForCausalLM(config)


def _make_llava() -> Any:
    text = transformers.LlamaConfig(**TEXT, num_key_value_heads=2)
    vision = transformers.CLIPVisionConfig(**VISION, projection_dim=16)
    config = transformers.LlavaConfig(
        text_config=text, vision_config=vision, image_token_index=IMAGE, image_seq_length=4, vision_feature_layer=-1
    )
    return transformers.LlavaForConditionalGeneration(config)


def _read_llava() -> dict[str, torch.Tensor]:
    ids = _draw(2, 10)
    ids[:, 1:5] = IMAGE
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": _draw_pixels()}


def _make_qwen2_vl() -> Any:
    vision = {"depth": 2, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4}
    vision |= {"spatial_merge_size": 1, "temporal_patch_size": 1, "in_channels": 3}
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10_000.0}
    text = {**TEXT, "num_key_value_heads": 2, "rope_parameters": rope}
    config = transformers.Qwen2VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=56,
        vision_start_token_id=57,
        vision_end_token_id=58,
    )
    return transformers.Qwen2VLForConditionalGeneration(config)


def _read_qwen2_vl() -> dict[str, torch.Tensor]:
    ids = _draw(2, 10)
    ids[:, 1], ids[:, 2:6], ids[:, 6] = 57, IMAGE, 58
    patches = torch.randn(8, 48, generator=torch.Generator().manual_seed(6))
    kinds = (ids == IMAGE).long()
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": patches,
        "image_grid_thw": torch.tensor([[1, 2, 2], [1, 2, 2]]),
        "mm_token_type_ids": kinds,
    }


SOUND: dict[str, Any] = {
    "num_filters": 4,
    "hidden_size": 16,
    "codebook_size": 32,
    "codebook_dim": 16,
    "upsampling_ratios": [4, 2],
    "num_lstm_layers": 1,
    "target_bandwidths": [48.0],
    "sampling_rate": 16_000,
}
CODES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "ffn_dim": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_codebooks": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 32,
    "bos_token_id": 32,
    "eos_token_id": None,
}


def _make_musicgen(kind: str = "Musicgen", **more: Any) -> Any:
    text = transformers.T5Config(vocab_size=60, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2)
    decoder = getattr(transformers, f"{kind}DecoderConfig")(**CODES, **more)
    config = getattr(transformers, f"{kind}Config")(
        text_encoder=text, audio_encoder=transformers.EncodecConfig(**SOUND), decoder=decoder
    )
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    model.generation_config.update(pad_token_id=32, bos_token_id=32, decoder_start_token_id=32, eos_token_id=None)
    for layer in model.audio_encoder.quantizer.layers:  # or every code is the same sound
        layer.codebook.embed.normal_()
    return model


FAMILIES: dict[str, Unlike] = {
    "xlnet": Unlike(_make_xlnet, _read_tokens),
    "openai-gpt": Unlike(_make_openai_gpt, _read_tokens),
    "ctrl": Unlike(_make_ctrl, _read_tokens),
    "xlm": Unlike(_make_xlm, _read_tokens),
    "git": Unlike(_make_git, _read_picture),
    "blip": Unlike(_make_blip, _read_picture),
    "led": Unlike(_make_led, _read_tokens),
    "prophetnet": Unlike(_make_prophetnet, _read_tokens),
    "jamba": Unlike(_make_jamba, _read_tokens),
    "bamba": Unlike(_make_bamba, _read_tokens),
    "llava": Unlike(_make_llava, _read_llava),
    "qwen2_vl": Unlike(_make_qwen2_vl, _read_qwen2_vl),
    "musicgen": Unlike(_make_musicgen, _read_tokens),
    "musicgen_stereo": Unlike(partial(_make_musicgen, audio_channels=2), _read_tokens),
    "musicgen_melody": Unlike(partial(_make_musicgen, "MusicgenMelody"), _read_tokens),
}


@cache
def make_unlike(name: str) -> Any:
    """The family's model with random weights whose answers depend on everything that it reads."""
    torch.manual_seed(3)
    model = FAMILIES[name].make()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    return model.eval()

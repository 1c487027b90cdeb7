"""Folders of tiny random models that write sound."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tests.models.adapters.pictured import make_tokenizer
from tests.models.adapters.test_own_loop import make_csm
from tests.models.adapters.unlike import SOUND, make_unlike
from transformers.models.bark.generation_configuration_bark import BarkGenerationConfig


def save_voice(name: str, folder: Path) -> Path:
    """A folder with a model and what reads its texts."""
    torch.manual_seed(0)
    _MAKERS[name](folder)
    return folder


def _save_musicgen(folder: Path) -> None:
    make_unlike("musicgen").save_pretrained(folder)
    make_tokenizer([], None, size=60).save_pretrained(folder)


def _save_vits(folder: Path) -> None:
    config = transformers.VitsConfig(
        vocab_size=300,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        ffn_dim=24,
        flow_size=16,
        spectrogram_bins=9,
        duration_predictor_filter_channels=16,
        prior_encoder_num_flows=1,
        prior_encoder_num_wavenet_layers=1,
        posterior_encoder_num_wavenet_layers=1,
        wavenet_dilation_rate=1,
        depth_separable_num_layers=1,
        duration_predictor_num_flows=2,
        upsample_initial_channel=16,
        upsample_rates=[4, 2],
        upsample_kernel_sizes=[8, 4],
        resblock_kernel_sizes=[3],
        resblock_dilation_sizes=[[1, 3]],
        sampling_rate=8_000,
    )
    transformers.VitsModel(config).eval().save_pretrained(folder)
    make_tokenizer([], None).save_pretrained(folder)


def _save_speecht5(folder: Path) -> None:
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = transformers.SpeechT5Config(
        vocab_size=300,
        hidden_size=16,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        num_mel_bins=8,
        speech_decoder_prenet_units=8,
        speech_decoder_postnet_layers=1,
        speech_decoder_postnet_units=8,
        speaker_embedding_dim=4,
        max_speech_positions=64,
        **sizes,
    )
    transformers.SpeechT5ForTextToSpeech(config).eval().save_pretrained(folder)
    make_tokenizer([], None).save_pretrained(folder)
    vocoder = transformers.SpeechT5HifiGanConfig(
        model_in_dim=8,
        sampling_rate=16_000,
        upsample_initial_channel=8,
        upsample_rates=[4, 2],
        upsample_kernel_sizes=[8, 4],
        resblock_kernel_sizes=[3],
        resblock_dilation_sizes=[[1, 3]],
    )
    transformers.SpeechT5HifiGan(vocoder).eval().save_pretrained(folder / "vocoder")


def _save_bark(folder: Path) -> None:
    part: dict[str, Any] = {"block_size": 640, "num_layers": 1, "num_heads": 2, "hidden_size": 16}
    config = transformers.BarkConfig(
        semantic_config={**part, "input_vocab_size": 600, "output_vocab_size": 600},
        coarse_acoustics_config={**part, "input_vocab_size": 700, "output_vocab_size": 700},
        fine_acoustics_config={
            **part,
            "input_vocab_size": 65,
            "output_vocab_size": 65,
            "n_codes_total": 4,
            "n_codes_given": 1,
        },
        codec_config=transformers.EncodecConfig(**SOUND).to_dict(),
    )
    model = transformers.BarkModel(config).eval()
    settings = BarkGenerationConfig(
        semantic_config={
            "eos_token_id": 50,
            "text_encoding_offset": 100,
            "text_pad_token": 500,
            "semantic_infer_token": 510,
            "semantic_vocab_size": 50,
            "max_input_semantic_length": 16,
            "max_new_tokens": 4,
        },
        coarse_acoustics_config={
            "coarse_semantic_pad_token": 600,
            "coarse_infer_token": 601,
            "max_coarse_input_length": 16,
            "max_coarse_history": 16,
            "sliding_window_len": 8,
        },
        fine_acoustics_config={"max_fine_history_length": 16, "max_fine_input_length": 32, "n_fine_codebooks": 4},
        codebook_size=32,
        sample_rate=16_000,
    )
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps(settings.to_dict()))
    make_tokenizer([], None).save_pretrained(folder)


def _save_csm(folder: Path) -> None:
    model = make_csm()
    model.config.codec_config.sampling_rate = 16_000
    model.save_pretrained(folder)
    tokenizer = make_tokenizer(["<|AUDIO|>", "<|audio_eos|>"], None, size=40)
    features = transformers.EncodecFeatureExtractor(feature_size=1, sampling_rate=16_000)
    transformers.CsmProcessor(feature_extractor=features, tokenizer=tokenizer).save_pretrained(folder)


_MAKERS = {
    "musicgen": _save_musicgen,
    "vits": _save_vits,
    "speecht5": _save_speecht5,
    "bark": _save_bark,
    "csm": _save_csm,
}

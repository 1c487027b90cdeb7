"""Whisper in CTranslate2's format (model.bin, as faster-whisper uses it), rewritten as a folder in the hub's layout."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Final

from unspool.errors import LoadError, UnsupportedError
from unspool.loading.conversion.ctranslate2 import (
    ENDS,
    Variables,
    count_layers,
    read_flag,
    read_variables,
    rename_layers,
)
from unspool.loading.conversion.folder import write_model
from unspool.small_files import read_json_object

_LANGUAGES_FROM = 51865  # tokens of a vocabulary with languages
_MAPPED: Final = {
    "encoder/conv1": "encoder.conv1",
    "encoder/conv2": "encoder.conv2",
    "encoder/layer_norm": "encoder.layer_norm",
    "decoder/layer_norm": "decoder.layer_norm",
}


def convert_whisper(source: Path, target: Path) -> None:
    """Write the model of `source` (model.bin, config.json, tokenizer.json) to `target` in the hub's layout."""
    variables = read_variables(source / "model.bin", "WhisperSpec")
    named = _rename(variables)
    given = read_json_object(source / "config.json")
    config = _describe(named, variables)
    tensors = {f"model.{name}": values for name, values in named.items()}
    write_model(target, tensors, config, _describe_generation(config, given))
    shutil.copyfile(source / "tokenizer.json", target / "tokenizer.json")


def _rename(variables: Variables) -> Variables:
    named = rename_layers(variables)
    for name in [
        name for name in named if name.endswith(".k_proj.bias")
    ]:  # Whisper has none: they are written as zeros
        del named[name]
    for name, values in variables.items():
        *path, end = name.split("/")
        if path[-1:] == ["position_encodings"]:
            named[f"{path[0]}.embed_positions.weight"] = values
        elif path == ["decoder", "embeddings"]:
            named["decoder.embed_tokens.weight"] = values
        elif "/".join(path) in _MAPPED and end in ENDS:
            named[f"{_MAPPED['/'.join(path)]}.{ENDS[end]}"] = values
    return named


def _describe(named: Variables, variables: Variables) -> dict[str, Any]:
    try:
        vocab_size, width = named["decoder.embed_tokens.weight"].shape
        mels = named["encoder.conv1.weight"].shape[1]
        sources, targets = (named[f"{side}.embed_positions.weight"].shape[0] for side in ("encoder", "decoder"))
        heads = read_flag(variables, "decoder/num_heads") or width // 64
        ffn_sizes = [named[f"{side}.layers.0.fc1.weight"].shape[0] for side in ("encoder", "decoder")]
    except (KeyError, ValueError, IndexError) as error:
        raise LoadError(f"the model.bin is not that of a Whisper: {error}") from error
    first = 50257 if vocab_size >= _LANGUAGES_FROM else 50256  # the end of a text; markers follow it
    return {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "is_encoder_decoder": True,
        "vocab_size": vocab_size,
        "num_mel_bins": mels,
        "d_model": width,
        "encoder_layers": count_layers(named, "encoder"),
        "decoder_layers": count_layers(named, "decoder"),
        "encoder_attention_heads": heads,
        "decoder_attention_heads": heads,
        "encoder_ffn_dim": ffn_sizes[0],
        "decoder_ffn_dim": ffn_sizes[1],
        "max_source_positions": sources,
        "max_target_positions": targets,
        "activation_function": "gelu",
        "scale_embedding": False,
        "tie_word_embeddings": True,
        "bos_token_id": first,
        "eos_token_id": first,
        "pad_token_id": first,
        "decoder_start_token_id": first + 1,
    }


def _describe_generation(config: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """The settings of the reference's file, from the markers' order: start, languages, tasks, …, no timestamps."""
    is_multilingual = config["vocab_size"] >= _LANGUAGES_FROM
    if is_multilingual:
        raise UnsupportedError("a multilingual model in CTranslate2's format is not converted; load the hub's folder")
    start = config["decoder_start_token_id"]
    return {
        "alignment_heads": given.get("alignment_heads", []),
        "begin_suppress_tokens": given.get("suppress_ids_begin", [220, config["eos_token_id"]]),
        "suppress_tokens": given.get("suppress_ids", []),
        "is_multilingual": False,
        "max_initial_timestamp_index": 50,
        "max_length": config["max_target_positions"],
        "no_timestamps_token_id": start + 105,
        "prev_sot_token_id": start + 103,
        "return_timestamps": False,
    }

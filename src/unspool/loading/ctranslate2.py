"""Whisper in CTranslate2's format (model.bin, as faster-whisper uses it), rewritten as a folder in the hub's layout."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors.torch import save_file

from unspool.errors import LoadError, UnsupportedError
from unspool.small_files import read_json_object, write_text

_DTYPES: Final = {0: np.float32, 4: np.float16}
_MOST_TENSORS = 100_000
_MOST_BYTES = 1 << 34
_LANGUAGES_FROM = 51865  # tokens of a vocabulary with languages
_MAPPED: Final = {
    "encoder/conv1": "encoder.conv1",
    "encoder/conv2": "encoder.conv2",
    "encoder/layer_norm": "encoder.layer_norm",
    "decoder/layer_norm": "decoder.layer_norm",
}
_PARTS: Final = {
    "self_attention/layer_norm": "self_attn_layer_norm",
    "self_attention/linear_1": "self_attn.out_proj",
    "attention/layer_norm": "encoder_attn_layer_norm",
    "attention/linear_0": "encoder_attn.q_proj",
    "attention/linear_2": "encoder_attn.out_proj",
    "ffn/layer_norm": "final_layer_norm",
    "ffn/linear_0": "fc1",
    "ffn/linear_1": "fc2",
}
_FUSED: Final = {
    "self_attention/linear_0": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention/linear_1": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
}
_ENDS: Final = {"weight": "weight", "bias": "bias", "gamma": "weight", "beta": "bias"}


def read_variables(path: Path) -> dict[str, np.ndarray]:
    """The float variables of a model.bin, by name."""
    content = np.memmap(path, np.uint8, mode="r")
    if len(content) > _MOST_BYTES:
        raise LoadError(f"{path} has {len(content)} bytes; at most {_MOST_BYTES} are read")
    place = 0

    def take(count: int) -> bytes:
        nonlocal place
        if count < 0 or place + count > len(content):
            raise LoadError(f"{path} ends in the middle of a variable; it is damaged")
        place += count
        return content[place - count : place].tobytes()

    def read_number(kind: str) -> int:
        return int(struct.unpack(kind, take(struct.calcsize(kind)))[0])

    def read_text() -> str:
        return take(read_number("<H")).rstrip(b"\0").decode("utf-8", "replace")

    if read_number("<I") > 6 or read_text() != "WhisperSpec":
        raise UnsupportedError(f"{path} is not a Whisper model in CTranslate2's format, versions 1 to 6")
    read_number("<I")
    count = read_number("<I")
    if count > _MOST_TENSORS:
        raise LoadError(f"{path} claims {count} variables; it is damaged")
    found: dict[str, np.ndarray] = {}
    for _ in range(count):
        name = read_text()
        shape = tuple(read_number("<I") for _ in range(read_number("<B")))
        kind, size = read_number("<B"), read_number("<I")
        data = take(size)
        if kind in _DTYPES:
            values = np.frombuffer(data, _DTYPES[kind])
            if values.size != int(np.prod(shape, dtype=np.int64)):
                raise LoadError(f"{path} has a variable {name[:80]!r} whose size does not fit its shape {shape}")
            found[name] = values.reshape(shape)
        elif len(shape) > 1:
            raise UnsupportedError(f"{path} holds {name[:80]!r} as quantised numbers; convert the float16 model")
    return found


def convert_whisper(source: Path, target: Path) -> None:
    """Write the model of `source` (model.bin, config.json, tokenizer.json) to `target` in the hub's layout."""
    variables = read_variables(source / "model.bin")
    tensors = {f"model.{name}": torch.from_numpy(values.copy()) for name, values in _rename(variables).items()}
    told = read_json_object(source / "config.json")
    config = _describe(tensors, variables)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    write_text(target / "config.json", json.dumps(config, indent=1))
    write_text(target / "generation_config.json", json.dumps(_describe_generation(config, told), indent=1))
    shutil.copyfile(source / "tokenizer.json", target / "tokenizer.json")


def _rename(variables: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    named: dict[str, np.ndarray] = {}
    for name, values in variables.items():
        *path, end = name.split("/")
        if path[-1:] == ["position_encodings"]:
            named[f"{path[0]}.embed_positions.weight"] = values
        elif path == ["decoder", "embeddings"]:
            named["decoder.embed_tokens.weight"] = values
        elif "/".join(path) in _MAPPED:
            named[f"{_MAPPED['/'.join(path)]}.{_ENDS[end]}"] = values
        elif len(path) > 2 and path[1].startswith("layer_") and end in _ENDS:
            layer, part = f"{path[0]}.layers.{path[1].removeprefix('layer_')}", "/".join(path[2:])
            if part in _PARTS:
                named[f"{layer}.{_PARTS[part]}.{_ENDS[end]}"] = values
            elif part in _FUSED:
                for to, piece in zip(_FUSED[part], np.split(values, len(_FUSED[part])), strict=True):
                    if not (to.endswith("k_proj") and end == "bias"):  # keys have none: it is written as zeros
                        named[f"{layer}.{to}.{_ENDS[end]}"] = piece
    return named


def _describe(tensors: dict[str, torch.Tensor], variables: dict[str, np.ndarray]) -> dict[str, Any]:
    def count_layers(side: str) -> int:
        return len({name.split(".")[3] for name in tensors if name.startswith(f"model.{side}.layers.")})

    try:
        vocab_size, width = tensors["model.decoder.embed_tokens.weight"].shape
        mels = tensors["model.encoder.conv1.weight"].shape[1]
        sources, targets = (tensors[f"model.{side}.embed_positions.weight"].shape[0] for side in ("encoder", "decoder"))
        heads = int(variables.get("decoder/num_heads", np.array(width // 64)))
    except KeyError as error:
        raise LoadError(f"the model.bin lacks {error}, so it is no Whisper") from error
    first = 50257 if vocab_size >= _LANGUAGES_FROM else 50256  # the end of a text; markers follow it
    return {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "is_encoder_decoder": True,
        "vocab_size": vocab_size,
        "num_mel_bins": mels,
        "d_model": width,
        "encoder_layers": count_layers("encoder"),
        "decoder_layers": count_layers("decoder"),
        "encoder_attention_heads": heads,
        "decoder_attention_heads": heads,
        "encoder_ffn_dim": tensors["model.encoder.layers.0.fc1.weight"].shape[0],
        "decoder_ffn_dim": tensors["model.decoder.layers.0.fc1.weight"].shape[0],
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


def _describe_generation(config: dict[str, Any], told: dict[str, Any]) -> dict[str, Any]:
    """The settings of the reference's file, from the markers' order: start, languages, tasks, …, no timestamps."""
    is_multilingual = config["vocab_size"] >= _LANGUAGES_FROM
    if is_multilingual:
        raise UnsupportedError("a multilingual model in CTranslate2's format is not converted; load the hub's folder")
    start = config["decoder_start_token_id"]
    return {
        "alignment_heads": told.get("alignment_heads", []),
        "begin_suppress_tokens": told.get("suppress_ids_begin", [220, config["eos_token_id"]]),
        "suppress_tokens": told.get("suppress_ids", []),
        "bos_token_id": config["bos_token_id"],
        "decoder_start_token_id": start,
        "eos_token_id": config["eos_token_id"],
        "pad_token_id": config["pad_token_id"],
        "is_multilingual": False,
        "max_initial_timestamp_index": 50,
        "max_length": config["max_target_positions"],
        "no_timestamps_token_id": start + 105,
        "prev_sot_token_id": start + 103,
        "return_timestamps": False,
    }

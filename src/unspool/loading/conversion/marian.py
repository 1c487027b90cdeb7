"""An OPUS-MT model as Argos Translate packs it: a zip of model.bin (CTranslate2), its vocabulary and sentencepiece."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path, PurePosixPath
from typing import Any, Final

import numpy as np

from unspool.errors import LoadError, UnsupportedError
from unspool.loading.archives import UNPACKING
from unspool.loading.conversion.ctranslate2 import Variables, count_layers, read_flag, read_variables, rename_layers
from unspool.loading.conversion.folder import halve, write_model
from unspool.small_files import write_text

_TAKEN: Final = {  # name in the zip, below its one folder: the most bytes
    "model/model.bin": 1 << 30,
    "model/shared_vocabulary.json": 32 << 20,
    "sentencepiece.model": 32 << 20,
}
_ACTIVATIONS: Final = ("relu", "gelu_new", "swish", "gelu")  # by the number that the file has
_MOST_TOKENS = 1_000_000
_POSITIONS = 512  # that OPUS-MT's models are trained with


def convert_marian(source: Path, target: Path) -> None:
    """Write the model of `source`, a folder with one .argosmodel, to `target` in the hub's layout."""
    [archive] = source.glob("*.argosmodel")
    found = _unpack(archive, source)
    words = _read_words(found["model/shared_vocabulary.json"])
    variables = read_variables(found["model/model.bin"], "TransformerSpec")
    tensors = _rename(variables, len(words))
    config = _describe(tensors, variables, len(words))
    pad = config["pad_token_id"]
    settings = {"bad_words_ids": [[pad]], "forced_eos_token_id": config["eos_token_id"], "num_beams": 4}
    write_model(target, tensors, config, {**settings, "max_length": _POSITIONS})
    ids = {word: index for index, word in enumerate([*words, "<pad>"])}
    write_text(target / "vocab.json", json.dumps(ids, ensure_ascii=False))
    found["sentencepiece.model"].replace(target / "source.spm")


def _unpack(archive: Path, folder: Path) -> dict[str, Path]:
    """Unpack the files that are needed, by their names in the archive."""
    found: dict[str, Path] = {}
    try:
        with zipfile.ZipFile(archive) as files:
            for info in files.infolist():
                name = "/".join(PurePosixPath(info.filename).parts[1:])
                if name not in _TAKEN or name in found:
                    continue
                with files.open(info) as inner:
                    data = inner.read(_TAKEN[name] + 1)
                if len(data) > _TAKEN[name]:
                    raise LoadError(f"{info.filename[:80]!r} in {archive.name} is larger than {_TAKEN[name]} bytes")
                found[name] = folder / PurePosixPath(name).name
                found[name].write_bytes(data)
    except LoadError:
        raise
    except UNPACKING as error:
        raise LoadError(f"{archive.name} is not a sound zip file: {error}") from error
    missing = [name for name in _TAKEN if name not in found]
    if missing:
        raise LoadError(f"{archive.name} has no {missing[0]}")
    return found


def _read_words(path: Path) -> list[str]:
    try:
        words = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise LoadError(f"{path.name} is not JSON: {error}") from error
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words) or len(words) > _MOST_TOKENS:
        raise LoadError(f"{path.name} is no list of at most {_MOST_TOKENS} tokens")
    if words[:2] != ["</s>", "<unk>"] or "<pad>" in words:
        raise UnsupportedError(f"{path.name} does not begin with </s> and <unk>, as OPUS-MT's vocabularies do")
    return words


def _rename(variables: Variables, num_words: int) -> Variables:
    """Tensors under the hub's names. Texts begin with no embedding at all: with that of a <pad>, which is zero."""
    named = {f"model.{name}": halve(values) for name, values in rename_layers(variables).items()}
    try:
        embedding, bias = variables["decoder/embeddings/weight"], variables["decoder/projection/bias"]
    except KeyError as error:
        raise UnsupportedError(f"the model.bin has no {error}: it is no OPUS-MT model with one vocabulary") from error
    if embedding.ndim != 2 or embedding.shape[0] != num_words or bias.shape != (num_words,):
        raise LoadError(f"the model.bin has embeddings {embedding.shape} for {num_words} tokens")
    for name, values in variables.items():
        if name.endswith("/embeddings_0/weight") and not np.array_equal(values, embedding):
            raise UnsupportedError("the model's sides have vocabularies of their own")
    if not read_flag(variables, "decoder/start_from_zero_embedding"):
        raise UnsupportedError("the model begins its texts with a token, and OPUS-MT's begin with none")
    named["model.shared.weight"] = halve(np.concatenate((embedding, np.zeros_like(embedding[:1]))))
    named["final_logits_bias"] = np.append(bias, np.float32(0)).astype(np.float32)[None]
    return named


def _describe(tensors: Variables, variables: Variables, num_words: int) -> dict[str, Any]:
    layers = {name.removeprefix("model."): values for name, values in tensors.items()}
    sizes: dict[str, Any] = {}
    for side in ("encoder", "decoder"):
        inner, heads = layers.get(f"{side}.layers.0.fc1.weight"), read_flag(variables, f"{side}/num_heads")
        if inner is None or heads is None or read_flag(variables, f"{side}/pre_norm"):
            raise UnsupportedError(f"the {side} is not that of an OPUS-MT model: layers whose norms follow their sums")
        sizes |= {f"{side}_layers": count_layers(layers, side), f"{side}_attention_heads": heads}
        sizes[f"{side}_ffn_dim"] = inner.shape[0]
    activation = read_flag(variables, "decoder/activation") or 0
    if activation not in range(len(_ACTIVATIONS)):
        raise UnsupportedError(f"the model has an activation that is not known ({activation})")
    return {
        "architectures": ["MarianMTModel"],
        "model_type": "marian",
        "is_encoder_decoder": True,
        "vocab_size": num_words + 1,
        "decoder_vocab_size": num_words + 1,
        "d_model": tensors["model.shared.weight"].shape[1],
        **sizes,
        "max_position_embeddings": _POSITIONS,
        "activation_function": _ACTIVATIONS[activation],
        "scale_embedding": bool(read_flag(variables, "encoder/scale_embeddings")),
        "share_encoder_decoder_embeddings": True,
        "tie_word_embeddings": True,
        "eos_token_id": 0,
        "bos_token_id": 0,
        "pad_token_id": num_words,
        "decoder_start_token_id": num_words,
    }

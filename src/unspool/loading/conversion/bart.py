"""A BART that spells: its npz file, whose sources are letters and whose targets are sounds, rewritten as a folder."""

from __future__ import annotations

import io
import json
import math
import zipfile
from pathlib import Path
from typing import Any, Final

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from unspool.errors import LoadError
from unspool.loading.archives import UNPACKING
from unspool.loading.conversion.folder import write_model

_MOST_BYTES = 1 << 28
_MOST_LETTERS = 1_000
_SPECIAL: Final = ("<pad>", "<s>", "</s>", "<unk>")
_NUMBERS: Final = ("d_model", "ffn_dim", "num_heads", "max_position_embeddings")


def convert_bart(source: Path, target: Path) -> None:
    """Write the model of `source`, a folder with one .npz, to `target` in the hub's layout."""
    [path] = source.glob("*.npz")
    tensors, meta = _read(path)
    shared = tensors.get("model.shared.weight")
    if shared is None or shared.ndim != 2:
        raise LoadError(f"{path.name} has no model.shared.weight")
    config = _describe(meta, shared.shape[0], path)
    write_model(target, tensors, config, {"max_length": config["max_position_embeddings"]})
    tokenizer = _make_tokenizer(meta["grapheme_chars"], meta["phoneme_chars"], shared.shape[0], path)
    tokenizer.save(str(target / "tokenizer.json"))


def _read(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(info.file_size for info in archive.infolist())
            if size > _MOST_BYTES:
                raise LoadError(f"{path.name} unpacks to {size} bytes; at most {_MOST_BYTES} are read")
            tensors = {info.filename.removesuffix(".npy"): _read_array(archive, info) for info in archive.infolist()}
        meta = json.loads(str(tensors.pop("meta_json")))
    except LoadError:
        raise
    except (*UNPACKING, OSError, KeyError, TypeError) as error:
        raise LoadError(f"{path.name} is not the npz file of a BART: {error}") from error
    if any(values.dtype != np.float32 for values in tensors.values()) or not isinstance(meta, dict):
        raise LoadError(f"{path.name} is not the npz file of a BART: its weights are not all float32")
    return tensors, meta


def _read_array(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> np.ndarray:
    with archive.open(info) as file:
        content = io.BytesIO(file.read(info.file_size))
    version = np.lib.format.read_magic(content)
    read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, is_fortran, dtype = read_header(content)
    rest = content.read()
    # Memory is asked for by what a header claims, so that it is compared with what there is.
    if dtype.hasobject or math.prod(shape) * dtype.itemsize != len(rest):
        raise ValueError(f"{info.filename[:80]!r} does not hold what its header says")
    values = np.frombuffer(rest, dtype)
    return values.reshape(shape[::-1]).T if is_fortran else values.reshape(shape)


def _describe(meta: dict[str, Any], vocab_size: int, path: Path) -> dict[str, Any]:
    for name in _NUMBERS:
        if type(meta.get(name)) is not int or not 0 < meta[name] < 1 << 20:
            raise LoadError(f"{path.name} gives no size for {name}")
    for name in ("grapheme_chars", "phoneme_chars"):
        if not isinstance(meta.get(name), str) or not len(_SPECIAL) <= len(meta[name]) <= min(
            vocab_size, _MOST_LETTERS
        ):
            raise LoadError(f"{path.name} has no text {name} with a character for each token")
    sides: dict[str, int] = {}
    for side in ("encoder", "decoder"):
        sides |= {f"{side}_layers": 1, f"{side}_attention_heads": meta["num_heads"], f"{side}_ffn_dim": meta["ffn_dim"]}
    return {
        "architectures": ["BartForConditionalGeneration"],
        "model_type": "bart",
        "is_encoder_decoder": True,
        "vocab_size": vocab_size,
        "d_model": meta["d_model"],
        **sides,
        "max_position_embeddings": meta["max_position_embeddings"],
        "activation_function": "gelu",
        "scale_embedding": False,
        "tie_word_embeddings": True,
        "forced_eos_token_id": None,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 1,
    }


def _make_tokenizer(letters: str, sounds: str, vocab_size: int, path: Path) -> tokenizers.Tokenizer:
    """A tokenizer that reads letters and writes sounds.

    One id stands for a letter in a source and for a sound in a target. A token is named by its sound, if it has one,
    and a letter is rewritten as the sound with its id before it is looked up.
    """
    start = len(_SPECIAL)
    names = [*_SPECIAL, *sounds[start:], *letters[len(sounds) :]]
    names += [f"<unused{index}>" for index in range(len(names), vocab_size)]
    changed = {
        letter: names[index] for index, letter in enumerate(letters) if index >= start and names[index] != letter
    }
    repeats = any(len({*chars[start:]}) < len(chars) - start for chars in (letters, sounds))
    if repeats or len({*names}) != vocab_size or set(changed) & set(changed.values()):
        raise LoadError(f"{path.name} has a character twice")
    made = tokenizers.Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token="<unk>"))
    made.normalizer = normalizers.Sequence([normalizers.Replace(*pair) for pair in changed.items()])
    made.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    made.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    made.decoder = decoders.Fuse()
    made.add_special_tokens(list(_SPECIAL))
    return made

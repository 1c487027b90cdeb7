"""Safetensors weights of a model folder, one file or shards: headers checked, tensors memory-mapped.

The format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import math
import struct
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

from unspool.errors import LoadError, ModelNotFoundError
from unspool.loading.dequantize import find_stored_type
from unspool.loading.mapping import MappedFile, MappedTensors, TensorLocation
from unspool.loading.tensors import TensorInfo
from unspool.small_files import parse_json_object, read_json_object

SAFETENSORS_TYPES = ("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL", "F8_E4M3")
WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

_MAX_HEADER_BYTES = 100_000_000  # the bound of the safetensors library itself
_MAX_INDEX_BYTES = 64 << 20
_MAX_DIMENSIONS = 16
_MAX_COUNT = 1 << 48  # of any dimension or offset
_MAX_SHARDS = 4096
_MAX_NAME_BYTES = 250  # of a shard; file systems have names of 255


class SafetensorsFiles(MappedTensors):
    """The `model.safetensors` of a folder, or the shards that `model.safetensors.index.json` lists."""

    def __init__(self, folder: str | Path) -> None:
        location = Path(folder)
        self.metadata: dict[str, str] = {}
        if (location / WEIGHTS_NAME).is_file():
            locations = self._read_shard(location / WEIGHTS_NAME)
        elif (location / INDEX_NAME).is_file():
            locations = self._read_shards(location)
        else:
            refuse_missing_weights(location)
        super().__init__(location, locations)

    @classmethod
    def open_file(cls, path: Path) -> SafetensorsFiles:
        """One file of any name."""
        made = cls.__new__(cls)
        made.metadata = {}
        MappedTensors.__init__(made, path, made._read_shard(path))
        return made

    def _read_shard(self, path: Path) -> dict[str, TensorLocation]:
        locations, metadata = _read_header(MappedFile(path))
        self.metadata |= metadata
        return locations

    def _read_shards(self, folder: Path) -> dict[str, TensorLocation]:
        weight_map = read_weight_map(folder / INDEX_NAME)
        shards = {shard: folder / shard for shard in dict.fromkeys(weight_map.values())}
        missing = [shard for shard, path in shards.items() if not path.is_file()]
        if missing:
            raise LoadError(
                f"{folder} lacks {missing[0]}, one of the {len(shards)} shards that {INDEX_NAME} lists "
                f"({len(missing)} are missing): the download is incomplete, fetch the model again"
            )
        held = {shard: self._read_shard(path) for shard, path in shards.items()}
        for name, shard in weight_map.items():
            if name not in held[shard]:
                raise LoadError(f"{INDEX_NAME} says that tensor {name!r} lies in {folder / shard}; it does not")
        return {name: held[shard][name] for name, shard in weight_map.items()}


def refuse_pickle(path: Path) -> NoReturn:
    """Raise the error for a pickle checkpoint, with the way to convert it."""
    raise LoadError(
        f"{path} is a pickle, which can run any code when it is opened; unspool opens none itself. Folders with a "
        "config.json and pytorch_model.bin, or its shards, are rewritten by a confined process: give the folder, or "
        "use `unspool convert`. Otherwise convert it somewhere you can trust it:\n"
        "  from transformers import AutoModelForCausalLM\n"
        f"  AutoModelForCausalLM.from_pretrained({str(path.parent)!r}).save_pretrained('converted')\n"
        "or, where the file is a plain mapping of names to tensors:\n"
        "  import torch; from safetensors.torch import save_file\n"
        f"  save_file(torch.load({str(path)!r}, weights_only=True), 'model.safetensors')"
    )


def refuse_missing_weights(folder: Path) -> NoReturn:
    """Raise the error for a folder without safetensors, whether it has pickles or nothing."""
    if not folder.is_dir():
        raise ModelNotFoundError(f"{folder} is not a folder")
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLE_SUFFIXES)
    if pickles:
        refuse_pickle(folder / pickles[0])
    raise ModelNotFoundError(f"{folder} holds no weights: neither {WEIGHTS_NAME} nor {INDEX_NAME} is in it")


def read_weight_map(path: Path, suffix: str = ".safetensors") -> dict[str, str]:
    """The shard of each tensor, as an index says; shards end in `suffix` and lie in or below the index's folder."""
    weight_map = read_json_object(path, _MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise LoadError(f"{path} has no weight_map from tensor names to files")
    if not all(isinstance(shard, str) for shard in weight_map.values()):
        raise LoadError(f"the weight_map of {path} names shards that are no strings")
    shards = set(weight_map.values())
    if len(shards) > _MAX_SHARDS:
        raise LoadError(f"{path} lists {len(shards)} shards, more than {_MAX_SHARDS}")
    for shard in shards:
        _check_shard_name(shard, path, suffix)
    return weight_map


def _check_shard_name(shard: str, index: Path, suffix: str) -> None:
    """A shard is a file in or below the folder, spelled so on every system."""
    parts = PurePosixPath(shard).parts
    leaves = shard.startswith("/") or ".." in parts or any(sign in shard for sign in "\\:\0")
    can_be = shard.isprintable() and len(shard.encode()) <= _MAX_NAME_BYTES
    if leaves or not can_be or not shard.endswith(suffix):
        raise LoadError(f"{index} names {shard!r} as a shard; a shard is a {suffix} file within the model's folder")


def _read_header(file: MappedFile) -> tuple[dict[str, TensorLocation], dict[str, str]]:
    def fail(problem: str) -> NoReturn:
        raise LoadError(f"{file.path} is not a sound safetensors file: {problem}. Download it again")

    if file.size < 8:
        fail(f"it has {file.size} bytes, and at least {8 - file.size} more are missing")
    (length,) = struct.unpack_from("<Q", file.buffer, 0)
    if length > _MAX_HEADER_BYTES:
        fail(f"its header is said to be {length} bytes long; at most {_MAX_HEADER_BYTES} are read")
    data = 8 + length
    if data > file.size:
        fail(f"it ends within its header: {data - file.size} bytes or more are missing")
    header = parse_json_object(file.buffer[8:data], f"the header of {file.path}")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        fail("its __metadata__ is not a mapping of strings")
    entries = []
    for name, description in header.items():
        try:
            entries.append(_read_entry(name, description))
        except ValueError as error:
            fail(f"tensor {name!r} {error}")
    end = 0
    for info, begin in sorted(entries, key=lambda entry: (entry[1], entry[0].nbytes)):
        if begin < end:
            fail(f"tensor {info.name!r} overlaps the one before it")
        end = begin + info.nbytes
    if data + end > file.size:
        missing = data + end - file.size
        fail(f"it has {file.size} bytes and its tensors need {data + end}: {missing} bytes are missing")
    return {info.name: TensorLocation(info, file, data + begin) for info, begin in entries}, metadata


def _read_entry(name: str, description: Any) -> tuple[TensorInfo, int]:
    """One tensor of a header and where its bytes begin; a ValueError says what is wrong with it."""
    if not isinstance(description, dict):
        raise ValueError("is not described by an object")
    dtype = description.get("dtype")
    if not isinstance(dtype, str):
        raise ValueError("has no dtype")
    shape = _read_counts(description, "shape")
    if len(shape) > _MAX_DIMENSIONS:
        raise ValueError(f"has {len(shape)} dimensions, more than {_MAX_DIMENSIONS}")
    extent = _read_counts(description, "data_offsets")
    if len(extent) != 2:
        raise ValueError(f"has {len(extent)} data_offsets, not a begin and an end")
    nbytes = math.prod(shape) * find_stored_type(dtype, name, SAFETENSORS_TYPES).block_bytes
    if extent[1] - extent[0] != nbytes:
        raise ValueError(f"takes {extent[1] - extent[0]} bytes, where {dtype} of shape {shape} takes {nbytes}")
    return TensorInfo(name, tuple(shape), dtype, nbytes), extent[0]


def _read_counts(description: dict[str, Any], key: str) -> list[int]:
    values = description.get(key)
    if not isinstance(values, list) or not all(type(v) is int and 0 <= v <= _MAX_COUNT for v in values):
        raise ValueError(f"has no valid {key}")
    return values

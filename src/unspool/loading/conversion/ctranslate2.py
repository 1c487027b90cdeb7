"""CTranslate2's format (model.bin): its variables, and the names that transformers gives to them."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Final

import numpy as np

from unspool.errors import LoadError, UnsupportedError

Variables = dict[str, np.ndarray]

_VERSION = 6
_DTYPES: Final = {0: np.float32, 1: np.int8, 2: np.int16, 3: np.int32, 4: np.float16}
_MOST_VARIABLES = 100_000
_MOST_AXES = 4
_MOST_BYTES = 1 << 34

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
ENDS: Final = {"weight": "weight", "bias": "bias", "gamma": "weight", "beta": "bias"}


class _Reader:
    """Numbers and texts from the bytes of a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._place = 0
        if not 0 < path.stat().st_size <= _MOST_BYTES:
            raise LoadError(f"{path} has {path.stat().st_size} bytes; 1 to {_MOST_BYTES} are read")
        self._content = np.memmap(path, np.uint8, mode="r")

    def take(self, count: int) -> bytes:
        """The next bytes."""
        if self._place + count > len(self._content):
            raise LoadError(f"{self.path} ends in the middle of a variable; it is damaged")
        self._place += count
        return self._content[self._place - count : self._place].tobytes()

    def number(self, kind: str) -> int:
        """A number written as `struct` calls `kind`."""
        return int(struct.unpack(kind, self.take(struct.calcsize(kind)))[0])

    def text(self) -> str:
        """A text after its length."""
        return self.take(self.number("<H")).rstrip(b"\0").decode("utf-8", "replace")


def read_variables(path: Path, kind: str) -> Variables:
    """The variables of a model.bin of a kind of model ("WhisperSpec", …), by name; int8 matrices as float32."""
    reader = _Reader(path)
    if reader.number("<I") > _VERSION or reader.text() != kind:
        raise UnsupportedError(f"{path} is no {kind} in CTranslate2's format, versions 1 to {_VERSION}")
    reader.number("<I")  # the revision of this kind of model
    count = reader.number("<I")
    if count > _MOST_VARIABLES:
        raise LoadError(f"{path} claims {count} variables; it is damaged")
    found: Variables = {}
    for _ in range(count):
        name = reader.text()
        found[name] = _read_variable(reader, name)
    scales = {name: found.pop(name) for name in [*found] if name.endswith("_scale")}
    for name, values in found.items():
        if values.ndim < 2 or values.dtype.kind == "f":
            continue
        scale = scales.get(f"{name}_scale")
        if values.dtype != np.int8 or scale is None or scale.shape != values.shape[:1] or not (scale > 0).all():
            raise UnsupportedError(
                f"{path} holds {name[:80]!r} in a form that is not read: float32, float16 and int8 are"
            )
        found[name] = values.astype(np.float32) / scale.reshape(-1, *[1] * (values.ndim - 1))
    for name, values in found.items():
        if not np.isfinite(values).all():
            raise LoadError(f"{path} has a number in {name[:80]!r} that is not finite")
    return found


def _read_variable(reader: _Reader, name: str) -> np.ndarray:
    axes = reader.number("<B")
    if axes > _MOST_AXES:
        raise LoadError(f"{reader.path} gives {name[:80]!r} {axes} axes; it is damaged")
    shape = tuple(reader.number("<I") for _ in range(axes))
    kind, size = reader.number("<B"), reader.number("<I")
    data = reader.take(size)
    if kind not in _DTYPES:
        raise UnsupportedError(f"{reader.path} holds {name[:80]!r} in numbers of a kind that is not read ({kind})")
    count = 1
    for length in shape:
        count *= length
    if size != count * np.dtype(_DTYPES[kind]).itemsize:
        raise LoadError(f"{reader.path} has a variable {name[:80]!r} whose size does not fit its shape {shape}")
    return np.frombuffer(data, _DTYPES[kind]).reshape(shape)


def rename_layers(variables: Variables) -> Variables:
    """The variables of all layers, under the names of BART and Whisper: `encoder.layers.0.fc1.weight`."""
    named: Variables = {}
    for name, values in variables.items():
        *path, end = name.split("/")
        if len(path) < 3 or not path[1].startswith("layer_") or end not in ENDS:
            continue
        layer, part = f"{path[0]}.layers.{path[1].removeprefix('layer_')}", "/".join(path[2:])
        if part in _PARTS:
            named[f"{layer}.{_PARTS[part]}.{ENDS[end]}"] = values
        elif part in _FUSED:
            if len(values) % len(_FUSED[part]):
                raise LoadError(f"the variable {name[:80]!r} can't be divided among {len(_FUSED[part])} projections")
            for to, piece in zip(_FUSED[part], np.split(values, len(_FUSED[part])), strict=True):
                named[f"{layer}.{to}.{ENDS[end]}"] = piece
    return named


def count_layers(named: Variables, side: str) -> int:
    """How many layers one side has."""
    return len({name.split(".")[2] for name in named if name.startswith(f"{side}.layers.")})


def read_flag(variables: Variables, name: str) -> int | None:
    """A whole number without axes; None if there is none."""
    found = variables.get(name)
    return int(found) if found is not None and found.ndim == 0 and found.dtype.kind == "i" else None

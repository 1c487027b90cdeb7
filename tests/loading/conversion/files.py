"""Files of other programs' formats, written by hand."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

CT2_TYPES = {"float32": 0, "int8": 1, "int16": 2, "float16": 4}


def pack_ct2(variables: dict[str, np.ndarray], kind: str = "TransformerSpec", count: int | None = None) -> bytes:
    """A model.bin of CTranslate2."""

    def pack_text(text: str) -> bytes:
        data = text.encode() + b"\0"
        return struct.pack("<H", len(data)) + data

    out = struct.pack("<I", 6) + pack_text(kind) + struct.pack("<II", 7, len(variables) if count is None else count)
    for name, values in variables.items():
        data = values.tobytes()
        out += pack_text(name) + struct.pack("<B", values.ndim) + b"".join(struct.pack("<I", n) for n in values.shape)
        out += struct.pack("<BI", CT2_TYPES[values.dtype.name], len(data)) + data
    return out


def pack_varint(value: int) -> bytes:
    out = b""
    while value > 0x7F:
        out, value = out + bytes([value & 0x7F | 0x80]), value >> 7
    return out + bytes([value])


def pack_field(number: int, value: int | bytes | str) -> bytes:
    """A field of a protobuf message."""
    if isinstance(value, int):
        return pack_varint(number << 3) + pack_varint(value)
    data = value.encode() if isinstance(value, str) else value
    return pack_varint(number << 3 | 2) + pack_varint(len(data)) + data


ONNX_TYPES = {"float32": 1, "uint8": 2, "int8": 3, "int64": 7}


def pack_tensor(name: str, values: np.ndarray, *, is_listed: bool = False, shape: Sequence[int] | None = None) -> bytes:
    """A TensorProto: raw, or with its numbers as a packed list."""
    out = b"".join(pack_field(1, size) for size in (values.shape if shape is None else shape))
    out += pack_field(2, ONNX_TYPES[values.dtype.name]) + pack_field(8, name)
    if not is_listed:
        return out + pack_field(9, values.tobytes())
    if values.dtype == np.float32:
        return out + pack_field(4, values.tobytes())
    number = 7 if values.dtype == np.int64 else 5
    return out + pack_field(number, b"".join(pack_varint(int(one) & (1 << 64) - 1) for one in values.ravel()))


def pack_onnx(tensors: Sequence[bytes], nodes: Sequence[tuple[str, str, Sequence[str]]] = (("a", "Add", ()),)) -> bytes:
    """A ModelProto with one graph."""
    graph = b""
    for name, operator, inputs in nodes:
        graph += pack_field(
            1, b"".join(pack_field(1, one) for one in inputs) + pack_field(3, name) + pack_field(4, operator)
        )
    graph += b"".join(pack_field(5, tensor) for tensor in tensors)
    return pack_field(1, 8) + pack_field(7, graph)

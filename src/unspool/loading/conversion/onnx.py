"""ONNX files: the tensors of a graph and its nodes, read without the onnx package. Nothing in it is run."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from unspool.errors import LoadError, UnsupportedError
from unspool.protobuf import Value, read_fields, read_varint
from unspool.small_files import read_bytes

_MOST_BYTES = (1 << 31) - 1  # of any protobuf message
_MOST_NODES = 1_000_000
_MOST_AXES = 8
_DTYPES: Final = {1: np.float32, 2: np.uint8, 3: np.int8, 6: np.int32, 7: np.int64, 9: np.bool_, 10: np.float16}
# Fields of the messages, by the names of onnx.proto.
_GRAPH = 7
_NODE, _INITIALIZER = 1, 5
_INPUT, _OUTPUT, _NAME, _OP = 1, 2, 3, 4
_DIMS, _DATA_TYPE, _FLOATS, _INTS, _LONGS, _TENSOR_NAME, _RAW, _LOCATION = 1, 2, 4, 5, 7, 8, 9, 14


@dataclass(frozen=True, slots=True)
class OnnxNode:
    """One operation: its name in the exported module, its operator, and the names of what it reads."""

    name: str
    operator: str
    inputs: tuple[str, ...]


@dataclass(slots=True)
class OnnxGraph:
    """A graph's constants by name, and its nodes in order."""

    tensors: dict[str, np.ndarray] = field(default_factory=dict)
    nodes: list[OnnxNode] = field(default_factory=list)


def read_onnx(path: Path) -> OnnxGraph:
    """Read a file whose tensors are all inside it."""
    graph = OnnxGraph()
    try:
        for number, value in read_fields(read_bytes(path, _MOST_BYTES)):
            if number == _GRAPH:
                _read_graph(_as_bytes(value), graph)
    except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError, struct.error) as error:
        raise LoadError(f"{path} is not a sound ONNX file: {error}") from error
    except _ElsewhereError as error:
        raise UnsupportedError(f"{path} can't be read: {error}") from error
    if not graph.nodes:
        raise LoadError(f"{path} is not an ONNX file: it has no graph")
    return graph


class _ElsewhereError(Exception):
    """A tensor is stored in a way that is not read."""


def _read_graph(data: bytes, graph: OnnxGraph) -> None:
    for number, value in read_fields(data):
        if number == _NODE:
            graph.nodes.append(_read_node(_as_bytes(value)))
            if len(graph.nodes) > _MOST_NODES:
                raise ValueError(f"it has more than {_MOST_NODES} nodes")
        elif number == _INITIALIZER:
            name, values = _read_tensor(_as_bytes(value))
            if name in graph.tensors:
                raise ValueError(f"it has two tensors {name[:80]!r}")
            graph.tensors[name] = values


def _read_node(data: bytes) -> OnnxNode:
    inputs, name, operator = [], "", ""
    for number, value in read_fields(data):
        if number == _INPUT:
            inputs.append(_as_bytes(value).decode())
        elif number == _NAME:
            name = _as_bytes(value).decode()
        elif number == _OP:
            operator = _as_bytes(value).decode()
    return OnnxNode(name, operator, tuple(inputs))


def _read_tensor(data: bytes) -> tuple[str, np.ndarray]:
    name, kind = "", 0
    dims: list[int] = []
    raw: bytes | None = None
    listed: dict[int, list[Value]] = {_FLOATS: [], _INTS: [], _LONGS: []}
    for number, value in read_fields(data):
        if number == _DIMS:
            dims += _read_integers(value)
        elif number == _DATA_TYPE:
            kind = _as_integer(value)
        elif number == _TENSOR_NAME:
            name = _as_bytes(value).decode()
        elif number == _RAW:
            raw = _as_bytes(value)
        elif number == _LOCATION and value:
            raise _ElsewhereError(f"the tensor {name[:80]!r} is in another file")
        elif number in listed:
            listed[number] += _read_floats(value) if number == _FLOATS else _read_integers(value)
    if kind not in _DTYPES:
        raise _ElsewhereError(f"the tensor {name[:80]!r} has elements of a type that is not read ({kind})")
    if len(dims) > _MOST_AXES:
        raise ValueError(f"the tensor {name[:80]!r} has {len(dims)} axes")
    dtype = np.dtype(_DTYPES[kind])
    if raw is None:
        values = _read_list(listed, kind, dtype)
    elif len(raw) % dtype.itemsize:
        raise ValueError(f"the tensor {name[:80]!r} ends in the middle of a number")
    else:
        values = np.frombuffer(raw, dtype.newbyteorder("<"))
    if values.size != math.prod(dims):
        raise ValueError(f"the tensor {name[:80]!r} has {values.size} elements and the shape {tuple(dims)}")
    return name, values.reshape(dims)


def _read_list(listed: dict[int, list[Value]], kind: int, dtype: np.dtype) -> np.ndarray:
    """Numbers that are written one by one, as small tensors are."""
    if kind == 1:
        return np.array(listed[_FLOATS], dtype)
    numbers = np.array(listed[_LONGS if kind == 7 else _INTS], np.int64)
    values = numbers.astype(dtype)
    if dtype.kind == "f" or not np.array_equal(values, numbers):
        raise ValueError(f"numbers that are no {dtype} are listed")
    return values


def _as_bytes(value: Value) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("a number stands where a text or a message is expected")
    return value


def _as_integer(value: Value) -> int:
    if not isinstance(value, int):
        raise ValueError("something else stands where a whole number is expected")
    return value


def _read_integers(value: Value) -> list[int]:
    """One number, or several packed into bytes; with signs."""
    if isinstance(value, bytes):
        numbers, place = [], 0
        while place < len(value):
            number, place = read_varint(value, place)
            numbers.append(number)
    else:
        numbers = [_as_integer(value)]
    if any(number >> 64 for number in numbers):
        raise ValueError("a number has more than 64 bits")
    return [number - (1 << 64) if number >> 63 else number for number in numbers]


def _read_floats(value: Value) -> list[float]:
    if isinstance(value, bytes):
        return [float(number) for number in np.frombuffer(value, "<f4")]
    return [float(value)]

"""GGUF files: a memory-mapped reader that checks every count, length and offset before it uses them.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import NoReturn

from unspool.errors import LoadError, UnsupportedError
from unspool.loading.codebooks import CODED
from unspool.loading.dequantize import find_stored_type
from unspool.loading.mapping import MappedFile, MappedTensors, TensorLocation
from unspool.loading.tensors import TensorInfo

GGUF_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", *CODED)

_TYPE_NAMES = {  # in the rows of a table
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1",
    10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K",
    16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S",
    22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16",
    34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

_MAX_KEY_BYTES = 65_535
_MAX_NAME_BYTES = 1_024
_MAX_STRING_BYTES = 64 << 20
_MAX_DEPTH = 4  # arrays within arrays
_MAX_ALIGNMENT = 1 << 20
_MAX_DIMENSIONS = 4
_MIN_KEY_VALUE_BYTES = 8 + 1 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8

_LENGTH = struct.Struct("<Q")


class GGUFFile(MappedTensors):
    """A GGUF file (version 2 or 3, little endian): its metadata and its tensors."""

    def __init__(self, path: str | Path) -> None:
        location = Path(path)
        header = _Header(MappedFile(location))
        self.metadata: dict[str, object] = header.metadata
        super().__init__(location, header.locations)

    @property
    def architecture(self) -> str:
        """What `general.architecture` says the model is: "llama", "qwen2", …"""
        architecture = self.metadata.get("general.architecture")
        if not isinstance(architecture, str):
            raise LoadError(f"{self.location} doesn't say its architecture (general.architecture is missing)")
        return architecture


class _Header:
    """One pass over the header. `_at` is the offset of the next byte."""

    def __init__(self, file: MappedFile) -> None:
        self._file = file
        self._buffer = file.buffer
        self._size = file.size
        self._at = 0
        num_tensors, num_keys = self._read_preamble()
        self.metadata: dict[str, object] = {}
        for _ in range(num_keys):
            key = self._read_string("a metadata key", _MAX_KEY_BYTES)
            if key in self.metadata:
                self._fail(f"the metadata key {key!r} occurs twice")
            kind = self._read_number("I", f"the type of {key!r}")
            self.metadata[key] = self._read_value(key, kind)
        self._refuse_split()
        self.locations = self._read_locations(num_tensors)

    def _fail(self, problem: str) -> NoReturn:
        raise LoadError(f"{self._file.path} is not a sound GGUF file: {problem}. Download it again")

    def _need(self, num_bytes: int, what: str) -> None:
        missing = self._at + num_bytes - self._size
        if missing > 0:
            self._fail(
                f"it ends within {what} (byte {self._at}): it has {self._size} bytes, "
                f"and at least {missing} more are missing"
            )

    def _read_number(self, code: str, what: str) -> int:
        self._need(struct.calcsize("<" + code), what)
        (value,) = struct.unpack_from("<" + code, self._buffer, self._at)
        self._at += struct.calcsize("<" + code)
        return int(value)

    def _read_preamble(self) -> tuple[int, int]:
        magic = self._buffer[:4]
        if magic != b"GGUF":
            self._fail(f"it begins with {magic!r}, not with b'GGUF'")
        self._at = 4
        version = self._read_number("I", "the version")
        if version and version & 0xFFFF == 0:
            raise UnsupportedError(
                f"{self._file.path} is a big-endian GGUF file; unspool reads little-endian ones. "
                "Convert it with gguf-convert-endian from the gguf package"
            )
        if version not in (2, 3):
            raise UnsupportedError(
                f"{self._file.path} is GGUF version {version}; unspool reads versions 2 and 3. "
                "Convert the model again with a current llama.cpp"
            )
        num_tensors = self._read_number("Q", "the number of tensors")
        num_keys = self._read_number("Q", "the number of metadata keys")
        self._need(num_keys * _MIN_KEY_VALUE_BYTES, f"the {num_keys} metadata keys it announces")
        self._need(num_tensors * _MIN_TENSOR_BYTES, f"the {num_tensors} tensors it announces")
        return num_tensors, num_keys

    def _read_string(self, what: str, max_bytes: int) -> str:
        length = self._read_number("Q", what)
        if length > max_bytes:
            self._fail(f"{what} is {length} bytes long; at most {max_bytes} are read")
        self._need(length, what)
        data = self._buffer[self._at : self._at + length]
        self._at += length
        try:
            return data.decode()
        except UnicodeDecodeError:
            self._fail(f"{what} is not UTF-8")

    def _read_value(self, key: str, kind: int) -> object:
        if kind == _STRING:
            return self._read_string(f"the value of {key!r}", _MAX_STRING_BYTES)
        if kind == _ARRAY:
            return self._read_array(key, depth=1)
        return self._read_scalars(key, kind, 1)[0]

    def _read_array(self, key: str, depth: int) -> object:
        if depth > _MAX_DEPTH:
            self._fail(f"the value of {key!r} nests arrays more than {_MAX_DEPTH} deep")
        kind = self._read_number("I", f"the array {key!r}")
        length = self._read_number("Q", f"the array {key!r}")
        if kind == _STRING:
            return self._read_strings(key, length)
        if kind == _ARRAY:
            self._need(length * 12, f"the array {key!r} of {length} arrays")
            return [self._read_array(key, depth + 1) for _ in range(length)]
        return self._read_scalars(key, kind, length)

    def _read_strings(self, key: str, length: int) -> list[str]:
        # A vocabulary has 150,000 of these: one tight loop, with the checks of _read_string in it.
        self._need(length * 8, f"the array {key!r} of {length} strings")
        buffer, size, at = self._buffer, self._size, self._at
        read_length = _LENGTH.unpack_from
        strings: list[str] = []
        add = strings.append
        try:
            for _ in range(length):
                start = at + 8
                at = start + read_length(buffer, at)[0]
                if at > size:
                    break
                add(buffer[start:at].decode())
        except struct.error:  # even the length is missing
            at += 8
        except UnicodeDecodeError:
            self._fail(f"string {len(strings)} of the array {key!r} is not UTF-8")
        if len(strings) < length:
            self._at = min(self._at, size)
            self._need(at - self._at, f"string {len(strings)} of the array {key!r}")
        self._at = at
        return strings

    def _read_scalars(self, key: str, kind: int, length: int) -> list[object]:
        code = _SCALARS.get(kind)
        if code is None:
            self._fail(f"the value of {key!r} has the unknown type {kind}")
        num_bytes = length * struct.calcsize("<" + code)
        self._need(num_bytes, f"the value of {key!r} ({length} numbers)")
        if code == "?" and length and max(self._buffer[self._at : self._at + length]) > 1:
            self._fail(f"the value of {key!r} is to be true or false and is neither")
        values = struct.unpack_from(f"<{length}{code}", self._buffer, self._at)
        self._at += num_bytes
        if code in "fd" and any(map(math.isnan, values)):
            self._fail(f"the value of {key!r} holds NaN")
        return list(values)

    def _refuse_split(self) -> None:
        parts = self.metadata.get("split.count")
        if isinstance(parts, int) and parts > 1:
            raise UnsupportedError(
                f"{self._file.path} is one of {parts} parts of a split GGUF; unspool reads whole files. "
                "Join them with llama.cpp: llama-gguf-split --merge FIRST_PART OUT.gguf"
            )

    def _read_locations(self, num_tensors: int) -> dict[str, TensorLocation]:
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 1 <= alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
            self._fail(f"general.alignment is {alignment!r}, not a power of two")
        tensors: dict[str, tuple[TensorInfo, int]] = {}
        for _ in range(num_tensors):
            info, offset = self._read_tensor(alignment)
            if info.name in tensors:
                self._fail(f"the tensor {info.name!r} occurs twice")
            tensors[info.name] = (info, offset)
        data = -(-self._at // alignment) * alignment
        self._check_extents(tensors, data)
        return {name: TensorLocation(info, self._file, data + offset) for name, (info, offset) in tensors.items()}

    def _read_tensor(self, alignment: int) -> tuple[TensorInfo, int]:
        name = self._read_string("a tensor's name", _MAX_NAME_BYTES)
        num_dimensions = self._read_number("I", f"tensor {name!r}")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            self._fail(f"tensor {name!r} has {num_dimensions} dimensions; 1 to {_MAX_DIMENSIONS} can be")
        # ggml counts the fastest dimension first, torch last.
        shape = tuple(self._read_number("Q", f"tensor {name!r}") for _ in range(num_dimensions))[::-1]
        kind = self._read_number("I", f"tensor {name!r}")
        offset = self._read_number("Q", f"tensor {name!r}")
        stored = find_stored_type(_TYPE_NAMES.get(kind, f"the unknown GGUF type {kind}"), name, GGUF_TYPES)
        if min(shape) < 1:
            self._fail(f"tensor {name!r} has the shape {list(shape)}")
        if shape[-1] % stored.block_values:
            self._fail(f"rows of tensor {name!r} ({shape[-1]} values) are not whole blocks of {stored.name}")
        if offset % alignment:
            self._fail(f"tensor {name!r} lies at {offset}, which is no multiple of the alignment {alignment}")
        return TensorInfo(name, shape, stored.name, stored.count_bytes(shape)), offset

    def _check_extents(self, tensors: dict[str, tuple[TensorInfo, int]], data: int) -> None:
        """Raise unless every tensor is inside the file and no two overlap."""
        in_order = sorted(tensors.values(), key=lambda tensor: tensor[1])
        end = 0
        for info, offset in in_order:
            if offset < end:
                self._fail(f"tensor {info.name!r} overlaps the one before it")
            end = offset + info.nbytes
        if in_order and data + end > self._size:
            self._fail(
                f"it has {self._size} bytes and its tensors need {data + end}: "
                f"{data + end - self._size} bytes are missing"
            )

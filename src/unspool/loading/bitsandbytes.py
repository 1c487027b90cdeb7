"""Weights as bitsandbytes saves them: codes of nf4 or fp4, or whole numbers of 8 bits, with their scales.

A matrix of 4 bits is `NAME` (two codes to a byte, the first one in its upper half, row after row), `NAME.absmax`,
`NAME.quant_map` and `NAME.quant_state.bitsandbytes__nf4` (or `__fp4`), JSON. Where the sizes of blocks are quantised
too, `NAME.absmax` has their codes in `NAME.nested_quant_map`, times `NAME.nested_absmax`, plus an offset. A matrix of
8 bits is `MODULE.weight` and `MODULE.SCB`, the largest size of each row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import torch

from unspool.errors import LoadError, UnsupportedError, excerpt
from unspool.kernels.cpu import TABLE_KINDS, AnyRows, TableBlocks, TableKind, read_table, spread_sizes
from unspool.loading.tensors import TensorFile, TensorInfo
from unspool.numeric import is_number
from unspool.small_files import parse_json_object

METHOD: Final = "bitsandbytes"
STORED: Final = {"nf4": "NF4", "fp4": "FP4", "int8": "LLM.int8"}
_MOST_STATE_BYTES: Final = 1 << 16
_GROUPS: Final = tuple(2**power for power in range(5, 17))  # numbers that may share a size
_CHUNK: Final = 1 << 22  # numbers that are dequantised at once
_ROWS_ONLY: Final = 0  # the layout that LLM.int8 saves


@dataclass(frozen=True, slots=True)
class _Codes:
    """A matrix of 4 bits: what its state says."""

    kind: TableKind
    shape: tuple[int, int]
    group: int
    outer_group: int | None  # of sizes that are quantised too
    offset: float


class BitsAndBytesTensors:
    """The tensors of a file with those that bitsandbytes quantised under their own names: numbers if they are read,
    codes if a device's products read those."""

    def __init__(self, tensors: TensorFile, *, is_turned: bool = False) -> None:
        """`is_turned` for models whose own matrices are (in, out): quantised ones are (out, in) even there."""
        self._tensors = tensors
        self._is_turned = is_turned
        self._codes: dict[str, _Codes] = {}
        self._whole: dict[str, str] = {}  # matrices of 8 bits, and where their rows' sizes are
        beside: set[str] = set()
        for name in tensors.names():
            matrix, found, kind = name.partition(".quant_state.bitsandbytes__")
            if found:
                self._codes[matrix] = self._read_state(matrix, name, kind)
                beside |= {name, *(f"{matrix}.{part}" for part in self._name_parts(matrix))}
            elif name.endswith(".SCB"):
                module = name.removesuffix(".SCB")
                self._whole[f"{module}.weight"] = name
                beside |= {name, f"{module}.weight_format"}
                self._check_whole(module, name)
        if not self._codes and not self._whole:
            raise LoadError(
                f"the config says that {METHOD} quantised these weights, and no tensor of them is quantised: take "
                "quantization_config out of config.json, or download the model again"
            )
        self._names = [name for name in tensors.names() if name not in beside]

    def _name_parts(self, matrix: str) -> list[str]:
        nested = ["nested_absmax", "nested_quant_map"] if self._codes[matrix].outer_group is not None else []
        return ["absmax", "quant_map", *nested]

    def _refuse(self, name: str, problem: str) -> NoReturn:
        raise LoadError(f"the quantised matrix {name!r:.200} is not sound: {problem}. Download the model again")

    def _read_state(self, name: str, state_name: str, kind: str) -> _Codes:
        """The state of a matrix of 4 bits; raises unless all that belongs to it has its size."""
        if kind not in TABLE_KINDS:
            raise UnsupportedError(
                f"{name!r:.200} is quantised by {METHOD} as {excerpt(kind)}; {' and '.join(TABLE_KINDS)} are read"
            )
        if self._tensors.info(state_name).nbytes > _MOST_STATE_BYTES:
            self._refuse(name, "its quant_state is too large")
        state = parse_json_object(bytes(self._tensors.raw(state_name).tolist()), f"the quant_state of {name!r:.200}")
        if state.get("quant_type") != kind:
            self._refuse(name, f"its quant_state says {excerpt(state.get('quant_type'))}, its name {kind}")
        shape = state.get("shape")
        if not isinstance(shape, list) or len(shape) != 2 or not all(_is_count(size) for size in shape):
            self._refuse(name, f"its quant_state has no shape of a matrix ({excerpt(shape)})")
        group, outer = state.get("blocksize"), state.get("nested_blocksize")
        if group not in _GROUPS or (outer is not None and outer not in _GROUPS):
            self._refuse(name, f"blocks of {excerpt(group)} numbers (of {excerpt(outer)} sizes) are not known")
        offset = state.get("nested_offset", 0.0) if outer is not None else 0.0
        if not is_number(offset) or not math.isfinite(offset):
            self._refuse(name, f"its nested_offset is {excerpt(offset)}")
        read = _Codes(kind, (shape[0], shape[1]), group, outer, float(offset))  # type: ignore[arg-type]
        self._check_sizes(name, read)
        return read

    def _check_sizes(self, name: str, state: _Codes) -> None:
        numbers = math.prod(state.shape)
        groups = -(-numbers // state.group)
        expected = {"": -(-numbers // 2), ".quant_map": 4 * 16}
        if state.outer_group is None:
            expected[".absmax"] = 4 * groups
        else:
            expected |= {".absmax": groups, ".nested_quant_map": 4 * 256}
            expected[".nested_absmax"] = 4 * -(-groups // state.outer_group)
        for part, size in expected.items():
            if f"{name}{part}" not in self._tensors:
                self._refuse(name, f"{name}{part} is missing")
            found = self._tensors.info(f"{name}{part}")
            if found.nbytes != size:
                what = part.removeprefix(".") or "its codes"
                self._refuse(
                    name, f"{what} have {found.nbytes} bytes, and a matrix {list(state.shape)} needs {size} of them"
                )
            wants_floats = size % 4 == 0 and part in (".quant_map", ".nested_quant_map", ".nested_absmax")
            if (wants_floats or (part == ".absmax" and state.outer_group is None)) and found.stored != "F32":
                self._refuse(name, f"{part.removeprefix('.')} is {found.stored}, not F32")

    def _check_whole(self, module: str, sizes: str) -> None:
        name = f"{module}.weight"
        found = self._tensors.info(name) if name in self._tensors else None
        if found is None or found.stored != "I8" or len(found.shape) != 2:
            self._refuse(name, f"{sizes} belongs to a matrix of 8 bits, and there is none")
        if self._tensors.info(sizes).shape != found.shape[:1] or self._tensors.info(sizes).stored != "F32":
            self._refuse(name, f"{sizes} is {list(self._tensors.info(sizes).shape)} for {found.shape[0]} rows")
        layout = f"{module}.weight_format"
        if layout in self._tensors and (
            self._tensors.info(layout).nbytes != 1 or int(self._tensors.raw(layout)[0]) != _ROWS_ONLY
        ):
            raise UnsupportedError(
                f"{name!r:.200} is laid out for a GPU's matrix units; save the model again with a current {METHOD}"
            )

    # --- the methods of a file ---------------------------------------------------------------------------
    def names(self) -> list[str]:
        """The names of all tensors, without those that belong to a quantised matrix."""
        return list(self._names)

    def __contains__(self, name: object) -> bool:
        return self._is_quantised(str(name)) or name in self._names

    def info(self, name: str) -> TensorInfo:
        """Shape and format of one tensor."""
        own = self._tensors.info(name)
        if not self._is_quantised(name):
            return own
        shape = self._find_shape(name)
        stored = STORED[self._codes[name].kind] if name in self._codes else STORED["int8"]
        return TensorInfo(name, shape[::-1] if self._is_turned else shape, stored, own.nbytes)

    def _is_quantised(self, name: str) -> bool:
        return name in self._codes or name in self._whole

    def _find_shape(self, name: str) -> tuple[int, int]:
        """The shape of a quantised matrix as it lies in the file."""
        rows, columns = self._codes[name].shape if name in self._codes else self._tensors.info(name).shape
        return rows, columns

    def raw(self, name: str) -> torch.Tensor:
        """The stored bytes as a flat uint8 view of the mapped file."""
        return self._tensors.raw(name)

    def read(self, name: str, *, dtype: torch.dtype, rows: tuple[int, int] | None = None) -> torch.Tensor:
        """The tensor, or a range of its rows, dequantised."""
        if not self._is_quantised(name):
            return self._tensors.read(name, dtype=dtype, rows=rows)
        height, width = self.info(name).shape
        first, last = (0, height) if rows is None else rows
        if not 0 <= first <= last <= height:
            raise LoadError(f"rows {first} to {last} of tensor {name!r} don't exist: it has {height}")
        if self._is_turned:
            whole = torch.empty(width, height, dtype=dtype)
            self._write(name, 0, whole)
            return whole.t()[first:last].contiguous()
        out = torch.empty(last - first, width, dtype=dtype)
        self._write(name, first, out)
        return out

    def copy_into(self, name: str, out: torch.Tensor, *, transpose: bool = False) -> None:
        """Write the tensor into `out`, dequantised; a wrong shape is refused."""
        if not self._is_quantised(name):
            self._tensors.copy_into(name, out, transpose=transpose)
            return
        out = out.t() if transpose != self._is_turned else out
        if tuple(out.shape) != self._find_shape(name):
            raise LoadError(f"tensor {name!r} has shape {list(self._find_shape(name))}, not {list(out.shape)}")
        self._write(name, 0, out)

    def _write(self, name: str, first: int, out: torch.Tensor) -> None:
        """Rows from `first` on, dequantised, some at a time."""
        step = max(1, _CHUNK // max(1, out.shape[1]))
        sizes = self._read_sizes(name)
        for at in range(0, out.shape[0], step):
            target = out[at : at + step]
            target.copy_(self._dequantise(name, sizes, first + at, target.shape[0]))

    def _dequantise(self, name: str, sizes: torch.Tensor, first: int, count: int) -> torch.Tensor:
        """Some rows: (count, columns) float32."""
        if name in self._whole:
            width = self._tensors.info(name).shape[1]
            whole = self._tensors.raw(name).view(torch.int8).view(-1, width)[first : first + count]
            return whole.float().mul_(sizes[first : first + count, None]).mul_(torch.tensor(1 / 127))
        state = self._codes[name]
        width = state.shape[1]
        begin, end = first * width, (first + count) * width
        packed = self._tensors.raw(name)[begin // 2 : -(-end // 2)]
        codes = torch.stack((packed >> 4, packed & 15), dim=1).flatten()[begin % 2 :][: end - begin]
        groups = torch.arange(begin, end).div_(state.group, rounding_mode="floor")
        return self._read_map(name, "quant_map")[codes.int()].mul_(sizes[groups]).view(count, width)

    def _read_map(self, name: str, part: str) -> torch.Tensor:
        values = self._tensors.read(f"{name}.{part}", dtype=torch.float32).flatten()
        if not bool(values.isfinite().all()):
            self._refuse(name, f"{part} has infinite numbers")
        return values

    def _read_sizes(self, name: str) -> torch.Tensor:
        """What the numbers of a block, or of a row of 8 bits, are multiplied by: float32."""
        if name in self._whole:
            sizes = self._tensors.read(self._whole[name], dtype=torch.float32).flatten()
        elif (state := self._codes[name]).outer_group is None:
            sizes = self._read_map(name, "absmax")
        else:
            codes = self._tensors.raw(f"{name}.absmax").int()
            outer = self._read_map(name, "nested_absmax").repeat_interleave(state.outer_group)[: len(codes)]
            sizes = self._read_map(name, "nested_quant_map")[codes].mul_(outer).add_(state.offset)
        if not bool(sizes.isfinite().all()):
            self._refuse(name, "a block's size is not finite")
        return sizes

    def blocks(self, name: str) -> AnyRows | None:
        """A quantised matrix's own codes, (out, in), if its numbers are those of a known table and 32 columns share a
        size."""
        if name not in self._codes:
            return None if name in self._whole else self._tensors.blocks(name)
        state = self._codes[name]
        scales = spread_sizes(self._read_sizes(name), state.group, state.shape)
        if scales is None or not torch.equal(self._read_map(name, "quant_map"), read_table(state.kind)):
            return None
        packed = self._tensors.raw(name).view(state.shape[0], -1)
        return TableBlocks((packed >> 4) | (packed << 4), scales, state.kind)

    def release(self, name: str) -> None:
        """Release the memory that reading this tensor mapped in."""
        self._tensors.release(name)

    def finish(self) -> None:
        """Raise for what is known only when everything was copied."""
        self._tensors.finish()

    def close(self) -> None:
        """Close the files; views already returned stay valid."""
        self._tensors.close()


_IN_BY_OUT: Final = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer")
"""Models whose matrices are (in, out), by `model_type`."""


def open_quantised(tensors: TensorFile, config: Mapping[str, Any]) -> BitsAndBytesTensors:
    """The tensors of a model whose config.json says that bitsandbytes quantised them."""
    return BitsAndBytesTensors(tensors, is_turned=config.get("model_type") in _IN_BY_OUT)


def is_bitsandbytes(config: Mapping[str, Any]) -> bool:
    """Whether a config.json says that bitsandbytes quantised the weights."""
    method = config.get("quantization_config")
    return isinstance(method, dict) and method.get("quant_method") == METHOD


def _is_count(size: object) -> bool:
    return type(size) is int and 1 <= size < 1 << 40

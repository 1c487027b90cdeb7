"""compressed-tensors: whole numbers of 4 and 8 bits and floats of 8 bits, as llm-compressor writes them.

https://github.com/neuralmagic/compressed-tensors
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from unspool.errors import LoadError, UnsupportedError, excerpt
from unspool.loading.quantised.format import Format, Found, Method, Parts, count_groups, list_modules
from unspool.loading.quantised.fp8 import MOST_BLOCK, expand_blocks
from unspool.loading.quantised.matrix import Codes, FloatMatrix, GroupedMatrix, QuantisedMatrix, split_words
from unspool.loading.tensors import TensorFile

_FORMATS: Final = ("pack-quantized", "int-quantized", "naive-quantized", "float-quantized", "mixed-precision")
_STRATEGIES: Final = ("tensor", "channel", "group", "block")
_MOST_SCHEMES: Final = 256
# Scales of activations and of keys, which are not quantised here.
_SPARE: Final = tuple(
    f".{name}" for name in ("input_scale", "input_zero_point", "output_scale", "q_scale", "k_scale", "v_scale")
)


@dataclass(frozen=True, slots=True)
class _Scheme:
    """How one group of modules is quantised."""

    bits: int
    is_float: bool
    is_symmetric: bool
    strategy: str
    group_size: int
    block: tuple[int, int]

    def count_groups(self, columns: int) -> int:
        """How many scales a row has."""
        return count_groups(columns, self.group_size) if self.strategy == "group" else 1

    def list_shapes(self, rows: int, columns: int) -> list[tuple[int, ...]]:
        """The shapes that the scales of a matrix may have."""
        if self.strategy == "tensor":
            return [(1,), (), (1, 1)]
        if self.strategy == "block":
            return [(-(-rows // self.block[0]), -(-columns // self.block[1]))]
        groups = self.count_groups(columns)
        return [(rows, groups), (rows,)] if groups == 1 else [(rows, groups)]


@dataclass
class CompressedMatrix(GroupedMatrix):
    """Whole numbers, packed along the columns of a row or one to a byte."""

    words: torch.Tensor  # (rows, words) int32, or (rows, columns) int8
    zeros: torch.Tensor | None  # (rows, groups) int16
    scales: torch.Tensor  # (rows, groups) float32

    def read_codes(self, first: int, end: int) -> Codes:
        """Some rows as they are stored, unpacked; 4 bits count from 0."""
        words, scales = self.words[first:end], self.scales[first:end]
        zeros = torch.zeros(scales.shape, dtype=torch.int16) if self.zeros is None else self.zeros[first:end]
        if words.dtype == torch.int8:
            return Codes(words.to(torch.int16), zeros, scales)
        values = split_words(words, self.bits)[:, : self.shape[1]]
        return Codes(values, zeros + (1 << (self.bits - 1)), scales)


def _find(method: Method, tensors: TensorFile) -> Found:
    method.require("format", _FORMATS, None)
    method.refuse_any("transform_config")
    sparsity = method.values.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("format") not in (None, "dense"):
        method.refuse("sparsity_config", "sparse weights are not read")
    schemes = _read_schemes(method)
    found: dict[str, QuantisedMatrix] = {}
    for module in list_modules(tensors, "weight_packed"):
        found[f"{module}.weight"] = _read_packed(Parts(tensors, module), schemes)
    for module in list_modules(tensors, "weight_scale"):
        if f"{module}.weight" not in found:
            found[f"{module}.weight"] = _read_plain(Parts(tensors, module), schemes)
    return Found(found, frozenset(name for name in tensors.names() if name.endswith(_SPARE)))


def _read_schemes(method: Method) -> list[_Scheme]:
    groups = method.values.get("config_groups")
    if not isinstance(groups, Mapping) or not 1 <= len(groups) <= _MOST_SCHEMES:
        raise LoadError(f"{method.where} has no config_groups that say how its weights are quantised")
    found: list[_Scheme] = []
    for group in groups.values():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping):
            found.append(_read_scheme(weights, f"{method.where}'s config_groups"))
        elif not isinstance(group, Mapping) or weights is not None:
            raise LoadError(f"{method.where} has a group of modules that says nothing of their weights")
    return found


def _read_scheme(weights: Mapping[str, Any], where: str) -> _Scheme:
    def refuse(name: str, known: str) -> UnsupportedError:
        return UnsupportedError(
            f"{where} have {name}={excerpt(weights.get(name))}: weights are read with {known}. Use the unquantised "
            "checkpoint, or a GGUF file of the model"
        )

    bits, kind, strategy = weights.get("num_bits"), weights.get("type", "int"), weights.get("strategy")
    if kind not in ("int", "float"):
        raise refuse("type", "int or float")
    if bits not in ((4, 8) if kind == "int" else (8,)) or not isinstance(bits, int):
        raise refuse("num_bits", "4 or 8" if kind == "int" else "8")
    size = weights.get("group_size")
    strategy = strategy or ("tensor" if size is None else "channel" if size == -1 else "group")
    if strategy not in _STRATEGIES:
        raise refuse("strategy", ", ".join(_STRATEGIES))
    size = -1 if size is None else size
    if isinstance(size, bool) or not isinstance(size, int) or not (size == -1 or 1 <= size <= MOST_BLOCK):
        raise refuse("group_size", f"a whole number up to {MOST_BLOCK}")
    block = weights.get("block_structure") or [1, 1]
    is_pair = isinstance(block, list) and len(block) == 2 and all(type(one) is int for one in block)
    if strategy == "block" and not (is_pair and all(1 <= one <= MOST_BLOCK for one in block)):
        raise refuse("block_structure", f"two whole numbers up to {MOST_BLOCK}")
    symmetric = weights.get("symmetric", True)
    if not isinstance(symmetric, bool):
        raise refuse("symmetric", "true or false")
    return _Scheme(bits, kind == "float", symmetric, strategy, size, (block[0], block[1]))


def _read_packed(parts: Parts, schemes: list[_Scheme]) -> QuantisedMatrix:
    if parts.shape("weight_shape") != (2,):
        parts.fail("weight_shape is not two numbers")
    rows, columns = parts.take("weight_shape", torch.int64, ("I64", "I32"), (2,)).tolist()
    packed = parts.shape("weight_packed")
    if min(rows, columns) < 1 or len(packed) != 2 or packed[0] != rows:
        parts.fail(f"weight_shape says {[rows, columns]}, and weight_packed has {list(packed)}")
    scheme = _choose(parts, schemes, rows, columns, num_words=packed[1])
    words = parts.map("weight_packed", torch.int32, "I32", (rows, -(-columns * scheme.bits // 32)))
    return _make(parts, scheme, (rows, columns), words)


def _read_plain(parts: Parts, schemes: list[_Scheme]) -> QuantisedMatrix:
    shape = parts.shape("weight")
    if len(shape) != 2:
        parts.fail(f"weight has {len(shape)} dimensions")
    rows, columns = shape
    if parts.stored("weight") != "F8_E4M3":
        scheme = _choose(parts, schemes, rows, columns)
        return _make(parts, scheme, (rows, columns), parts.map("weight", torch.int8, "I8", (rows, columns)))
    scheme = _choose(parts, schemes, rows, columns, is_float=True)
    values = parts.map("weight", torch.float8_e4m3fn, "F8_E4M3", (rows, columns))
    if scheme.strategy == "block":
        block = scheme.block
    else:
        block = (rows if scheme.strategy == "tensor" else 1, -(-columns // scheme.count_groups(columns)))
    scales = parts.take_scales("weight_scale", parts.shape("weight_scale"))
    return FloatMatrix(
        (rows, columns), tuple(parts.names), values, expand_blocks(parts, scales, (rows, columns), block), block
    )


def _choose(
    parts: Parts,
    schemes: list[_Scheme],
    rows: int,
    columns: int,
    *,
    num_words: int | None = None,  # of a packed row
    is_float: bool = False,
) -> _Scheme:
    """The first scheme that the sizes of a module's tensors agree with."""
    scales = parts.shape("weight_scale")
    has_zeros = parts.has("weight_zero_point")
    for scheme in schemes:
        fits_words = num_words in (None, -(-columns * scheme.bits // 32))
        fits_zeros = scheme.is_symmetric or has_zeros
        if scheme.is_float == is_float and fits_words and fits_zeros and scales in scheme.list_shapes(rows, columns):
            return scheme
    missing = "" if has_zeros else ", and there is no weight_zero_point"
    return parts.fail(
        f"the config has no scheme for weights of {[rows, columns]} with scales of {list(scales)}{missing}"
    )


def _make(parts: Parts, scheme: _Scheme, shape: tuple[int, int], words: torch.Tensor) -> QuantisedMatrix:
    rows, columns = shape
    if scheme.strategy == "block":
        parts.fail("whole numbers have no blocks of rows and columns")
    groups = scheme.count_groups(columns)
    scales = parts.take_scales("weight_scale", parts.shape("weight_scale"))
    scales = scales.reshape(-1, groups).expand(rows, groups)
    zeros = None
    if not scheme.is_symmetric:
        zeros = _read_zeros(parts, scheme, rows, groups)
    group_of = None
    if parts.has("weight_g_idx") and scheme.strategy == "group":
        group_of = parts.take_groups("weight_g_idx", columns, groups)
    elif parts.has("weight_zero_point") and scheme.is_symmetric:
        parts.names.append(f"{parts.module}.weight_zero_point")  # zeros, which say nothing
    return CompressedMatrix(shape, tuple(parts.names), scheme.bits, groups, group_of, words, zeros, scales)


def _read_zeros(parts: Parts, scheme: _Scheme, rows: int, groups: int) -> torch.Tensor:
    if parts.stored("weight_zero_point") == "I8":
        found = parts.take("weight_zero_point", torch.int8, ("I8",), parts.shape("weight_zero_point"))
        if found.numel() not in (1, rows * groups):
            parts.fail(f"weight_zero_point has {found.numel()} numbers, where there are {rows * groups} groups")
        return found.to(torch.int16).reshape(-1, groups if found.numel() > 1 else 1).expand(rows, groups)
    packed = parts.take("weight_zero_point", torch.int32, ("I32",), (-(-rows * scheme.bits // 32), groups))
    return split_words(packed.t(), scheme.bits)[:, :rows].t() - (1 << (scheme.bits - 1))


COMPRESSED_TENSORS: Final = Format("compressed-tensors", _find)

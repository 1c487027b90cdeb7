"""The tensors of a quantised checkpoint under the names that an unquantised one has."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from unspool.errors import LoadError
from unspool.kernels.cpu import AnyRows
from unspool.loading.quantised.awq import AWQ
from unspool.loading.quantised.bitsandbytes import BITSANDBYTES, TableMatrix
from unspool.loading.quantised.compressed_tensors import COMPRESSED_TENSORS
from unspool.loading.quantised.format import Format, Method
from unspool.loading.quantised.fp8 import FP8
from unspool.loading.quantised.gptq import GPTQ
from unspool.loading.quantised.matrix import GroupedMatrix, QuantisedMatrix
from unspool.loading.tensors import TensorFile, TensorInfo
from unspool.small_files import read_json_object

FORMATS: Final[dict[str, Format]] = {one.name: one for one in (GPTQ, AWQ, COMPRESSED_TENSORS, FP8, BITSANDBYTES)}
_OLD_SETTINGS: Final = "quantize_config.json"  # of GPTQ before transformers had a place for it
# Modules whose matrices checkpoints have as (inputs, outputs), which tools quantise as (outputs, inputs).
_TURNED: Final = {"gpt2": (".c_attn.weight", ".c_proj.weight", ".c_fc.weight")}


def open_quantised(config: dict[str, Any], tensors: TensorFile, folder: Path) -> tuple[dict[str, Any], TensorFile]:
    """A config without its quantization_config, and tensors under plain names; both as they are for other methods."""
    values = config.get("quantization_config")
    where = "config.json's quantization_config"
    if values is None and (folder / _OLD_SETTINGS).is_file():
        where = _OLD_SETTINGS
        values = {"quant_method": "gptq", **read_json_object(folder / _OLD_SETTINGS)}
    if not isinstance(values, Mapping):
        return config, tensors
    name = values.get("quant_method")
    if not isinstance(name, str) or name not in FORMATS:
        return config, tensors
    method = Method(values, where)
    turned = _TURNED.get(str(config.get("model_type")), ())
    plain = {name: value for name, value in config.items() if name != "quantization_config"}
    return plain, QuantisedTensors(tensors, FORMATS[name], method, turned)


class QuantisedTensors:
    """A file of weights in which some matrices are quantised: the methods of TensorFile, matrices by plain names."""

    def __init__(self, tensors: TensorFile, found: Format, method: Method, turned: tuple[str, ...] = ()) -> None:
        self.method = method.name
        self._tensors = tensors
        self._turned = turned
        read = found.find(method, tensors)
        self._matrices: dict[str, QuantisedMatrix] = read.matrices
        if not read.matrices:
            raise LoadError(f"{method.where} says that weights are quantised by {method.name}, and none of them is")
        parts = {part for matrix in read.matrices.values() for part in matrix.parts}
        plain = [name for name in tensors.names() if name not in parts and name not in read.spare]
        self._names = [*plain, *read.matrices]
        twice = next((name for name in plain if name in read.matrices), None)
        if twice is not None:
            raise LoadError(f"the weights have {twice!r} both plain and quantised")

    @property
    def has_integers(self) -> bool:
        """Whether matrices are whole numbers of few bits, as the blocks are that products read."""
        return any(isinstance(matrix, GroupedMatrix) for matrix in self._matrices.values())

    @property
    def has_codes(self) -> bool:
        """Whether matrices are codes of nf4 or fp4."""
        return any(isinstance(matrix, TableMatrix) for matrix in self._matrices.values())

    @property
    def plain_names(self) -> list[str]:
        """The tensors that are not quantised."""
        return [name for name in self._names if name not in self._matrices]

    def names(self) -> list[str]:
        """The names of all tensors, as an unquantised checkpoint has them."""
        return list(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._matrices or (name in self._tensors and name in self._names)

    def info(self, name: str) -> TensorInfo:
        """Shape and format of one tensor."""
        matrix = self._matrices.get(name)
        if matrix is None:
            return self._tensors.info(name)
        nbytes = sum(self._tensors.info(part).nbytes for part in matrix.parts)
        shape = matrix.shape[::-1] if name.endswith(self._turned) else matrix.shape
        return TensorInfo(name, shape, self.method, nbytes)

    def read(self, name: str, *, dtype: torch.dtype, rows: tuple[int, int] | None = None) -> torch.Tensor:
        """A tensor, or a range of its rows; a matrix is dequantised."""
        if name not in self._matrices:
            return self._tensors.read(name, dtype=dtype, rows=rows)
        out = torch.empty(self.info(name).shape, dtype=dtype)
        self.copy_into(name, out)
        return out if rows is None else out[rows[0] : rows[1]]

    def copy_into(self, name: str, out: torch.Tensor, *, transpose: bool = False) -> None:
        """Write a tensor into `out`; a matrix is dequantised a few rows at a time."""
        matrix = self._matrices.get(name)
        if matrix is None:
            self._tensors.copy_into(name, out, transpose=transpose)
            return
        is_turned = transpose != name.endswith(self._turned)
        target = out.t() if is_turned else out
        if tuple(target.shape) != matrix.shape:
            raise LoadError(f"tensor {name!r} has shape {list(matrix.shape)}, not {list(target.shape)}")
        for first in range(0, matrix.shape[0], matrix.rows_at_once):
            end = min(first + matrix.rows_at_once, matrix.shape[0])
            numbers = matrix.read_rows(first, end)
            if bool(numbers.isnan().any()):
                raise LoadError(f"the quantised matrix {name!r} holds NaN: download it again")
            target[first:end].copy_(numbers)

    def blocks(self, name: str) -> AnyRows | None:
        """A matrix in the form that products read, if its own bits have it."""
        matrix = self._matrices.get(name)
        if matrix is None:
            return self._tensors.blocks(name)
        return None if name.endswith(self._turned) else matrix.find_blocks()

    def raw(self, name: str) -> torch.Tensor:
        """The stored bytes of a tensor that is not quantised."""
        return self._tensors.raw(name)

    def release(self, name: str) -> None:
        """Release the memory that reading this tensor mapped in."""
        matrix = self._matrices.get(name)
        for part in (name,) if matrix is None else matrix.parts:
            self._tensors.release(part)

    def finish(self) -> None:
        """Raise for what is known only when everything was copied."""
        self._tensors.finish()

    def close(self) -> None:
        """Close the files."""
        self._tensors.close()

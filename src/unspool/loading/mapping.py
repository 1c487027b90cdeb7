"""Files mapped into memory, and reading tensors out of them: the part GGUF and safetensors share."""

from __future__ import annotations

import mmap
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch

from unspool.errors import LoadError, UnspoolError
from unspool.kernels.cpu import AnyRows, find_layouts, read_blocks, read_stored, read_supers
from unspool.loading.codebooks import CODED, read_coded
from unspool.loading.dequantize import CHUNK_BYTES, STORED_TYPES, StoredType, iterate_rows
from unspool.loading.staging import Staging
from unspool.loading.tensors import TensorInfo
from unspool.small_files import open_regular

# A private mapping is writable, as torch wants its buffers, without ever reaching the file. Reserving no
# swap for it lets a file larger than memory be mapped. Python names the flag from 3.13 on.
_KNOWN_NORESERVE = 0x4000 if platform.machine() in ("x86_64", "aarch64") else 0
LARGE_CHUNK_BYTES = 256 << 20  # for a device that takes plain numbers as they are: each chunk is waited for
_IS_LINUX = platform.system() == "Linux"
_NORESERVE: int = getattr(mmap, "MAP_NORESERVE", _KNOWN_NORESERVE)


def _map_file(path: Path) -> mmap.mmap:
    try:
        with open_regular(path) as file:
            if _IS_LINUX:
                return mmap.mmap(
                    file.fileno(),
                    0,
                    flags=mmap.MAP_PRIVATE | _NORESERVE,
                    prot=mmap.PROT_READ | mmap.PROT_WRITE,
                )
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except UnspoolError:
        raise
    except ValueError:  # mmap refuses an empty file
        raise LoadError(f"{path} is empty: download it again") from None
    except OSError as error:
        raise LoadError(f"{path} can't be read: {error.strerror or error}") from error


class MappedFile:
    """One file mapped into memory, as a buffer for the header and as a uint8 tensor for the weights."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.buffer = _map_file(path)
        self.size = len(self.buffer)
        # torch keeps the mapping alive for as long as any view of it lives; it is never closed by hand.
        self.tensor = torch.frombuffer(self.buffer, dtype=torch.uint8)  # (size,)

    def release(self, start: int, length: int) -> None:
        """Drop the pages that lie wholly in a range; they come back from the file when read again."""
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (start + length) // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first and hasattr(mmap, "MADV_DONTNEED"):
            self.buffer.madvise(mmap.MADV_DONTNEED, first, last - first)


@dataclass(frozen=True, slots=True)
class TensorLocation:
    """The location of a tensor's bytes."""

    info: TensorInfo
    file: MappedFile
    offset: int


class MappedTensors:
    """Named tensors in mapped files: the methods of TensorFile over a table of locations."""

    def __init__(self, location: Path, locations: dict[str, TensorLocation]) -> None:
        self.location = location
        self._locations = locations
        self._lent: set[str] = set()  # tensors of which read() returned a view
        self._staging: Staging | None = None  # for the last GPU that tensors were copied to

    def names(self) -> list[str]:
        """The names of all tensors, in the order of the file."""
        return list(self._locations)

    def __contains__(self, name: object) -> bool:
        return name in self._locations

    def _find(self, name: str) -> TensorLocation:
        found = self._locations.get(name)
        if found is None:
            raise LoadError(f"{self.location} has no tensor {name!r} (it has {len(self._locations)} others)")
        return found

    def info(self, name: str) -> TensorInfo:
        """Shape and format of one tensor."""
        return self._find(name).info

    def raw(self, name: str) -> torch.Tensor:
        """The stored bytes as a flat uint8 view of the mapped file."""
        found = self._find(name)
        return found.file.tensor[found.offset : found.offset + found.info.nbytes]

    def read(self, name: str, *, dtype: torch.dtype, rows: tuple[int, int] | None = None) -> torch.Tensor:
        """The tensor, or a range of its rows, as `dtype`: a view of the file if nothing is converted."""
        info = self.info(name)
        stored = STORED_TYPES[info.stored]
        raw, shape = self.raw(name), info.shape
        if rows is not None:
            first, last = _check_rows(info, rows)
            if len(shape) == 1 and stored.block_values > 1:  # its blocks would cross rows
                return self.read(name, dtype=dtype)[first:last]
            raw = raw.view(shape[0], -1)[first:last].flatten() if raw.numel() else raw
            shape = (last - first, *shape[1:])
        if stored.dtype == dtype and raw.storage_offset() % stored.block_bytes == 0:
            view = raw.view(dtype).view(shape)
            for _, chunk in iterate_rows(_as_matrix(raw, shape, stored), stored):
                self._check_numbers(name, chunk)
            self._lent.add(name)
            return view
        out = torch.empty(shape, dtype=dtype)
        self._convert(name, raw, stored, out)
        return out

    def copy_into(self, name: str, out: torch.Tensor, *, transpose: bool = False) -> None:
        """Convert the tensor into `out`, whatever its dtype and device, a few megabytes at a time."""
        info = self.info(name)
        expected = tuple(out.shape)
        if transpose:
            if out.dim() != 2 or len(info.shape) != 2:
                raise LoadError(
                    f"tensor {name!r} of {self.location} has shape {list(info.shape)} and goes to "
                    f"{list(expected)}: only matrices can be transposed"
                )
            out = out.t()
        if tuple(out.shape) != info.shape:
            found = info.shape[::-1] if transpose else info.shape
            turned = " once transposed" if transpose else ""
            raise LoadError(
                f"tensor {name!r} of {self.location} has the wrong shape: "
                f"expected {list(expected)}, found {list(found)}{turned}. "
                "Do the config and the weights belong together?"
            )
        self._convert(name, self.raw(name), STORED_TYPES[info.stored], out)

    def _convert(self, name: str, raw: torch.Tensor, stored: StoredType, out: torch.Tensor) -> None:
        if out.numel() == 0:
            return
        if out.dim() > 2 and not out.is_contiguous():  # a part of a larger tensor: one matrix at a time
            for part, target in zip(raw.view(out.shape[0], -1), out, strict=True):
                self._convert(name, part, stored, target)
            return
        if out.is_cuda and out.dtype == stored.dtype and out.is_contiguous():
            if self._staging is None or self._staging.device != out.device:
                self.finish()
                self._staging = Staging(out.device)
            self._staging.send(name, raw, out)
            return
        matrix = _as_matrix(raw, tuple(out.shape), stored)
        target = out if out.dim() == 2 else out.view(matrix.shape[0], -1)
        size = CHUNK_BYTES if out.device.type == "cpu" or stored.unpack is not None else LARGE_CHUNK_BYTES
        for first, chunk in iterate_rows(matrix, stored, size):
            self._check_numbers(name, chunk)
            target[first : first + chunk.shape[0]].copy_(chunk)

    def finish(self) -> None:
        """Raise if what was copied to a GPU holds NaN: it is looked for there, once for all tensors."""
        if self._staging is None:
            return
        suspects = self._staging.find_suspects()
        self._staging.close()
        self._staging = None
        for name in suspects:
            info = self.info(name)
            stored = STORED_TYPES[info.stored]
            for _, chunk in iterate_rows(_as_matrix(self.raw(name), info.shape, stored), stored):
                self._check_numbers(name, chunk)

    def _check_numbers(self, name: str, chunk: torch.Tensor) -> None:
        if chunk.dtype == torch.float8_e4m3fn:
            chunk = chunk.half()  # which has operators
        # One NaN makes the sum NaN. Infinities and overflow can do so too, hence the second, slower look.
        if chunk.is_floating_point() and not chunk.sum(dtype=torch.float32).isfinite() and chunk.isnan().any():
            self._refuse_nan(name)

    def _refuse_nan(self, name: str) -> NoReturn:
        raise LoadError(
            f"tensor {name!r} of {self.location} holds NaN: the file is damaged or was saved from a "
            "diverged training run. Download or convert it again"
        )

    def blocks(self, name: str) -> AnyRows | None:
        """A quantised tensor's own blocks, if they have a form that products read; NaN is refused."""
        info, raw = self.info(name), self.raw(name)
        library = find_layouts()
        try:
            if info.stored in CODED:
                return read_coded(raw, info.stored, info.shape)
            if library is not None:
                return read_stored(library, raw, info.stored, info.shape)
        except FloatingPointError:
            self._refuse_nan(name)
        found = read_supers(raw, info.stored, info.shape) or read_blocks(raw, info.stored, info.shape)
        for halves in found.halves if found is not None else ():
            self._check_numbers(name, halves)
        return found

    def release(self, name: str) -> None:
        """Release the memory that reading this tensor mapped in.

        A tensor that read() returned as a view is kept: its holder may have written to it.
        """
        found = self._find(name)
        if name not in self._lent:
            found.file.release(found.offset, found.info.nbytes)

    def close(self) -> None:
        """Close the files; views already returned stay valid."""
        self._locations = {}


def _check_rows(info: TensorInfo, rows: tuple[int, int]) -> tuple[int, int]:
    count = info.shape[0] if info.shape else 0
    if not 0 <= rows[0] <= rows[1] <= count:
        raise LoadError(f"rows {rows[0]} to {rows[1]} of tensor {info.name!r} don't exist: it has {count}")
    return rows


def _as_matrix(raw: torch.Tensor, shape: tuple[int, ...], stored: StoredType) -> torch.Tensor:
    """Bytes as (rows, bytes per row); a plain vector is rows of one number, so that it is chunked too."""
    if raw.numel() == 0:
        return raw.view(0, stored.block_bytes)
    if len(shape) < 2:
        return raw.view(-1, stored.block_bytes) if stored.block_values == 1 else raw.view(1, -1)
    return raw.view(-1, shape[-1] // stored.block_values * stored.block_bytes)

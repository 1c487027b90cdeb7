"""Where offloaded keys lie: in pinned memory that a GPU reads through the link, or in temporary files without a GPU."""

from __future__ import annotations

import errno
import math
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from unspool.errors import ResourceError


class _Pinned:
    """Pinned memory under the name by which other libraries offer a GPU's: torch makes a tensor of the GPU of it."""

    def __init__(self, held: torch.Tensor) -> None:
        self._held = held  # lives as long as the tensor that is made of this
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (held.numel(),),
            "typestr": "|u1",
            "data": (held.data_ptr(), False),
            "version": 3,
        }


def take_linked(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros in the host's memory, as a tensor of the GPU `device`: every operator works on it, at the link's speed."""
    nbytes = math.prod(shape) * dtype.itemsize
    if not nbytes:
        return torch.zeros(shape, dtype=dtype, device=device)
    held = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)
    return torch.as_tensor(_Pinned(held), device=device).view(dtype).view(shape)


def take_mapped(shape: tuple[int, ...], dtype: torch.dtype, folder: str | Path | None = None) -> torch.Tensor:
    """Zeros in a file of their own, which is gone when nothing uses it any more, whatever happens to the program."""
    nbytes = math.prod(shape) * dtype.itemsize
    if not nbytes:
        return torch.zeros(shape, dtype=dtype)
    where = Path(folder) if folder is not None else Path(tempfile.gettempdir())
    try:
        handle, name = tempfile.mkstemp(prefix="unspool-keys-", dir=where)
    except OSError as error:
        raise ResourceError(f"keys can't be offloaded to {where}: {error.strerror or error}") from error
    try:
        _reserve(handle, nbytes)
        return torch.from_file(name, shared=True, size=math.prod(shape), dtype=dtype).view(shape)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        free = os.statvfs(where).f_bavail * os.statvfs(where).f_frsize if hasattr(os, "statvfs") else 0
        raise ResourceError(
            f"offloading keys needs {nbytes / 2**20:.0f} MiB more in {where}, and {free / 2**20:.0f} MiB are free; "
            "make room, name another folder (cache_config={'folder': …}), or use a shorter text"
        ) from error
    finally:
        os.close(handle)
        Path(name).unlink()  # the mapping keeps the memory; no name is left behind


def _reserve(handle: int, nbytes: int) -> None:
    """Have the disk promise the space now: a full disk must be an error here, not a crash at a later write."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(handle, 0, nbytes)
    else:
        os.truncate(handle, nbytes)

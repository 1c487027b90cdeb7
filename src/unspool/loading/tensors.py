"""The interface of a file of weights, for every format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from unspool.kernels.cpu import AnyRows


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A stored tensor: its shape in torch's order (rows first) and the format its bytes are in."""

    name: str
    shape: tuple[int, ...]
    stored: str  # "F32", "F16", "BF16", "Q4_1", …
    nbytes: int


class TensorFile(Protocol):
    """A file, or a set of shards, that holds named weights and converts them on reading."""

    def names(self) -> list[str]:
        """The names of all tensors, in the order of the file."""
        ...

    def info(self, name: str) -> TensorInfo:
        """Shape and format of one tensor; LoadError if the file has none of that name."""
        ...

    def __contains__(self, name: object) -> bool: ...

    def read(self, name: str, *, dtype: torch.dtype, rows: tuple[int, int] | None = None) -> torch.Tensor:
        """The tensor (or rows `first` to `last`, exclusive) as `dtype`; NaN is refused.

        If nothing has to be converted, this is a view of the mapped file.
        """
        ...

    def copy_into(self, name: str, out: torch.Tensor, *, transpose: bool = False) -> None:
        """Convert the tensor into `out`, a few megabytes at a time; a wrong shape and NaN are refused.

        NaN that goes to a GPU as it is may be refused by `finish`.
        """
        ...

    def blocks(self, name: str) -> AnyRows | None:
        """A quantised tensor's own blocks, if they have the form that products read; NaN is refused."""
        ...

    def raw(self, name: str) -> torch.Tensor:
        """The stored bytes as a flat uint8 view of the mapped file."""
        ...

    def release(self, name: str) -> None:
        """Release the memory that reading this tensor mapped in; it can still be read again."""
        ...

    def finish(self) -> None:
        """Raise for what is known only when everything was copied: call it at the end."""
        ...

    def close(self) -> None:
        """Close the files; views already returned stay valid."""
        ...

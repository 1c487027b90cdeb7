"""What a format of quantised checkpoints is: how its settings are checked, and its matrices found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from unspool.errors import LoadError, UnsupportedError, excerpt
from unspool.loading.quantised.matrix import QuantisedMatrix
from unspool.loading.tensors import TensorFile


@dataclass(frozen=True, slots=True)
class Found:
    """The matrices of a checkpoint by their plain names, and tensors that say nothing of its weights."""

    matrices: dict[str, QuantisedMatrix]
    spare: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Format:
    """One way in which tools write quantised weights."""

    name: str  # the config's quant_method
    find: Callable[[Method, TensorFile], Found]


class Method:
    """A checkpoint's quantization_config, read value by value."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    @property
    def name(self) -> str:
        """The quant_method."""
        return str(self.values.get("quant_method"))

    def refuse(self, setting: str, mend: str) -> NoReturn:
        """Raise for a setting with a value that is not read."""
        raise UnsupportedError(
            f"{self.where} has {setting}={excerpt(self.values.get(setting))}: {mend}. Or use the unquantised "
            "checkpoint, or a GGUF file of the model"
        )

    def require(self, setting: str, known: tuple[Any, ...], default: Any) -> Any:
        """A setting's value, which must be one of those that are known."""
        value = self.values.get(setting)
        value = default if value is None else value
        if not any(type(value) is type(one) and value == one for one in known):
            self.refuse(setting, f"{self.name} weights are read with {' or '.join(map(str, known))}")
        return value

    def refuse_any(self, *settings: str) -> None:
        """Raise for settings that change what the weights are and are not read."""
        for setting in settings:
            if self.values.get(setting):
                self.refuse(setting, f"{self.name} weights with it are not read")


class Parts:
    """The tensors of one matrix, each checked before it is read."""

    def __init__(self, tensors: TensorFile, module: str) -> None:
        self._tensors = tensors
        self.module = module
        self.names: list[str] = []

    def has(self, part: str) -> bool:
        """Whether the matrix has a tensor of that name."""
        return f"{self.module}.{part}" in self._tensors

    def shape(self, part: str) -> tuple[int, ...]:
        """The shape of a tensor, which must be there."""
        name = f"{self.module}.{part}"
        if name not in self._tensors:
            self.fail(f"{part} is missing")
        return self._tensors.info(name).shape

    def stored(self, part: str) -> str:
        """The format of a tensor's numbers."""
        self.shape(part)
        return self._tensors.info(f"{self.module}.{part}").stored

    def _claim(self, part: str, stored: tuple[str, ...], shape: tuple[int, ...]) -> str:
        """The name of a tensor, which must be of one of the formats and of that shape."""
        found = self.shape(part)
        if found != shape:
            self.fail(
                f"{part} has the shape {list(found)}, where the config and the other tensors make it {list(shape)}"
            )
        if self.stored(part) not in stored:
            self.fail(f"{part} is stored as {self.stored(part)}, not as {' or '.join(stored)}")
        self.names.append(f"{self.module}.{part}")
        return self.names[-1]

    def take(self, part: str, dtype: torch.dtype, stored: tuple[str, ...], shape: tuple[int, ...]) -> torch.Tensor:
        """A small tensor of one of the formats and of that shape."""
        return self._tensors.read(self._claim(part, stored, shape), dtype=dtype)

    def map(self, part: str, dtype: torch.dtype, stored: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A large one where the file has it, unchecked for NaN; its memory can be released and is read again."""
        raw = self._tensors.raw(self._claim(part, (stored,), shape))
        aligned = raw if raw.storage_offset() % dtype.itemsize == 0 else raw.clone()
        return aligned.view(dtype).view(shape)

    def take_scales(self, part: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Scales as float32, all of them finite."""
        scales = self.take(part, torch.float32, ("F32", "F16", "BF16"), shape)
        if not bool(scales.isfinite().all()):
            self.fail(f"{part} holds a number that is not finite")
        return scales

    def take_groups(self, part: str, columns: int, num_groups: int) -> torch.Tensor:
        """The group of each column."""
        groups = self.take(part, torch.int32, ("I32",), (columns,)).long()
        if columns and not 0 <= int(groups.min()) <= int(groups.max()) < num_groups:
            self.fail(
                f"{part} names groups from {int(groups.min())} to {int(groups.max())}, and there are {num_groups}"
            )
        return groups

    def fail(self, problem: str) -> NoReturn:
        """Raise the error for tensors that do not belong together."""
        raise LoadError(
            f"the quantised matrix {self.module!r:.200} is not sound: {problem}. Do the config and the weights belong "
            "together? Else download them again"
        )


def list_modules(tensors: TensorFile, part: str) -> list[str]:
    """The modules that have a tensor of that name."""
    return [name.removesuffix(f".{part}") for name in tensors.names() if name.endswith(f".{part}")]


def count_groups(columns: int, group_size: int) -> int:
    """How many groups the columns make; a size of -1 stands for one group."""
    return 1 if group_size == -1 else -(-columns // group_size)

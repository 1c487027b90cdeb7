"""Caches in files: safetensors, with what the cache is and which model it was made by in the header."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from unspool.errors import LoadError, ResourceError, SettingError, UnspoolError, UnsupportedError
from unspool.numeric import is_number
from unspool.registry import resolve
from unspool.shortage import is_out_of_memory
from unspool.small_files import explain_unwritten, writing_beside

FORMAT: Final = "unspool cache 1"
MOST_FACTS: Final = 1 << 24  # characters of a header's facts
MOST_NUMBER: Final = 1 << 40  # of any number in them
# Memory that a file may ask for beyond what it holds: room for positions to come, which nothing in it proves.
MOST_EMPTY_BYTES: Final = 1 << 29
MOST_ROOM: Final = 1024  # times what it holds


class Savable:
    """What can be taken apart into facts and tensors, and put together again."""

    lengths: list[int]

    def save(self, path: str | Path, *, model: Any = None) -> None:
        """Write the cache to a safetensors file; with `model`, the file is for that model alone."""
        save_cache(self, path, model=model)

    def _pack(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """What it takes to make the cache again: facts that JSON can hold, and tensors."""
        raise UnsupportedError(f"a {type(self).__name__} can't be saved")

    @classmethod
    def _unpack(
        cls,
        facts: dict[str, Any],
        tensors: dict[str, torch.Tensor],
        lengths: list[int],
    ) -> Any:
        """The cache that `_pack` took apart; raises a ValueError for parts that do not belong together."""
        raise UnsupportedError(f"a {cls.__name__} can't be loaded")


def check_room(num_bytes: int, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise a ValueError if a file asks for far more memory than the tensors it holds need."""
    held = sum(tensor.nbytes for tensor in tensors.values())
    if num_bytes > max(MOST_EMPTY_BYTES, MOST_ROOM * held):
        raise ValueError(f"room for {num_bytes / 2**30:.1f} GiB is asked for, and {held / 2**20:.1f} MiB are there")


def list_saved() -> dict[str, type[Savable]]:
    """The classes that files may name: those of the kinds' entries."""
    kinds = resolve("unspool.cache.kinds:KINDS")
    return {made.__name__: made for entry in kinds.values() for made in entry.types}


@dataclass(frozen=True, slots=True)
class SavedCache:
    """What a file holds: the cache, and what was noted beside it."""

    cache: Any
    notes: dict[str, Any]


def save_cache(cache: Savable, path: str | Path, *, model: Any = None, notes: Mapping[str, Any] | None = None) -> None:
    """Write a cache to a file; with `model`, the file is for that model alone."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    if type(cache).__name__ not in list_saved():
        raise SettingError(f"a {type(cache).__name__} can't be saved; those that can are {', '.join(list_saved())}")
    facts, tensors = cache._pack()
    header = {
        "format": FORMAT,
        "kind": type(cache).__name__,
        "model": find_fingerprint(model),
        "lengths": json.dumps(cache.lengths),
        "facts": json.dumps(facts),
        "notes": json.dumps(dict(notes or {})),
    }
    plain = {name: tensor.detach().to("cpu").contiguous().clone() for name, tensor in tensors.items()}
    with writing_beside(Path(path)) as unfinished:
        try:
            save_file(plain, str(unfinished), metadata=header)
        except SafetensorError as error:  # wraps what the system says
            raise ResourceError(explain_unwritten(Path(path), error)) from error


def load_cache(path: str | Path, *, model: Any = None, device: torch.device | str | None = None) -> SavedCache:
    """Read a cache from a file; with `model`, one that another model made is refused, and its device is taken."""
    header, tensors = _read_file(Path(path))
    kind = list_saved().get(header.get("kind", ""))
    if kind is None:
        raise LoadError(f"{path} holds a cache of kind {header.get('kind', '')[:60]!r}, which this version can't read")
    made_by, asked_by = header.get("model", ""), find_fingerprint(model)
    if asked_by and made_by and made_by != asked_by:
        raise SettingError(
            f"{path} was made by the model {made_by}, and this one is {asked_by}: keys mean nothing to another model. "
            "Make the cache again with this one"
        )
    where = device if device is not None else getattr(model, "device", None)
    moved = {name: tensor.to(where) if where is not None else tensor for name, tensor in tensors.items()}
    try:
        lengths = _read_lengths(header)
        cache = kind._unpack(_read_facts(header), moved, lengths)
        notes = json.loads(header.get("notes", "{}"))
    except (LookupError, TypeError, ValueError, ArithmeticError, RuntimeError, AttributeError) as error:
        if is_out_of_memory(error):
            raise
        raise LoadError(f"{path} is damaged: its parts do not make a {kind.__name__} ({error})") from error
    return SavedCache(cache, notes if isinstance(notes, dict) else {})


def find_fingerprint(model: Any) -> str:
    """What a model is known by; empty if it does not say."""
    core = getattr(model, "model", model) if hasattr(model, "tokenizer") else model
    return str(getattr(core, "fingerprint", "") or "")


def _read_file(path: Path) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    from safetensors import safe_open

    if not path.is_file():
        raise LoadError(f"there is no file {str(path)!r}")
    try:
        with safe_open(str(path), framework="pt") as file:
            header = file.metadata() or {}
            if header.get("format") != FORMAT:
                raise LoadError(
                    f"{path} is no saved cache: its format is not {FORMAT!r}. cache.save() makes such files"
                )
            names = file.keys()
            return header, {name: file.get_tensor(name) for name in names}
    except UnspoolError:
        raise
    except Exception as error:  # the library's, the system's, and torch's for shapes that can't be
        if is_out_of_memory(error):
            raise
        raise LoadError(f"{path} can't be read as safetensors: {error}") from error


def _read_facts(header: Mapping[str, str]) -> Any:
    """What a kind wrote of itself; numbers are finite and of usual size."""
    facts = json.loads(header["facts"])
    stack = [facts]
    while stack:
        part = stack.pop()
        if isinstance(part, dict):
            stack += part.values()
        elif isinstance(part, list):
            stack += part
        elif (
            not isinstance(part, bool)
            and isinstance(part, int | float)
            and not (is_number(part) and abs(part) <= MOST_NUMBER)
        ):
            raise ValueError("a number in its header is beyond all bounds")
    return facts


def _read_lengths(header: Mapping[str, str]) -> list[int]:
    if len(header["facts"]) > MOST_FACTS or len(header["lengths"]) > MOST_FACTS:
        raise ValueError("its header is too long")
    lengths = json.loads(header["lengths"])
    if not isinstance(lengths, list) or not all(type(n) is int and 0 <= n <= MOST_NUMBER for n in lengths):
        raise ValueError("its lengths are no list of whole numbers")
    return lengths

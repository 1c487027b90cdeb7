"""The program that `pickled` runs: reads a PyTorch checkpoint and writes its tensors as safetensors, within limits.

Both files are open when it starts. From then on it can open no other, reach no network and start no process: a limit of
the system lets it have no new file descriptor, and on Linux every system call that it does not need is refused. It
imports nothing of unspool.
"""

from __future__ import annotations

import ctypes
import io
import json
import os
import platform
import re
import struct
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

_STORED: Final = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
_NESTED: Final = ("state_dict", "model", "module")  # under which trainers put the weights
_GROWTH: Final = 2  # what may be written of a file's bytes: tensors that share memory are written each
_SLACK: Final = 64 << 20
_PIECE: Final = 16 << 20
# System calls of a program that computes, reads and writes files that are open, and ends.
_CALLS: Final[dict[str, tuple[int, tuple[int, ...]]]] = {
    "x86_64": (
        0xC000003E,
        (
            *(0, 1, 3, 5, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 24, 25, 28, 35, 39, 60, 63, 72, 77),
            *(96, 98, 99, 131, 186, 202, 204, 228, 230, 231, 234, 262, 273, 318, 324, 334),
        ),
    ),
    "aarch64": (
        0xC00000B7,
        (
            *(25, 29, 46, 57, 62, 63, 64, 65, 66, 67, 68, 73, 79, 80, 93, 94, 98, 99, 101, 113, 115, 123, 124, 131),
            *(132, 134, 135, 139, 160, 165, 169, 172, 178, 179, 214, 215, 216, 222, 226, 233, 278, 283, 293),
        ),
    ),
}
_ALLOWED, _REFUSED = 0x7FFF0000, 0x00050001  # seccomp's answers: go on; EPERM


def main() -> None:
    """Answer one request."""
    request = json.load(sys.stdin.buffer)
    sys.path[:] = request["path"]
    import torch

    torch.set_num_threads(1)
    _warm_up(torch)
    size = os.fstat(request["source"]).st_size
    with os.fdopen(request["source"], "rb") as source, os.fdopen(request["target"], "wb") as target:
        confine(request["seconds"], request["memory"], _GROWTH * size + _SLACK)
        try:
            tensors = _find_tensors(torch, torch.load(source, map_location="cpu", weights_only=True), size)
        except MemoryError:
            raise
        except RefusedError as refusal:
            _say({"refused": str(refusal)})
            return
        except Exception as error:
            _say({"refused": _explain(error)})
            return
        _write(torch, tensors, target)


class RefusedError(Exception):
    """What a file holds that is no weights."""


def _warm_up(torch: Any) -> None:
    """Import all that reading needs, because nothing can be opened later: both layouts, and a refused one."""
    for is_zip in (True, False):
        held = io.BytesIO()
        torch.save({"a": torch.zeros(1), "b": json.JSONDecoder}, held, _use_new_zipfile_serialization=is_zip)
        held.seek(0)
        try:
            torch.load(held, map_location="cpu", weights_only=True)
        except Exception as error:
            _explain(error)
        held = io.BytesIO()
        torch.save({"a": torch.zeros(1, dtype=torch.bfloat16)}, held, _use_new_zipfile_serialization=is_zip)
        held.seek(0)
        read = torch.load(held, map_location="cpu", weights_only=True)
        _write(torch, list(read.items()), io.BytesIO(), says=False)


def confine(seconds: int, memory: int, written: int) -> None:
    """Limit this process for good: its time, its memory (above what it has), and what it can open, write and start."""
    import resource

    def limit(what: int, most: int) -> None:
        highest = resource.getrlimit(what)[1]
        bound = most if highest == resource.RLIM_INFINITY else min(most, highest)
        try:
            resource.setrlimit(what, (bound, bound))
        except (OSError, ValueError):  # macOS has no limit of memory
            return

    limit(resource.RLIMIT_CORE, 0)
    limit(resource.RLIMIT_CPU, seconds)
    limit(resource.RLIMIT_FSIZE, written)
    limit(resource.RLIMIT_AS, memory + _read_size())
    limit(resource.RLIMIT_NPROC, 0)
    limit(resource.RLIMIT_NOFILE, 0)
    if sys.platform == "linux":
        _refuse_calls()


def _read_size() -> int:
    """The address space that this process has."""
    try:
        with Path("/proc/self/statm").open("rb") as file:
            return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 16 << 30


def _refuse_calls() -> None:
    """Refuse every system call that is not on the list; nothing where the system can't (limits hold all the same)."""
    known = _CALLS.get(platform.machine())
    if known is None:
        return
    machine, calls = known

    def step(code: int, k: int, jump_true: int = 0, jump_false: int = 0) -> bytes:
        return struct.pack("HBBI", code, jump_true, jump_false, k)

    load, equals, end = 0x20, 0x15, 0x06
    program = [step(load, 4), step(equals, machine, 1, 0), step(end, _REFUSED), step(load, 0)]
    for call in calls:
        program += [step(equals, call, 0, 1), step(end, _ALLOWED)]
    program.append(step(end, _REFUSED))
    held = ctypes.create_string_buffer(b"".join(program))
    filters = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program), ctypes.addressof(held)))
    library = ctypes.CDLL(None, use_errno=True)
    no_new_privileges, seccomp, by_filter = 38, 22, 2
    library.prctl.argtypes = [ctypes.c_int, *(ctypes.c_ulong,) * 4]
    library.prctl(no_new_privileges, 1, 0, 0, 0)
    library.prctl(seccomp, by_filter, ctypes.addressof(filters), 0, 0)


def _explain(error: Exception) -> str:
    """Why torch's reader refuses a file: the global that it names, or what else it says first."""
    text = " ".join(str(error).split())
    named = re.search(r"GLOBAL ([\w.]{1,200})", text)
    if named:
        return f"it names {named[1]}, which is no part of weights"
    told = re.sub(r"^Weights only load failed.*trusted source\.", "", text)  # advice to read it without care
    told = re.split(r" Check the documentation| This is an internal", told)[0].strip()[:300]
    return f"it is damaged, or no checkpoint ({type(error).__name__}: {told})"


def _find_tensors(torch: Any, held: Any, size: int) -> list[tuple[str, Any]]:
    """The tensors of a checkpoint, by name; raises for whatever else it holds."""
    if isinstance(held, Mapping) and not any(isinstance(value, torch.Tensor) for value in held.values()):
        inner = [held[name] for name in _NESTED if isinstance(held.get(name), Mapping)]
        held = inner[0] if len(inner) == 1 else held
    if not isinstance(held, Mapping):
        raise RefusedError(f"it holds a {type(held).__name__}, not a mapping of names to tensors")
    if not held:
        raise RefusedError("it holds no tensors")
    total = 0
    for name, tensor in held.items():
        if not isinstance(name, str):
            raise RefusedError(f"it has a {type(name).__name__} in the place of a tensor's name")
        if not isinstance(tensor, torch.Tensor):
            raise RefusedError(f"it holds a {type(tensor).__name__} under {name[:100]!r}, not a tensor")
        dtype = str(tensor.dtype).removeprefix("torch.")
        if tensor.layout != torch.strided or tensor.is_quantized or dtype not in _STORED or tensor.device.type != "cpu":
            raise RefusedError(f"its tensor {name[:100]!r} is {dtype}, {tensor.layout}, which safetensors don't have")
        total += tensor.numel() * tensor.element_size()
        if total > _GROWTH * size + _SLACK // 2:
            raise RefusedError(f"its tensors stand for more than {total} bytes, and the file has {size}")
    return list(held.items())


def _write(torch: Any, tensors: list[tuple[str, Any]], target: Any, *, says: bool = True) -> None:
    """Write tensors as safetensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in tensors:
        end = at + tensor.numel() * tensor.element_size()
        stored = _STORED[str(tensor.dtype).removeprefix("torch.")]
        header[name] = {"dtype": stored, "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    target.write(len(text).to_bytes(8, "little") + text)
    done = 0
    for _, tensor in tensors:
        data = memoryview(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
        for first in range(0, len(data), _PIECE):
            target.write(data[first : first + _PIECE])
        done += len(data)
        if says:
            _say({"done": done, "total": at})
    target.flush()
    if says:
        _say({"written": len(tensors)})


def _say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main()

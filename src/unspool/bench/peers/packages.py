"""Importing a peer's library, or explaining how to install it."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from unspool.bench.benchmark import Benchmark
from unspool.errors import SettingError, UnsupportedError


def import_package(module: str, peer: str, install: str) -> Any:
    """The module; raises an error that names what to install."""
    try:
        return import_module(module)
    except ImportError as error:
        raise UnsupportedError(
            f"the peer {peer} needs the package {module!r}, which can't be imported ({error}); install it "
            f"({install}), or leave out --peer {peer}"
        ) from error


def require_path(path: Path | None, benchmark: Benchmark, peer: str, what: str, example: str) -> Path:
    """The path of `--peer NAME=PATH`, for a peer that can't read the benchmark's own model."""
    if path is None:
        raise SettingError(
            f"the peer {peer} reads {what}, and {benchmark.location.name} is none; make one ({example}) and name it: "
            f"--peer {peer}=PATH"
        )
    return path


def refuse_path(path: Path | None, peer: str) -> None:
    """Raise if a path is given for a peer that reads the benchmark's model."""
    if path is not None:
        raise SettingError(f"the peer {peer} reads the model that is measured, not {path}; say --peer {peer}")


def refuse_device(benchmark: Benchmark, peer: str) -> None:
    """Raise if a GPU is asked for with a peer that runs only on CPUs here."""
    if benchmark.device is not None and not benchmark.device.startswith("cpu"):
        raise UnsupportedError(
            f"the peer {peer} is run on a CPU, and --device is {benchmark.device}; leave out --peer {peer}"
        )

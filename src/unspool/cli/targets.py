"""Files that a command writes beside its answer: checked before the work, written as a whole."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from unspool.cli.parser import UsageError
from unspool.small_files import write_text


def find_targets(arguments: argparse.Namespace, kinds: Sequence[str]) -> dict[str, Path]:
    """The files to write, by the options that name them."""
    targets = {kind: Path(name).expanduser() for kind in kinds if (name := getattr(arguments, kind)) is not None}
    for kind, path in targets.items():
        if not path.name or path.is_dir():
            raise UsageError(f"--{kind} {str(path)!r} is a folder; name a file in it")
        if not path.parent.is_dir():
            raise UsageError(f"--{kind} {str(path)!r}: there is no folder {str(path.parent)!r}; make it first")
        _refuse_existing(path, is_forced=arguments.force)
    if len({path.absolute() for path in targets.values()}) < len(targets):
        raise UsageError(f"{', '.join(f'--{kind}' for kind in targets)}: two of them name the same file")
    return targets


def write_target(path: Path, content: str, *, is_forced: bool) -> None:
    """Write one of them."""
    _refuse_existing(path, is_forced=is_forced)  # it may have been written meanwhile
    write_text(path, content)


def _refuse_existing(path: Path, *, is_forced: bool) -> None:
    if path.exists() and not is_forced:
        raise UsageError(f"{str(path)!r} exists already; --force writes over it")

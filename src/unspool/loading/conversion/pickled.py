"""A model's folder whose weights are pickles, rewritten as one with safetensors."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Final

from unspool.errors import LoadError
from unspool.loading.digests import list_read
from unspool.loading.pickled import Report, find_pickles, rewrite_pickles
from unspool.small_files import MAX_SETTINGS_BYTES

_MOST_BYTES: Final = 4 * MAX_SETTINGS_BYTES  # of a tokenizer's or a config's file


def convert_folder(folder: Path, target: Path, report: Report | None = None) -> None:
    """Write the model of a folder with pickles to a new folder: safetensors, and copies of its settings and tokenizer.

    The new folder appears whole or not at all."""
    if not folder.is_dir():
        raise LoadError(f"{folder} is not a folder")
    if not find_pickles(folder):
        raise LoadError(f"{folder} has no pytorch_model.bin, or has safetensors already: there is nothing to rewrite")
    if target.exists():
        raise LoadError(f"{target} is there already; give the name of a folder that is to be made")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        try:
            rewrite_pickles(folder, made, report)
            for path in list_read(folder):
                if path.is_file() and path.stat().st_size <= _MOST_BYTES and not (made / path.name).exists():
                    (made / path.relative_to(folder)).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(path, made / path.relative_to(folder))
            made.chmod(0o755)
            made.rename(target)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    except LoadError:
        raise
    except OSError as error:
        raise LoadError(f"{folder} can't be rewritten as {target}: {error.strerror or error}") from error

"""Loading a tokenizer alone, without its model's weights."""

from __future__ import annotations

from pathlib import Path

from unspool.errors import LoadError
from unspool.loading.gguf import GGUFFile
from unspool.loading.hub import NO_OPTIONS, HubOptions
from unspool.loading.source import find_source
from unspool.text import Tokenizer, open_tokenizer, tokenizer_from_gguf


def load_tokenizer(
    name: str | Path,
    *,
    revision: str | None = None,
    offline: bool | None = None,
    hub: HubOptions = NO_OPTIONS,
    subfolder: str = "",
) -> tuple[Tokenizer, Path]:
    """The tokenizer of a folder, a GGUF file, a hub id or a short name, and where it was read from."""
    path = find_source(name, revision=revision, offline=offline, hub=hub, has_weights=False)
    path = path / subfolder if subfolder else path
    if path.is_dir() and not (path / "config.json").is_file() and len(found := sorted(path.glob("*.gguf"))) == 1:
        path = found[0]
    if path.is_dir():
        return open_tokenizer(path), path
    if path.suffix != ".gguf":
        raise LoadError(f"{path} is not a folder with a tokenizer, nor a GGUF file")
    return tokenizer_from_gguf(dict(GGUFFile(path).metadata)), path

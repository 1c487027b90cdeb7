"""The static files of the page, read once from the package."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Final

_MEDIA: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True)
class Asset:
    """A file as it is sent."""

    content: bytes
    media_type: str
    tag: str  # changes with the content


@cache
def read_assets() -> dict[str, Asset]:
    """Every file of the page by its path below `assets/`."""
    return {name: _read(name, one) for name, one in _walk(files("unspool.studio").joinpath("assets"), "")}


def find_asset(name: str) -> Asset | None:
    """The file of that name. Names are looked up among the known ones, so that none can lead out of the folder."""
    return read_assets().get(name)


def _walk(folder: Traversable, prefix: str) -> Iterator[tuple[str, Traversable]]:
    for one in folder.iterdir():
        if one.is_dir():
            yield from _walk(one, f"{prefix}{one.name}/")
        elif one.name[one.name.rfind(".") :] in _MEDIA:
            yield prefix + one.name, one


def _read(name: str, file: Traversable) -> Asset:
    content = file.read_bytes()
    return Asset(content, _MEDIA[name[name.rfind(".") :]], f'"{hashlib.sha256(content).hexdigest()[:32]}"')

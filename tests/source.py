"""The package's source, for tests about the code itself."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import unspool

SOURCE = Path(unspool.__file__).parent


@dataclass(frozen=True)
class Import:
    """A module and the names taken from it (none for `import module`)."""

    module: str
    names: tuple[str, ...] = ()


@lru_cache
def read_texts() -> dict[str, str]:
    """Every file by its path in the package."""
    return {str(path.relative_to(SOURCE)): path.read_text(encoding="utf-8") for path in sorted(SOURCE.rglob("*.py"))}


def parse_files(words: str) -> Iterator[tuple[str, ast.Module]]:
    """The syntax trees of the files in which a pattern is found; to parse all of them takes seconds."""
    pattern = re.compile(words)
    for path, text in read_texts().items():
        if pattern.search(text):
            yield path, ast.parse(text, path)


@lru_cache
def read_imports() -> dict[str, list[Import]]:
    """What every file imports, inside functions too; no tree is kept, for garbage collections would look through it."""
    return {path: list(find_imports(tree.body)) for path, tree in parse_files("")}


def find_imports(body: list[ast.stmt]) -> Iterator[Import]:
    """The imports among statements and the statements inside them."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from (Import(alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.module and not node.level:
                yield Import(node.module, tuple(alias.name for alias in node.names))
        else:
            for part in ("body", "orelse", "finalbody", "handlers", "cases"):
                yield from find_imports(getattr(node, part, []))

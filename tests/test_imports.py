"""No file of unspool imports itself by way of others, be it for types alone."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from tests.source import Import, read_imports


def list_imports() -> dict[str, set[str]]:
    """Every module of the package and the modules of it that it imports, inside functions and for types too."""
    modules = {_name(path): found for path, found in read_imports().items()}
    return {name: _read_modules(found, modules) - {name} for name, found in modules.items()}


def _name(path: str) -> str:
    parts = ("unspool", *Path(path).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _read_modules(imports: list[Import], modules: Collection[str]) -> set[str]:
    found: set[str] = set()
    for one in imports:
        wholes = [f"{one.module}.{name}" for name in one.names] or [one.module]
        found |= {whole if whole in modules else one.module for whole in wholes}
    return {name for name in found if name in modules}


def find_circles(imports: dict[str, set[str]]) -> list[set[str]]:
    """Sets of modules that reach each other."""
    reach: dict[str, set[str]] = {}
    for name in imports:
        seen, waiting = set[str](), list(imports[name])
        while waiting:
            one = waiting.pop()
            if one not in seen:
                seen.add(one)
                waiting += imports[one]
        reach[name] = seen
    circles = [{name} | {one for one in reach[name] if name in reach[one]} for name in imports if name in reach[name]]
    return [circle for place, circle in enumerate(circles) if circle not in circles[:place]]


def test_no_import_circles() -> None:
    imports = list_imports()
    assert len(imports) > 300 and "unspool.decoding.rows" in imports["unspool.decoding.reader"]
    assert find_circles(imports) == []


def test_a_circle_is_found() -> None:
    assert find_circles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == [{"b", "c"}]

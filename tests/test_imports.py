"""No file of unspool imports itself by way of others."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.source import read_source


def find_imports() -> dict[str, set[str]]:
    """Every module of the package and the modules of it that it imports, inside functions too, but not for types."""
    modules = {_name(path): tree for path, tree in read_source().items()}
    return {name: _read_imports(tree, modules) - {name} for name, tree in modules.items()}


def _name(path: str) -> str:
    parts = ("unspool", *Path(path).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _read_imports(tree: ast.AST, modules: dict[str, ast.Module]) -> set[str]:
    found: set[str] = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole in modules else node.module)
        else:
            found |= _read_imports(node, modules)
    return found & modules.keys()


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
    imports = find_imports()
    assert len(imports) > 300 and "unspool.decoding.rows" in imports["unspool.decoding.reader"]
    assert find_circles(imports) == []


def test_a_circle_is_found() -> None:
    assert find_circles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == [{"b", "c"}]

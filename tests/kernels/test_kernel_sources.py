"""The lines of a kernel, found without reading tokens."""

from __future__ import annotations

import ast
import types
from pathlib import Path

import pytest

import unspool
from unspool.kernels.gpu.sources import read_lines

KERNELS = sorted((Path(unspool.__file__).parent / "kernels" / "gpu").rglob("*.py"))


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.name)
def test_lines_are_those_of_the_whole_function(path: Path) -> None:
    text = path.read_text()
    made = [part for part in compile(text, str(path), "exec").co_consts if isinstance(part, types.CodeType)]
    codes = {code.co_firstlineno: code for code in made}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            first = min(part.lineno for part in (node, *node.decorator_list))
            lines, number = read_lines(types.FunctionType(codes[first], {}))
            (found,) = ast.parse("".join(lines)).body
            assert number == first and ast.dump(found) == ast.dump(node)

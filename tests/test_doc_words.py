"""The pages and messages speak of parts by their names: a thread, a row or a cache is no person."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PERSONS = re.compile(r"\b(nobody|somebody|someone|anybody|everybody|everyone|whoever|no one)\b", re.IGNORECASE)
SHOWN = [*(ROOT / "src/unspool/cli").glob("*.py"), *(ROOT / "src/unspool/server").glob("*.py")]


@pytest.mark.parametrize("page", PAGES, ids=lambda one: one.name)
def test_pages_name_what_acts(page: Path) -> None:
    for num, line in enumerate(page.read_text("utf-8").splitlines(), 1):
        if not line.startswith(">"):  # what a model wrote
            assert not PERSONS.search(line), f"{page.name}:{num}"


@pytest.mark.parametrize("module", SHOWN, ids=lambda one: f"{one.parent.name}/{one.name}")
def test_messages_name_what_acts(module: Path) -> None:
    tree = ast.parse(module.read_text("utf-8"))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docs = {id(node.body[0].value) for node in ast.walk(tree) if isinstance(node, documented) and node.body
            and isinstance(node.body[0], ast.Expr)}  # fmt: skip
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            assert not PERSONS.search(node.value), (module.name, node.lineno, node.value)

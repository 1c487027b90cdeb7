"""docs/dependencies.md lists what pyproject.toml asks for."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PAGE = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
NEEDED, EXTRAS = PAGE.split("\nExtras, ")


def read_names(requirements: list[str]) -> set[str]:
    return {re.split(r"[^\w-]", one)[0].lower() for one in requirements}


def test_what_is_always_needed() -> None:
    assert set(re.findall(r"^\| (\w+) \| (?!for)", NEEDED, re.M)) - {"package"} == read_names(PROJECT["dependencies"])


def test_every_extra_and_its_packages() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+?) \|", EXTRAS, re.M))
    asked = {name: read_names(listed) for name, listed in PROJECT["optional-dependencies"].items()}
    assert set(rows) == set(asked)
    for name, packages in rows.items():
        named = packages.replace("the packages of `serve`", rows["serve"])
        assert set(re.findall(r"[a-z][\w-]+", re.sub(r"\(.*?\)", "", named))) == asked[name], name

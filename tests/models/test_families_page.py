"""docs/families.md lists what the registry has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.models.conftest import CASES

from unspool.models.families.base import DecoderFamily
from unspool.models.registry import FAMILIES

PAGE = (Path(__file__).parents[2] / "docs" / "families.md").read_text()
NATIVE, ADAPTED = PAGE.split("## What runs through transformers")


def read_names(text: str) -> set[str]:
    rows = [line.split("|") for line in text.splitlines() if line.startswith("| ") and "model_type" not in line]
    return {name for row in rows for name in re.findall(r"[a-z][a-z0-9_-]*", row[1])}


def test_every_native_decoder_is_listed() -> None:
    known = {name for family in FAMILIES.values() if isinstance(family, DecoderFamily) for name in family.model_types}
    assert read_names(NATIVE) == known | {"mamba", "falcon_mamba", "mamba2"}


def test_the_readme_counts_them() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    count = sum(isinstance(family, DecoderFamily) for family in FAMILIES.values())
    assert f"[{count} decoder families](docs/families.md)" in readme


def test_none_stands_on_both_lists() -> None:
    """But for Gemma 3, whose text alone is native."""
    listed = {
        name for row in re.findall(r"^\| [^|]+ \| (.+) \|$", ADAPTED, re.M) for name in re.findall(r"[a-z0-9_]+", row)
    }
    assert listed & read_names(NATIVE) == set()


@pytest.mark.parametrize("family", [one.name for one in FAMILIES.values() if isinstance(one, DecoderFamily)])
def test_every_native_decoder_is_compared_with_transformers(family: str) -> None:
    compared = {name.split("-")[0] for name in CASES} | {"baichuan"}  # which transformers does not have
    assert family in compared

"""Every script of examples/seeds runs on small models, natively."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "seeds"
SCRIPTS = sorted(FOLDER.glob("*_[0-9][0-9].py"))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the models that the scripts name, which they run in."""
    folder, before = tmp_path_factory.mktemp("seeds"), Path.cwd()
    sys.path.insert(0, str(FOLDER))
    try:
        from make_models import make_models

        make_models(folder / "models")
        os.chdir(folder)
        yield folder
    finally:
        os.chdir(before)
        sys.path.remove(str(FOLDER))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_runs(script: Path, place: Path) -> None:
    names: dict[str, object] = {"__name__": "__main__"}
    exec(compile(script.read_text(encoding="utf-8"), str(script), "exec"), names)
    assert "transformers" not in script.read_text(encoding="utf-8")


def test_every_document_is_there() -> None:
    assert len(SCRIPTS) >= 77

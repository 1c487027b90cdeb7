"""The stubs that type checkers read say what can be imported."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import unspool

ROOT = Path(__file__).parents[2]
SOURCE = Path(unspool.__file__).parent


def load_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_stubs", ROOT / "tools" / "make_stubs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TOOL = load_tool()


@pytest.mark.parametrize("path", TOOL.PACKAGES)
def test_the_stub_is_the_one_the_code_makes(path: str) -> None:
    homes = TOOL.PACKAGES[path]
    assert (SOURCE / path).read_text(encoding="utf-8") == TOOL.make_stub(homes), "run: python tools/make_stubs.py"
    parts = ["unspool", *Path(path).with_suffix("").parts]
    package = importlib.import_module(".".join(part for part in parts if part != "__init__"))
    assert all(getattr(package, name) is getattr(importlib.import_module(home), name) for name, home in homes.items())


def test_every_package_with_lazy_names_has_a_stub() -> None:
    lazy = {path for path in SOURCE.rglob("*.py") if "\n__getattr__ = " in path.read_text(encoding="utf-8")}
    lazy.add(SOURCE / "__init__.py")
    assert {path.with_suffix(".pyi") for path in lazy} == {SOURCE / path for path in TOOL.PACKAGES}


def test_a_type_checker_sees_the_names(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    script = tmp_path / "user.py"
    script.write_text("import unspool\nreveal_type(unspool.TopHLogitsWarper(0.5).top_h)\nunspool.laod\n")
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--no-error-summary", str(script)]
    told = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT).stdout
    assert 'Revealed type is "Any"' in told and 'has no attribute "laod"' in told

"""The package imports what is asked of it, when it is asked."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import unspool


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_every_public_name_is_there_and_listed() -> None:
    for name in unspool.__all__:
        assert getattr(unspool, name) is not None
    assert set(unspool.__all__) <= set(dir(unspool))


def test_names_are_the_ones_of_their_modules() -> None:
    from unspool.api import load
    from unspool.config import GenerationConfig

    assert unspool.load is load and unspool.GenerationConfig is GenerationConfig
    assert unspool.errors.SettingError is unspool.SettingError


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="no attribute 'laod'"):
        _ = unspool.laod


@pytest.mark.parametrize(
    "words", [["--help"], ["--version"], ["models"], ["run", "--help"], ["chat", "--help"], ["pull", "smollm2-135m"]]
)
def test_quick_commands_do_not_import_torch(words: list[str], default_model_file: Path) -> None:
    code = (
        "import sys; from unspool.cli.main import main; code = main(%r);"
        "heavy = {'torch', 'numpy', 'tokenizers', 'transformers'} & set(sys.modules);"
        "sys.exit(f'{code} {heavy}' if code or heavy else 0)"
    )
    run_python(code % words)


def test_importing_the_package_does_not_import_torch_and_using_it_does() -> None:
    code = "import sys, unspool; print('torch' in sys.modules); unspool.load; print('torch' in sys.modules)"
    assert run_python(code).split() == ["False", "True"]

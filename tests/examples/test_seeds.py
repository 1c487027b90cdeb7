"""Every script of examples/seeds runs on small models: natively, and with transformers' objects."""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.specification.blocks import NATIVE_ALONE

import unspool

FOLDER = Path(__file__).parents[2] / "examples" / "seeds"
SCRIPTS = sorted(FOLDER.glob("*_[0-9][0-9].py"))
SLOW = {"utilities_49"}  # compiles its steps
CALLS = [pytest.param(path, id=path.stem, marks=[pytest.mark.slow] if path.stem in SLOW else []) for path in SCRIPTS]


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


@pytest.mark.parametrize("script", CALLS)
def test_a_script_runs(script: Path, place: Path) -> None:
    names: dict[str, object] = {"__name__": "__main__"}
    exec(compile(script.read_text(encoding="utf-8"), str(script), "exec"), names)
    assert "transformers" not in script.read_text(encoding="utf-8")


THEIRS = {
    "AutoModelForCausalLM",
    "AutoModelForSeq2SeqLM",
    "AutoModelForSpeechSeq2Seq",
    "AutoProcessor",
    "AutoTokenizer",
}
THEIRS |= {"pipeline", "set_seed"}
THEIRS |= {"GPT2LMHeadModel", "GPT2Tokenizer", "MambaForCausalLM", "WhisperForConditionalGeneration"}


def take_theirs(text: str) -> str:
    """A script whose models, tokenizers and pipelines are transformers'; everything else stays ours."""
    tree = ast.parse(text)
    for node in list(tree.body):
        if isinstance(node, ast.ImportFrom) and node.module == "unspool":
            theirs = [name for name in node.names if name.name in THEIRS]
            node.names = [name for name in node.names if name.name not in THEIRS]
            place = tree.body.index(node)
            parts = [node, ast.ImportFrom("transformers", theirs, 0)]
            tree.body[place : place + 1] = [part for part in parts if part.names]
    return ast.unparse(ast.fix_missing_locations(tree))


@pytest.fixture
def attached() -> Iterator[None]:
    """transformers' objects generate with unspool."""
    unspool.attach()
    yield
    unspool.detach()


@pytest.mark.filterwarnings("ignore")  # transformers' own
@pytest.mark.parametrize("script", CALLS)
def test_a_script_runs_with_objects(script: Path, place: Path, attached: None) -> None:
    text = script.read_text(encoding="utf-8")
    if "device_map" in text and importlib.util.find_spec("accelerate") is None:
        pytest.skip("transformers needs accelerate for device_map")
    for word, reason in NATIVE_ALONE.items():
        if word in text:
            pytest.skip(reason)
    exec(compile(take_theirs(text), str(script), "exec"), {"__name__": "__main__"})

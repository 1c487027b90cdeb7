"""The reader is the only place that runs a model, and it does so through one function."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import torch

import unspool
from tests.fakes import FakeModel
from unspool.decoding.reader import Reader, answer_at_once
from unspool.protocols import Ask, Forward

SOURCE = Path(unspool.__file__).parent
MODELS = {"model", "_model", "assistant", "core", "_core"}  # names that models have in the source


def find_passes(path: Path) -> list[str]:
    """Calls of `forward`, `take_steps` and a model's `encode` in a file, as line: source."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner = node.func.value
        name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
        if node.func.attr in ("forward", "take_steps") or (node.func.attr == "encode" and name in MODELS):
            found.append(f"{path.relative_to(SOURCE)}:{node.lineno}")
    return found


def test_nothing_but_the_reader_runs_a_model() -> None:
    files = [path for path in SOURCE.rglob("*.py") if path.relative_to(SOURCE).parts[0] != "models"]
    found = {where.split(":")[0] for path in files for where in find_passes(path)}
    assert len(files) > 200
    assert found == {"decoding/reader.py"}


def test_every_pass_of_a_call_is_asked_for() -> None:
    asked: list[Ask] = []

    def answer(ask: Ask) -> Forward:
        asked.append(ask)
        return answer_at_once(ask)

    model = FakeModel()
    reader = Reader(model, model.new_cache(), answer=answer, chunk=2)
    reader.read(torch.tensor([[1, 2, 3, 4, 5]]), [5])
    assert [ask.tokens.tolist() for ask in asked] == [[[1, 2]], [[3, 4]], [[5]]]
    assert reader.cache.lengths == [5] and reader.num_passes == model.num_passes == 3


def test_a_row_that_ends_in_an_earlier_chunk_keeps_its_logits() -> None:
    model = FakeModel()
    rows: list[Any] = [[3, 4, 5], [6, 0, 0]]
    read = Reader(model, model.new_cache(rows=2), chunk=1).read(torch.tensor(rows), [3, 1])
    for row, ids in enumerate(([3, 4, 5], [6])):
        torch.testing.assert_close(read.logits[row], model.score(ids))

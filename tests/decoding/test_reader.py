"""The reader is the only place that runs a model, and it does so through one function."""

from __future__ import annotations

import ast
from typing import Any

import torch

from tests.fakes import FakeModel
from tests.source import parse_files, read_texts
from unspool.decoding.reader import Reader, answer_at_once
from unspool.protocols import Ask, Forward

MODELS = {"model", "_model", "assistant", "core", "_core"}  # names that models have in the source


def has_passes(tree: ast.Module) -> bool:
    """Whether a file calls `forward`, `take_steps` or a model's `encode`."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner = node.func.value
        name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
        if node.func.attr in ("forward", "take_steps") or (node.func.attr == "encode" and name in MODELS):
            return True
    return False


def test_nothing_but_the_reader_and_its_stretches_run_a_model() -> None:
    assert len(read_texts()) > 200
    files = parse_files(r"\.(forward|take_steps)\b|_?(model|assistant|core)\.encode\b")
    assert [path for path, tree in files if not path.startswith("models/") and has_passes(tree)] == [
        "decoding/reader.py",
        "decoding/stretching.py",
    ]


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

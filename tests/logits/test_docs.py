"""docs/processors.md says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from tests.fakes import FakeModel

import unspool
from unspool.logits.order import PROCESSORS
from unspool.logits.order_table import make_table, put_table
from unspool.registry import find_name

PAGE = Path(__file__).parents[2] / "docs" / "processors.md"


def test_the_table_is_the_one_the_code_makes() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert put_table(page) == page, "run: python -m unspool.logits.order_table"
    for entry in PROCESSORS.values():
        assert f"| `{find_name(entry.processor)}` | `{entry.setting}` |" in make_table()


def test_the_page_shows_a_processor_that_works() -> None:
    code = next(
        block for block in re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.S) if "class" in block
    )
    model = FakeModel()
    model.table += torch.eye(23) * 40  # it would write one token for ever
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    names = {"model": model, "ids": ids}
    exec(code, names)
    plain = unspool.generate(model, ids, max_new_tokens=9, eos_token_id=None)
    assert bool((plain[:, 3:] == plain[:, 2:-1]).all())
    found = unspool.generate(
        model, ids, max_new_tokens=9, eos_token_id=None, logits_processor=[names["NoDoubledTokens"]()]
    )
    assert not bool((found[:, 3:] == found[:, 2:-1]).any())

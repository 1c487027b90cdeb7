"""`docs/specification.md` says what is so, and leaves nothing of the documents out."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

import unspool
from tests.specification import blocks, names
from tests.specification.page import PAGE, list_functions, make_page, read_tests
from tests.specification.sentences import PROMISES
from unspool.config import PARAMETERS
from unspool.config.parameters import CALL_ARGUMENTS

PROMISED = [promise for promises in PROMISES.values() for promise in promises]
TESTS = sorted(
    {test for promise in PROMISED for test in promise.tests}
    | {test for _, test in blocks.OTHERWISE.values()}
    | {*names.ARGUMENTS.values()}
)
DOCUMENTS = Path(os.environ.get("UNSPOOL_SEEDS", Path(__file__).parents[2].parent / "shared" / "seeds"))
FENCED = re.compile(r"^[ \t]*```[ ]*\w*\n(.*?)^[ \t]*```", re.M | re.S)


def test_the_page_is_the_one_the_tables_make() -> None:
    assert PAGE.read_text(encoding="utf-8") == make_page(), "run: python -m tests.specification.page"


def test_no_cell_is_empty() -> None:
    rows = [line for line in make_page().splitlines() if line.startswith("|") and line != "| document | |"]
    assert len(rows) > 300 and all(cell.strip() for row in rows for cell in row.strip("|").split(" | "))


@pytest.mark.parametrize("test", TESTS)
def test_a_test_that_is_named_exists(test: str) -> None:
    if test.startswith("examples/seeds::"):
        assert (blocks.SCRIPTS / f"{test.partition('::')[2]}.py").is_file()
        return
    file, _, function = test.partition("::")
    assert file in read_tests()
    assert function == "*" or function in list_functions(file)


def test_every_promise_has_a_test_or_waits_for_one() -> None:
    assert all(bool(promise.tests) != bool(promise.awaited) for promise in PROMISED)


def test_every_name_is_there_and_its_file_tells_of_it() -> None:
    listed = names.list_names()
    assert len(listed) == 75 + 41 + len(names.OF_EXAMPLES)
    for name, (_, file) in listed.items():
        assert getattr(unspool, name) is not None
        if not file:
            assert name in names.AWAITED
        elif not file.startswith("frameworks/"):  # whose own tests count these names
            assert re.search(rf"\b{name}\b", read_tests()[file]), name


def test_every_block_is_run_or_says_why() -> None:
    assert sum(blocks.COUNTS.values()) == 92
    for block in blocks.BLOCKS:
        assert block.is_run or block.key in blocks.OTHERWISE, block.key
        assert not (block.is_run and block.key in blocks.OTHERWISE), block.key
    used = {block.script for block in blocks.BLOCKS if block.is_run}
    assert used == {*blocks.SCRIPTS.glob("*_[0-9][0-9].py")}


@pytest.mark.skipif(not DOCUMENTS.is_dir(), reason="the documents are not part of the repository")
def test_nothing_of_the_documents_is_left_out() -> None:
    texts = [path.read_text(encoding="utf-8") for path in sorted(DOCUMENTS.glob("*.txt"))]
    assert [len(FENCED.findall(text)) for text in texts] == list(blocks.COUNTS.values())
    assert sum(text.count("```") for text in texts) // 2 == 93
    known = {*names.list_names()}
    automatic = {name.rpartition(".")[2] for text in texts for name in re.findall(r"\[\[autodoc\]\] ([\w.]+)", text)}
    imported = {
        name.strip("() ")
        for text in texts
        for names_ in re.findall(r"from transformers import (\([^)]*\)|[^\n]*(?:\\\n[^\n]*)*)", text)
        for name in re.split(r"[,\s.>\\]+", names_)
        if name.strip("() ")
    }
    assert automatic <= known
    written = {name for text in texts for name in re.findall(r"\b(\w+)=|`(\w+)`", text) for name in name}
    others = {"generation_kwargs", "max_cache_len"}  # a variable of the examples, and an argument of caches
    assert {name for name in PARAMETERS if name in written} - others <= {*names.SETTINGS}
    assert {name for name in CALL_ARGUMENTS if name in written} <= {*names.ARGUMENTS}
    assert imported <= known, imported - known

"""`docs/specification.md`, made of the tables beside this file: `python -m tests.specification.page` writes it."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from tests.specification import blocks, names
from tests.specification.sentences import PROMISES, Promise
from unspool.config import PARAMETERS
from unspool.logits.order import PROCESSORS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "specification.md"
HEAD = """# The specification, and what shows that it is met

The reference documents' names, arguments, blocks of code and promises, each with the test that shows it. The page is made of `tests/specification` by `python -m tests.specification.page`, and a test compares them: every test named here exists, every name can be imported with these arguments, every script runs. Tests are files below `tests/`; `::` names one of a file's. *Awaited* is what comes with a part that is being built; once a test of it is there, the page made anew names it.

| document | |
|---|---|
| strategies | text generation strategies |
| decoding methods | decoding methods |
| first steps | generation with language models, an introduction |
| utilities | outputs, processors, criteria, constraints, scorers, streamers, caches, watermarks |
| stopping | notes on strategies and stopping |
"""  # noqa: E501 - paragraphs of a page


@cache
def read_tests() -> dict[str, str]:
    """The text of every test file, by its path below `tests/` without the ending."""
    folder = ROOT / "tests"
    paths = sorted(path for path in folder.rglob("*.py") if "specification" not in path.parts)
    return {str(path.relative_to(folder).with_suffix("")): path.read_text(encoding="utf-8") for path in paths}


@cache
def list_functions(file: str) -> frozenset[str]:
    """The tests of a file, without `test_`."""
    tree = ast.parse(read_tests()[file])
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name.removeprefix("test_") for node in ast.walk(tree) if isinstance(node, kinds))


def find_awaited(word: str) -> str:
    """The first test file that has a word, or is called so; none while what it tests is not there."""
    tests = {file: text for file, text in read_tests().items() if Path(file).name.startswith("test_")}
    found = [file for file, text in tests.items() if word in text or word in file]
    return f"`{found[0]}`" if found else "*awaited*"


def show_test(name: str) -> str:
    """A test as the page names it."""
    if name.startswith("examples/seeds::"):
        return f"`examples/seeds/{name.partition('::')[2]}.py`"
    file, _, function = name.partition("::")
    return f"`{file}`" if function in ("", "*") else f"`{file}::{function}`"


def _show_promise(promise: Promise) -> str:
    tests = ", ".join(map(show_test, promise.tests)) or find_awaited(promise.awaited)
    return f"| {promise.section} | {promise.words} | {tests} |"


def _show_block(block: blocks.Block) -> str:
    if block.is_run:
        native = f"`{block.script.name}`"
        over = f"no: {block.native_alone}" if block.native_alone else "yes"
        return f"| {block.document} {block.number:02} | {native} | {over} |"
    reason, test = blocks.OTHERWISE[block.key]
    return f"| {block.document} {block.number:02} | {reason} | {show_test(test)} |"


def _list_settings() -> list[str]:
    """The lines about settings and arguments."""
    of_processors = {one.name for entry in PROCESSORS.built_in for one in entry.settings}
    switched = "logits/test_pipeline::each_setting_switches_its_processor_on_and_its_neutral_value_off"
    lines = ["", "## Settings and arguments of generate()", ""]
    lines += [
        "Every setting is applied or refused, which `plan/test_settings::no_setting_passes_silently` tries with each; "
        "`conformance/test_goldens` runs the 646 recorded calls of the reference.",
        "",
        "| setting | default | what it does | shown by |",
        "|---|---|---|---|",
    ]
    for name in names.SETTINGS:
        parameter = PARAMETERS[name]
        test = switched if name in of_processors else "plan/test_settings::no_setting_passes_silently"
        lines.append(f"| `{name}` | `{parameter.default}` | {parameter.help} | {show_test(test)} |")
    lines += ["", "| argument | shown by |", "|---|---|"]
    return [*lines, *(f"| `{name}` | {show_test(test)} |" for name, test in names.ARGUMENTS.items())]


def make_page() -> str:
    """The whole page."""
    lines = [HEAD, "## Names and arguments", ""]
    lines += [
        "Constructors, defaults and methods are compared with the reference's by `test_public_names` and "
        "`frameworks/test_names`; these files show what each does.",
        "",
        "| name | arguments | shown by |",
        "|---|---|---|",
    ]
    for name, (arguments, file) in names.list_names().items():
        shown = f"`{file}`" if file else find_awaited(names.AWAITED[name])
        lines.append(f"| `{name}` | {arguments or 'none of its own'} | {shown} |")
    lines += _list_settings()
    count = len(blocks.BLOCKS)
    num_run = sum(block.is_run for block in blocks.BLOCKS)
    lines += [
        "",
        "## Blocks of code",
        "",
        f"{num_run} of {count} blocks are scripts of `examples/seeds`, which `examples/test_seeds` runs on small "
        "models, natively and over transformers' objects; what was changed in them is in its README. "
        "The fences are 93 pairs: one block has a pair of its own in comments.",
        "",
        "| block | run as | over objects, or shown by |",
        "|---|---|---|",
        *map(_show_block, blocks.BLOCKS),
    ]
    for document, promises in PROMISES.items():
        lines += ["", f"## Promises: {document}", "", "| section | what is promised | shown by |", "|---|---|---|"]
        lines += map(_show_promise, promises)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)) + "\n"


if __name__ == "__main__":
    PAGE.write_text(make_page(), encoding="utf-8")

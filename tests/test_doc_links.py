"""Links between the pages lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/*.md"), *ROOT.glob("deploy/**/*.md")]
)
FOLDERS = ("src", "tests", "tools", "benchmarks", "examples", "deploy")
FILES = [*ROOT.glob("*.py"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))]
OF_TRANSFORMERS = {"test_logits_process.py", "tests/generation/test_utils.py", "tests/utils/test_cache_utils.py"}
LINK = re.compile(r"\]\(([^()\s]+)\)")


def list_anchors(page: Path) -> set[str]:
    """What GitHub makes of a page's headings: letters, digits, hyphens and underscores of them in lower case."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    headings = re.findall(r"^#{1,6} (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    for link in LINK.findall(text):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        name, _, anchor = link.partition("#")
        target = page if not name else (page.parent / name).resolve()
        assert target.exists(), f"{link}: there is no {name}"
        if anchor:
            assert anchor in list_anchors(target), f"{link}: {target.name} has no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_pages_name_are_there(page: Path) -> None:
    """Python files by their path's end: `engine/scheduler.py`, or `scheduler.py` on a page about the engine."""
    if page.name == "performance_history.md":  # of trees that were
        return
    found = set(re.findall(r"(?<![\w./*-])[\w][\w/]*\.py\b", page.read_text(encoding="utf-8"))) - OF_TRANSFORMERS
    assert {name for name in found if not any(path.as_posix().endswith(f"/{name}") for path in FILES)} == set()


def test_pages_are_found() -> None:
    assert {"README.md", "CHANGELOG.md", "architecture.md", "performance.md"} <= {page.name for page in PAGES}

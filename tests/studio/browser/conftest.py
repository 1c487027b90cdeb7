"""A real browser without a window, and the page in it. Where there is none, these tests are skipped."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import unspool
from tests.server.running import RunningServer
from tests.studio.browser.pages import StudioPage

_NAMES = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome", "chrome")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests here: `-m browser` runs them, `-m "not browser"` leaves them out."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("browser")


@pytest.fixture(scope="module")  # playwright's event loop would be in the way of other modules' async tests
def browser() -> Iterator[Any]:
    driver = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
    path = next(filter(None, map(shutil.which, _NAMES)), None)
    if path is None:
        pytest.skip("no chromium on this machine: apt install chromium")
    with driver.sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture(scope="module")
def server(default_model_file: Path, browser: Any) -> Iterator[RunningServer]:
    """The default model; after `browser`, so that it is not loaded where there is none."""
    lm = unspool.load(default_model_file)
    with RunningServer({"smollm2-135m": lm}, max_rows=8, memory=400 << 20, block_size=64) as running:
        yield running


@pytest.fixture
def studio(browser: Any, server: RunningServer) -> Iterator[StudioPage]:
    """The page, which may write no error to its console and ask no other server."""
    page = StudioPage(browser, server.address)
    yield page
    page.close()

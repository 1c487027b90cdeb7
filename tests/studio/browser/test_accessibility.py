"""axe-core over every view, in light and dark, wide and narrow; and over the page that `unspool explain --html` writes.

`npm install axe-core`, and UNSPOOL_AXE=node_modules/axe-core/axe.min.js. What needs no browser is in
test_contrast.py and page.mjs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import unspool
from tests.server.running import RunningServer
from tests.studio.browser.pages import StudioPage
from unspool.explain import build_tree, draw_page

PRESETS = ("Beam search", "Contrastive search", "DoLa", "Guidance", "Speculation", "Watermark", "Grammar")


@pytest.fixture(scope="module")
def axe() -> str:
    path = os.environ.get("UNSPOOL_AXE")
    if path is None:
        pytest.skip("UNSPOOL_AXE names no axe.min.js: npm install axe-core")
    return Path(path).read_text("utf-8")


def list_violations(page: Any, axe: str) -> list[str]:
    page.evaluate(axe)
    found = page.evaluate("() => axe.run(document, { resultTypes: ['violations'] })")
    return [f"{one['id']}: {node['html'][:160]}" for one in found["violations"] for node in one["nodes"]]


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 390])
def test_every_view(browser: Any, server: RunningServer, axe: str, theme: str, width: int) -> None:
    studio = StudioPage(browser, server.address, color_scheme=theme)
    studio.page.set_viewport_size({"width": width, "height": 900})
    look: Callable[[], list[str]] = lambda: list_violations(studio.page, axe)  # noqa: E731
    studio.open()
    assert look() == []
    for preset in PRESETS:
        studio.use(preset)
        assert (preset, look()) == (preset, [])
        studio.page.locator(".token-text .t").nth(1).click()
        for colour in studio.page.eval_on_selector_all("#colour option", "all => all.map(one => one.value)"):
            studio.page.select_option("#colour", colour)
            assert (preset, colour, look()) == (preset, colour, [])
        if studio.page.is_visible(".sheet-close"):
            studio.page.click(".sheet-close")
    studio.page.evaluate("() => document.querySelectorAll('details').forEach((one) => (one.open = true))")
    assert look() == []
    for opener in ("#code", "[aria-label=Keyboard]"):
        studio.page.click(opener)
        assert (opener, look()) == (opener, [])
        studio.page.keyboard.press("Escape")
    studio.page.click("text=Chat")
    studio.page.click("#write")  # an empty message: a fault is shown
    assert look() == []
    studio.page.click("text=Prompt")
    studio.page.click("#tab-compare")
    assert look() == []
    studio.page.click("#compare-run")
    studio.page.wait_for_function("() => document.querySelectorAll('.compare-stats dd').length === 15")
    studio.wait()
    assert look() == []
    studio.close()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_page_of_beams(browser: Any, axe: str, default_model_file: Path, tmp_path: Path, theme: str) -> None:
    lm = unspool.load(default_model_file)
    trace = lm.generate("The sky is", num_beams=4, num_return_sequences=4, max_new_tokens=8, return_beam_trace=True)
    path = tmp_path / "beams.html"
    tree = build_tree(trace.beam_trace, lambda ids: lm.tokenizer.decode(ids), prompt_text="The sky is")
    path.write_text(draw_page(tree), encoding="utf-8")
    context = browser.new_context(color_scheme=theme)
    page = context.new_page()
    asked: list[str] = []
    page.on("request", lambda one: asked.append(one.url))
    page.goto(path.as_uri())
    assert list_violations(page, axe) == []
    page.locator(".node[role=button]").first.focus()
    page.keyboard.press(" ")
    assert page.locator(".node[aria-pressed=true]").count() == 1 and page.is_visible("#details")
    page.locator("td button").nth(1).click()
    assert page.locator("tbody tr.on").count() == 1
    assert list_violations(page, axe) == [] and asked == [path.as_uri()]
    context.close()

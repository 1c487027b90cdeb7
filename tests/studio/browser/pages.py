"""The page as tests use it."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WAIT = 120_000  # milliseconds: the machine may be busy


def make_link(address: str, **state: Any) -> str:
    """A link with a prompt and settings in its fragment, as the page makes them."""
    text = base64.urlsafe_b64encode(json.dumps(state).encode()).decode().rstrip("=")
    return f"{address}/#1.{text}"


def as_stream(events: Sequence[dict[str, Any]]) -> str:
    """Events as the server sends them."""
    return "".join(f"data: {json.dumps(one)}\n\n" for one in events)


class StudioPage:
    """A tab with the studio; `close` checks that nothing went wrong in it."""

    def __init__(self, browser: Any, address: str, **context: Any) -> None:
        self.address = address
        self.allowed: list[str] = []  # parts of console errors that a test expects
        self.problems: list[str] = []
        self.asked: list[str] = []
        self.context = browser.new_context(viewport={"width": 1400, "height": 900}, **context)
        self.page = self.context.new_page()
        self.page.on("console", lambda one: self._note(one.type, one.text))
        self.page.on("pageerror", lambda error: self._note("error", str(error)))
        self.page.on("request", lambda one: self.asked.append(one.url))
        self.page.on("dialog", lambda one: (self.problems.append(f"dialog {one.message}"), one.dismiss()))

    def _note(self, kind: str, text: str) -> None:
        if kind == "error" and not any(one in text for one in self.allowed):
            self.problems.append(text)

    def close(self) -> None:
        self.context.close()
        assert not self.problems
        strange = [one for one in self.asked if not one.startswith((self.address, "data:", "blob:", "file:"))]
        assert not strange

    # --- doing -----------------------------------------------------------------------------------------------
    def open(self, **state: Any) -> None:
        """Open the page, with a prompt and settings in the link if there are any."""
        self.page.goto(make_link(self.address, **state) if state else f"{self.address}/")
        self.page.wait_for_selector("#write", timeout=WAIT)

    def write(self, **state: Any) -> None:
        """Open the page with a prompt and settings, and write to the end."""
        self.open(**state)
        self.run()

    def use(self, preset: str) -> None:
        """Choose a preset, and write to the end."""
        self.page.select_option("#preset", label=preset)
        self.run()

    def run(self) -> None:
        self.page.click("#write")
        self.wait()

    def wait(self) -> None:
        """Wait until nothing is being written."""
        self.page.wait_for_selector("#stop", state="attached", timeout=WAIT)
        self.page.wait_for_function("() => document.querySelector('#stop').hidden", timeout=WAIT)
        self.page.wait_for_function(
            "() => !document.querySelector('.status').textContent.includes('writing')", timeout=WAIT
        )
        self.page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def replay(self, events: Sequence[dict[str, Any]] | str) -> None:
        """Answer traces with these events from now on."""
        body = events if isinstance(events, str) else as_stream(events)
        self.page.route("**/v1/trace", lambda route: route.fulfill(content_type="text/event-stream", body=body))

    def shoot(self, name: str, *, full: bool = False) -> None:
        """Keep a picture for the docs, where UNSPOOL_SCREENSHOTS says where."""
        folder = os.environ.get("UNSPOOL_SCREENSHOTS")
        if folder:
            self.page.mouse.move(0, 0)
            self.page.screenshot(path=Path(folder) / f"{name}.png", full_page=full)

    # --- looking ---------------------------------------------------------------------------------------------
    def text(self, selector: str) -> str:
        found: str = self.page.inner_text(selector)
        return found

    def tokens(self) -> list[str]:
        """The tokens as they stand in the text."""
        found: list[str] = self.page.eval_on_selector_all(".token-text .t", "all => all.map(one => one.textContent)")
        return found

    def count(self, selector: str) -> int:
        return self.page.locator(selector).count()

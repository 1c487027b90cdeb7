"""Sharing, saving, copying; and the page by keyboard and to a screen reader."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.server.running import RunningServer
from tests.studio.browser.pages import StudioPage

ASKED: dict[str, Any] = {"prompt": "The capital of France is", "settings": {"do_sample": False, "max_new_tokens": 8}}


def test_a_link_brings_prompt_and_settings_along(studio: StudioPage, browser: Any, server: RunningServer) -> None:
    studio.context.grant_permissions(["clipboard-read", "clipboard-write"])
    settings = {"do_sample": True, "top_p": 0.8, "seed": 3, "max_new_tokens": 6}
    studio.write(prompt="Grüße & 世界 <b>", settings=settings)
    studio.page.click("#share")
    link = studio.page.evaluate("() => navigator.clipboard.readText()")
    assert link == studio.page.url and link.startswith(f"{server.address}/#1.")
    other = StudioPage(browser, server.address)
    other.page.goto(link)
    other.page.wait_for_selector("#write")
    assert other.page.input_value("#prompt") == "Grüße & 世界 <b>"
    assert other.page.input_value("#set-top_p") == "0.8" and other.count(".tried-run") == 0  # nothing runs by itself
    other.run()
    assert other.tokens() == studio.tokens()
    other.close()


def test_runs_as_a_file(studio: StudioPage) -> None:
    studio.write(**ASKED)
    with studio.page.expect_download() as waiting:
        studio.page.click("#save-json")
    kept = json.loads(Path(waiting.value.path()).read_text())
    assert kept["format"] == "unspool-studio"
    assert [one["text"].replace("\n", "↵") for one in kept["runs"][0]["tokens"]] == studio.tokens()
    assert kept["runs"][0]["end"]["text"].replace("\n", "↵") == "".join(studio.tokens())


def test_a_kept_page_needs_no_server(studio: StudioPage, browser: Any, tmp_path: Path) -> None:
    studio.write(
        prompt="</script><script>alert(1)</script>", settings={"num_beams": 3, "do_sample": False, "max_new_tokens": 6}
    )
    studio.page.fill("#prompt", "The capital of France is")
    studio.page.select_option("#preset", label="Greedy")
    studio.run()
    with studio.page.expect_download() as waiting:
        studio.page.click("#save-page")
    path = tmp_path / "kept.html"
    path.write_bytes(Path(waiting.value.path()).read_bytes())
    other = StudioPage(browser, "file:")
    other.context.set_offline(True)
    other.page.goto(path.as_uri())
    other.page.wait_for_selector(".token-text .t")
    assert other.tokens() == studio.tokens()
    other.page.locator(".token-text .t").nth(1).click()
    assert other.count(".bars .bar") >= 20
    other.page.locator(".tried-run").first.click()
    assert other.count(".beam-tree .node") > 6
    assert all(one.startswith("file:") for one in other.asked)
    other.close()


def test_the_python_code_writes_the_same(studio: StudioPage) -> None:
    studio.write(**ASKED)
    text = "".join(studio.tokens()).replace("↵", "\n")
    studio.page.click("#code")
    python = studio.page.locator("dialog pre").nth(0).text_content()
    done = subprocess.run([sys.executable, "-c", python], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == text + "\n"
    assert "/v1/completions" in studio.page.locator("dialog pre").nth(1).text_content()
    assert studio.page.locator("dialog pre").nth(2).text_content().startswith("unspool run")


def test_everything_by_keyboard(studio: StudioPage) -> None:
    studio.open(**ASKED)
    keys = studio.page.keyboard
    keys.press("/")  # acts at once: no field has the focus by itself
    assert studio.page.evaluate("() => document.activeElement.id") == "prompt"
    keys.type("?[tc")
    assert studio.page.input_value("#prompt").endswith("?[tc") and studio.page.is_visible("#pane-write")
    for _ in range(4):
        keys.press("Backspace")
    keys.press("Control+Enter")
    studio.page.wait_for_selector(".token-text .t")
    studio.wait()
    first = studio.tokens()
    keys.press("Escape")  # leaves the prompt
    keys.press("t")
    for _ in range(3):
        keys.press("ArrowRight")
    assert studio.page.locator(".is-selected").get_attribute("data-i") == "2"
    assert studio.page.get_attribute(".token-text", "aria-activedescendant") == "token-marked"
    keys.press("Enter")
    keys.press("ArrowDown")
    assert studio.page.evaluate("() => document.activeElement.className.startsWith('bar')")
    keys.press("Enter")
    studio.wait()
    assert studio.tokens()[:2] == first[:2] and studio.tokens()[2] != first[2]
    studio.page.evaluate("() => document.activeElement.blur()")
    keys.press("[")
    assert studio.tokens() == first
    keys.press("c")
    assert studio.page.is_visible("#pane-compare")
    keys.press("w")
    keys.press("?")
    assert "Ctrl + Enter" in studio.text("dialog")
    keys.press("Escape")
    keys.press("/")
    assert studio.page.evaluate("() => document.activeElement.id") == "prompt"


def test_a_screen_reader_finds_its_way(studio: StudioPage) -> None:
    studio.write(**ASKED)
    assert studio.text("p[role=status].sr").startswith("Done, 8 tokens.")
    unnamed = studio.page.evaluate(
        """() => [...document.querySelectorAll("button, input, select, textarea")].filter((one) => {
          const labels = [...(one.labels ?? [])].map((label) => label.textContent).join("");
          const name = one.getAttribute("aria-label") || labels || (one.tagName === "BUTTON" ? one.textContent : "");
          return !name.trim() && one.getAttribute("aria-hidden") !== "true";
        }).map((one) => one.outerHTML.slice(0, 120))"""
    )
    assert unnamed == []
    ids = studio.page.evaluate("() => [...document.querySelectorAll('[id]')].map((one) => one.id)")
    assert len(ids) == len(set(ids))
    described = studio.page.evaluate(
        """() => [...document.querySelectorAll("[aria-describedby]")]
          .flatMap((one) => one.getAttribute("aria-describedby").split(" "))
          .filter((id) => !document.getElementById(id))"""
    )
    assert described == []
    assert studio.count("main") == 1 and studio.count("h1") == 1
    pictures = studio.page.eval_on_selector_all(
        "svg[role=img]", "all => all.map(one => one.getAttribute('aria-label'))"
    )
    assert pictures and all(pictures)
    # Text stands out from its background.
    assert studio.page.evaluate("() => getComputedStyle(document.body).color") == "rgb(28, 33, 40)"

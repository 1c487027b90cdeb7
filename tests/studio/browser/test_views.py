"""Each view with the default model; what it shows is what the server's trace says."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest

from tests.server.running import RunningServer
from tests.studio.browser.pages import StudioPage

STORY = "The lighthouse keeper opened the door and saw"
CUT = {
    "prompt": "The capital of France is",
    "settings": {"do_sample": True, "top_p": 0.9, "seed": 5, "max_new_tokens": 24},
}


def trace(server: RunningServer, **body: Any) -> list[dict[str, Any]]:
    """The events of a request."""
    with httpx.stream("POST", f"{server.address}/v1/trace", json=body, timeout=120) as answer:
        return [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: ")]


def test_tokens_and_why_top_p_cut_one(studio: StudioPage, server: RunningServer) -> None:
    events = trace(server, prompt=CUT["prompt"], **CUT["settings"])
    written = [one for one in events if one["type"] == "token"]
    studio.write(**CUT)
    assert studio.tokens() == [one["text"].replace("\n", "↵") for one in written]
    # A token at which the line lies among those that are listed.
    place = next(at for at, one in enumerate(written) if 2 <= sum(not t["cut_by"] for t in one["top"]) < 12)
    studio.page.click(f".token-text .t[data-i='{place}']")
    top = written[place]["top"]
    cut = next(one for one in top if one["cut_by"])
    assert "top_p 0.9 keeps the likeliest tokens until together they hold 90 %" in studio.text(".why")
    assert "is past the line and was cut" in studio.text(".why")
    assert studio.count(".bars .bar") == len(top)
    assert studio.count(".bars .is-cut") == sum(bool(one["cut_by"]) for one in top)
    assert re.search(r"top_p 0\.9 cuts here", studio.text(".cut-line"))
    first_cut = studio.page.locator(".bars .is-cut").first
    assert first_cut.locator(".bar-token").inner_text().replace("␣", " ") == cut["text"].replace("\n", "↵")
    left = written[place]["steps"][-1]["left"]
    assert f"left {left:,} token" in studio.text(".steps")
    studio.shoot("tokens")


def test_beams_and_where_they_leave_greedy(studio: StudioPage, server: RunningServer) -> None:
    settings = {"num_beams": 4, "do_sample": False, "max_new_tokens": 20}
    events = trace(server, prompt=STORY, **settings)
    steps = [one for one in events if one["type"] == "beams"]
    studio.write(prompt=STORY, settings=settings)
    assert studio.count(".beam-tree .node") == sum(len(one["live"]) + len(one["ended"]) for one in steps)
    assert "".join(studio.tokens()) == events[-1]["text"]
    greedy = trace(server, prompt=STORY, do_sample=False, max_new_tokens=20)[-1]["sequences"][0]["ids"]
    best = events[-1]["sequences"][0]["ids"]
    parts = next(at for at, (one, other) in enumerate(zip(greedy, best, strict=True)) if one != other)
    assert f"left greedy at step {parts + 1}:" in studio.text("#view-beams .verdict")
    assert studio.page.text_content(".step-number.parts") == f"{parts + 1} ▾ leaves greedy"
    assert studio.page.is_visible(".step-number.parts") and f"Token {parts + 1}" in studio.text(".inspector")
    studio.shoot("beams")
    studio.page.locator(".beam-tree .node").last.click()
    assert "score" in studio.text(".beam-detail")


def test_groups_have_colours_and_forced_words_fill_up(studio: StudioPage) -> None:
    studio.open()
    studio.use("Diverse beams")
    assert {studio.count(f".beam-tree .node.group{group}") > 5 for group in range(3)} == {True}
    studio.use("Forced words")
    assert studio.count("#view-beams .progress .is-full") == 2
    assert " a storm" in "".join(studio.tokens()) and " the sea" in "".join(studio.tokens())


def test_drafts(studio: StudioPage, server: RunningServer) -> None:
    studio.open()
    studio.use("Speculation")
    told = studio.text("#view-drafts .verdict")
    found = re.match(r"(\d+) of (\d+) drafted tokens accepted \((\d+) %\), in (\d+) rounds", told)
    assert found, told
    accepted, drafted, share, rounds = map(int, found.groups())
    assert share == round(100 * accepted / drafted) and accepted > 5
    assert studio.count(".draft-chip.accepted") == accepted and studio.count(".round") == rounds
    assert studio.count(".t.draft-accepted") == accepted + studio.count(".legend .t.draft-accepted")
    assert studio.count(".draft-chip.rejected") > 0
    assert studio.page.input_value("#colour") == "drafts"
    studio.shoot("drafts")


def test_contrastive_dola_and_guidance(studio: StudioPage) -> None:
    studio.open()
    studio.use("Contrastive search")
    assert re.match(r"At \d+ of \d+ tokens the likeliest was too like", studio.text("#view-contrastive .verdict"))
    studio.page.locator("#view-contrastive .link").first.click()
    assert studio.count(".inspector tr.is-chosen") == 1 and "candidate" in studio.text(".inspector")
    studio.use("DoLa")
    assert studio.count(".layer-column") == len(studio.tokens()) == studio.count(".cell.chosen")
    studio.page.locator(".layer-column").nth(3).click()
    assert "its guess" in studio.text(".inspector") and studio.count(".inspector tr.is-chosen") == 1
    studio.shoot("dola")
    studio.use("Guidance")
    assert "Guidance changed the likeliest token" in studio.text("#view-guidance .verdict")
    studio.page.click(".token-text .t[data-i='2']")
    assert studio.count(".halves .half") == 2


def test_watermark_and_grammar(studio: StudioPage) -> None:
    studio.open()
    studio.use("Watermark")
    told = studio.text("#view-watermark .verdict")
    found = re.match(r"(\d+) of (\d+) scored tokens are green", told)
    assert found and "z = " in told
    green, scored = map(int, found.groups())
    assert studio.count(".token-text .mark-green") == green
    assert studio.count(".token-text .mark-red") == scored - green
    assert "watermark z" in studio.text("#view-ribbons")
    studio.shoot("watermark")
    studio.use("Grammar")
    assert set(json.loads("".join(studio.tokens()).replace("↵", "\n").split("<|")[0])) == {"name", "age"}
    assert "The grammar left one token alone" in studio.text("#view-grammar .verdict")
    assert "tokens allowed" in studio.text("#view-ribbons")


def test_compare(studio: StudioPage, server: RunningServer) -> None:
    studio.open(prompt=STORY, settings={"max_new_tokens": 24, "seed": 3})
    studio.page.click("#tab-compare")
    studio.page.click("#compare-run")
    studio.page.wait_for_function("() => document.querySelectorAll('.compare-stats dd').length === 15")
    studio.page.wait_for_function(
        "() => !document.querySelector('.compare .verdict').textContent.includes('Writing')", timeout=120_000
    )
    ids = [
        trace(server, prompt=STORY, max_new_tokens=24, **more)[-1]["sequences"][0]["ids"]
        for more in (
            {"do_sample": False},
            {"num_beams": 4, "do_sample": False},
            {"do_sample": True, "temperature": 1, "top_p": 0.9, "seed": 3},
        )
    ]
    beam, drawn = (next(at for at in range(24) if ids[0][at] != other[at]) for other in ids[1:])
    told = studio.text(".compare .verdict")
    assert f"Beam search leaves Greedy at token {beam + 1}." in told
    assert f"Sampling, top-p 0.9 leaves Greedy at token {drawn + 1}." in told
    assert studio.count(".compare-text .t.common") == beam + drawn and studio.count(".parting") == 2
    studio.shoot("compare")


def test_a_chat_goes_on(studio: StudioPage) -> None:
    studio.write(
        messages=[{"role": "user", "content": "What is the capital of Japan?"}],
        settings={"do_sample": False, "max_new_tokens": 16},
    )
    assert "Tokyo" in "".join(studio.tokens())
    assert studio.count(".message") == 3  # the question, the answer, and a place for the next


def test_branching_keeps_what_was_tried(studio: StudioPage) -> None:
    studio.write(prompt="The capital of France is", settings={"do_sample": False, "max_new_tokens": 12})
    first = studio.tokens()
    studio.page.click(".token-text .t[data-i='1']")
    other = studio.page.locator(".bars .bar:not(.is-chosen)").first
    word = other.locator(".bar-token").inner_text().replace("␣", " ")
    other.click()
    studio.wait()
    second = studio.tokens()
    assert second[:2] == [first[0], word] and len(second) == 2 + 16
    assert studio.count(".token-text .by-hand") == 1
    assert studio.count(".tried-run") == 2 and studio.count(".tried ul ul .tried-run") == 1
    studio.page.locator(".tried-run").first.click()
    assert studio.tokens() == first
    studio.shoot("branches")


def test_every_setting_has_help_and_bounds(studio: StudioPage, server: RunningServer) -> None:
    parameters = server.get("/v1/parameters").json()
    studio.open()
    names = studio.page.eval_on_selector_all(".setting", "all => all.map(one => one.dataset.name)")
    assert {one["name"] for one in parameters} <= set(names)
    assert len(names) == len(set(names))
    studio.page.fill("#settings-search", "contrastive")
    assert studio.page.is_visible("#set-penalty_alpha") and not studio.page.is_visible("#set-top_p")
    studio.page.fill("#set-penalty_alpha", "7")
    studio.page.click("#write")
    assert studio.text("#fault-penalty_alpha") == "penalty_alpha is at most 1"
    assert studio.count(".tried-run") == 0  # nothing was sent


def test_a_setting_that_the_server_refuses_is_shown_beside_it(studio: StudioPage) -> None:
    studio.allowed = ["400"]
    studio.open(prompt="x", settings={"num_beams": 2, "top_p": 0.5, "do_sample": False})
    studio.run()
    assert "only read when sampling" in studio.text("#fault-top_p")


@pytest.mark.parametrize("theme", ["dark", "light"])
def test_themes(browser: Any, server: RunningServer, theme: str) -> None:
    studio = StudioPage(browser, server.address, color_scheme=theme)
    studio.write(prompt=STORY, settings={"do_sample": True, "top_p": 0.9, "seed": 7, "max_new_tokens": 16})
    back = studio.page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", back)[:3])) < 200) == (theme == "dark")
    studio.page.click("#theme")
    assert studio.page.evaluate("() => document.documentElement.dataset.theme") == "light"
    studio.close()


def test_a_phone(browser: Any, server: RunningServer) -> None:
    studio = StudioPage(browser, server.address, color_scheme="dark", device_scale_factor=1.5, has_touch=True)
    studio.page.set_viewport_size({"width": 390, "height": 844})
    studio.write(**CUT)
    assert studio.page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
    studio.page.locator(".token-text .t").nth(2).tap()
    assert studio.page.is_visible(".inspector .bars")
    box, sheet = studio.page.locator(".is-selected").bounding_box(), studio.page.locator(".inspector").bounding_box()
    assert box["y"] >= 0 and box["y"] + box["height"] <= sheet["y"]  # the token is above the sheet
    studio.shoot("phone")
    studio.page.click(".sheet-close")
    assert not studio.page.is_visible(".inspector")
    studio.close()

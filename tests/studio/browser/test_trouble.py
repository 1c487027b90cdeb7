"""What may go wrong: hostile texts, lost streams, a server that goes away, keys, two tabs, very long texts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import unspool
from tests.server.running import RunningServer
from tests.studio.browser.pages import StudioPage, as_stream
from unspool.server.app import make_app
from unspool.server.serving import listen, make_server

HOSTILE = [
    "<img src=x onerror=alert(1)>",
    "</script><script>alert(2)</script>",
    "javascript:alert(3)",
    '"><svg onload=alert(4)>',
    "{{constructor.constructor('alert(5)')()}}",
    "\u202etxet desrever\u202c",
    "\u0000\u0007\ufeff",
    "__proto__",
    "${alert(6)}",
]


def make_token(index: int, text: str, **more: Any) -> dict[str, Any]:
    top = [
        {"id": 1000 + at, "text": one, "raw": 0.5 / (at + 1), "p": 0.4 / (at + 1), "cut_by": None}
        for at, one in enumerate([text, *HOSTILE])
    ]
    steps = [{"processor": "<b>x</b>", "setting": "<i>top_p</i>", "removed": 3, "left": 9, "changed": 1, "line": 0.1}]
    told = {
        "logprob": -1.0,
        "raw_logprob": -1.2,
        "rank": 2,
        "entropy": 1.0,
        "raw_entropy": 2.0,
        "ms": 12.5,
        "draft": None,
    }
    return {
        "type": "token",
        "index": index,
        "id": 1000,
        "text": text,
        "delta": text,
        "top": top,
        "steps": steps,
        **told,
        **more,
    }


def make_events(texts: list[str], *, ends: bool = True) -> list[dict[str, Any]]:
    start = {
        "type": "start",
        "id": "t",
        "model": "m",
        "strategy": "<b>sample</b>",
        "settings": {"<i>top_p</i>": "<u>"},
        "seed": 1,
        "prompt": [],
    }
    end = {
        "type": "end",
        "finish_reason": "<s>length</s>",
        "text": "".join(texts),
        "sequences": [],
        "stats": {"tokens_per_second": 9.5},
    }
    return [start, *(make_token(at, one) for at, one in enumerate(texts)), *([end] if ends else [])]


def test_hostile_tokens_run_nothing(studio: StudioPage) -> None:
    studio.open(prompt=HOSTILE[0], settings={"max_new_tokens": 9})
    studio.replay(make_events(HOSTILE))
    studio.run()
    assert studio.count(".token-text .t") == len(HOSTILE)
    assert studio.tokens()[:2] == HOSTILE[:2]
    for place in range(len(HOSTILE)):
        studio.page.locator(".token-text .t").nth(place).click()
    assert "⟨202E⟩" in studio.text(".inspector .bars") and "⟨0000⟩" in studio.text(".inspector .bars")
    assert (
        studio.count(
            "#app img, #app script, #app u, #app s, #app [onerror], #app [onload], .token-text b, .prompt-shown img"
        )
        == 0
    )
    studio.page.click("#code")
    assert "<img src=x onerror=alert(1)>" in studio.text("dialog")
    assert studio.page.evaluate("() => ({}).polluted === undefined && Object.prototype.raw === undefined")


def test_hostile_beams_drafts_and_layers(studio: StudioPage) -> None:
    bad = HOSTILE[0]
    beam = {
        "beam": 0,
        "parent": None,
        "group": 0,
        "id": 5,
        "text": bad,
        "score": -1.0,
        "sum_logprob": -1.0,
        "progress": [{"phrase": bad, "done": 1, "of": 2}],
    }
    events = make_events([], ends=False)
    events += [{"type": "beams", "step": 0, "live": [beam], "ended": []}]
    events += [
        {
            "type": "beams",
            "step": 1,
            "live": [{**beam, "parent": 0, "sum_logprob": -2.0}],
            "ended": [{"parent": 0, "group": 0, "id": 6, "text": bad, "score": -1.0}],
        }
    ]
    studio.open(prompt="x", settings={"num_beams": 2, "do_sample": False})
    studio.replay(events)
    studio.run()
    assert bad[:10] in (studio.page.text_content(".beam-tree") or "")
    studio.page.unroute("**/v1/trace")
    extra = {
        "dola": {
            "layer": 2,
            "divergences": [{"layer": 2, "value": 0.1}],
            "guesses": [{"layer": 2, "id": 1, "text": bad, "p": 0.5}],
        },
        "guidance": {"with": [{"id": 1, "text": bad, "p": 0.5}], "without": [{"id": 2, "text": bad, "p": 0.5}]},
        "contrastive": {"candidates": [{"id": 1, "text": bad, "p": 0.5, "penalty": 0.1, "score": 0.4, "chosen": True}]},
        "grammar": {"allowed": 3, "forced": False},
        "watermark": {"green": True, "scored": 3, "z": 1.0},
        "draft": "corrected",
    }
    drafts = {
        "type": "draft",
        "index": 0,
        "tokens": [{"id": 1, "text": bad, "verdict": "rejected"}],
        "accepted": 0,
        "drafted": 1,
        "total_accepted": 0,
        "total_drafted": 1,
    }
    events = make_events([bad, bad])
    studio.replay([events[0], drafts, *({**one, **extra} for one in events[1:-1]), events[-1]])
    studio.run()
    studio.page.locator(".token-text .t").first.click()
    for view in ("drafts", "dola", "guidance", "grammar", "watermark"):
        assert studio.page.is_visible(f"#view-{view}")
    assert studio.count("#app img, #app script, #app [onerror]") == 0


def test_a_lost_stream_shows_what_came_and_resumes(studio: StudioPage, server: RunningServer) -> None:
    settings = {"do_sample": False, "max_new_tokens": 10}
    studio.open(prompt="The capital of France is", settings=settings)
    sent: list[Any] = []
    whole = server.post("/v1/trace", {"prompt": "The capital of France is", **settings}).text.split("\n\n")

    def answer(route: Any) -> None:
        sent.append(json.loads(route.request.post_data))
        if len(sent) == 1:
            route.fulfill(
                content_type="text/event-stream", body="\n\n".join(whole[:5]) + "\n\n"
            )  # start and four tokens
        else:
            route.continue_()

    studio.page.route("**/v1/trace", answer)
    studio.run()
    assert len(studio.tokens()) == 4
    assert "The stream ended before the text did. What came is kept: 4 tokens." in studio.text(".notice")
    assert "you can resume" in studio.text("p[role=status].sr")
    studio.page.click("#resume")
    studio.wait()
    events = [json.loads(one[6:]) for one in whole if one.startswith("data: ")]
    ids = [one["id"] for one in events if one["type"] == "token"]
    assert sent[1]["prefix_ids"] == ids[:4]
    assert studio.tokens() == [one["text"].replace("\n", "↵") for one in events if one["type"] == "token"]
    assert not studio.page.is_visible(".notice")


def test_an_error_in_the_middle(studio: StudioPage) -> None:
    studio.open(prompt="x", settings={})
    studio.replay([*make_events([" a", " b"], ends=False), {"type": "error", "message": "the engine <b>broke</b>"}])
    studio.run()
    assert "the engine <b>broke</b>" in studio.text(".notice") and len(studio.tokens()) == 2
    assert studio.page.is_visible("#resume")


def test_stopping_keeps_what_came(studio: StudioPage, server: RunningServer) -> None:
    studio.open(prompt="Once upon a time", settings={"do_sample": False, "max_new_tokens": 400, "ignore_eos": True})
    studio.page.click("#write")
    studio.page.wait_for_function("() => document.querySelectorAll('.token-text .t').length > 3", timeout=60_000)
    studio.page.click("#stop")
    studio.wait()
    assert studio.text(".notice").startswith("Stopped.") and 3 < len(studio.tokens()) < 400
    server.wait_until_idle(60)


def test_a_server_that_goes_away_and_comes_back(browser: Any, default_model_file: Path) -> None:
    lm = unspool.load(default_model_file)
    asked: dict[str, Any] = {"prompt": "One, two,", "settings": {"do_sample": False, "max_new_tokens": 4}}
    options = {"max_rows": 4, "memory": 200 << 20, "block_size": 64}
    with RunningServer({"m": lm}, **options) as first:
        studio = StudioPage(browser, first.address)
        studio.write(**asked)
        before = studio.tokens()
        port = int(first.address.rpartition(":")[2])
    studio.allowed = ["ERR_CONNECTION_REFUSED", "Failed to load resource"]
    studio.run()
    assert "The server can't be reached." in studio.text(".notice")
    second = RunningServer({"m": unspool.load(default_model_file)}, **options)
    second._listening.close()
    second._listening = listen("127.0.0.1", port)
    second.server = make_server(make_app(second.state), second.state, second._listening, None, second._note_ready)
    with second:
        studio.page.click("#resume")
        studio.wait()
        assert studio.tokens() == before
        assert studio.count(".tried-run") == 3  # what was tried before is still there
        studio.close()


def test_a_chat_that_is_changed_while_it_is_answered(studio: StudioPage) -> None:
    studio.open(messages=[{"role": "tool", "content": "one"}], settings={})
    assert studio.page.input_value(".message select") == "tool"  # what is sent
    held: list[Any] = []
    studio.page.route("**/v1/trace", lambda route: held.append(route))

    def answer(change: Callable[[], Any]) -> list[str]:
        studio.page.click("#write")
        studio.page.wait_for_timeout(200)
        change()
        held.pop().fulfill(content_type="text/event-stream", body=as_stream(make_events([" an", " answer"])))
        studio.wait()
        return [str(one.input_value()) for one in studio.page.locator(".message textarea").all()]

    def add() -> None:
        studio.page.click("text=Add a message")
        studio.page.locator(".message textarea").last.fill("two")

    assert answer(add) == ["one", "an answer", "two"]
    assert answer(lambda: None) == ["one", "an answer", "two", "an answer", ""]
    assert answer(lambda: [one.fill("") for one in studio.page.locator(".message textarea").all()]) == [""] * 5


def test_a_value_that_can_t_be_is_not_left_out(studio: StudioPage) -> None:
    studio.open(prompt="x", settings={"do_sample": False, "max_new_tokens": 4})
    studio.replay(make_events([" a"]))
    for value in ("abc", "-1", "1,5", "1e999", "NaN"):
        studio.page.fill("#set-max_new_tokens", value)
        for tab, button, fault in (("write", "#write", ".go"), ("compare", "#compare-run", ".verdict")):
            studio.page.click(f"#tab-{tab}")
            studio.page.click(button)
            said = studio.text(".card > .fault" if tab == "write" else fault)
            assert "max_new_tokens is " in said, (value, tab)
    assert not [one for one in studio.asked if one.endswith("/v1/trace")]


def test_a_reload_in_the_middle_of_a_text_ends_it(studio: StudioPage, server: RunningServer) -> None:
    settings = {"do_sample": False, "max_new_tokens": 400, "ignore_eos": True}
    studio.open(prompt="Once upon a time", settings=settings)
    studio.page.click("#write")
    studio.page.wait_for_function("() => document.querySelectorAll('.token-text .t').length > 3", timeout=60_000)
    studio.page.reload()
    studio.page.wait_for_selector("#write", timeout=60_000)
    server.wait_until_idle(60)
    assert studio.page.input_value("#prompt") == "Once upon a time" and studio.count(".tried-run") == 0


def test_a_page_that_can_t_be_saved_says_so(studio: StudioPage) -> None:
    studio.open(prompt="x", settings={})
    studio.allowed = ["ERR_FAILED"]
    studio.page.route("**/studio/kept.html", lambda route: route.abort())
    studio.page.click("#save-page")
    studio.page.wait_for_selector(".card > .fault:not([hidden])")
    assert "The server can't be reached." in studio.text(".card > .fault")


def test_two_tabs_do_not_meet(browser: Any, server: RunningServer) -> None:
    first, second = StudioPage(browser, server.address), StudioPage(browser, server.address)
    settings = {"do_sample": False, "max_new_tokens": 8}
    first.open(prompt="One, two, three,", settings=settings)
    second.open(prompt="The capital of France is", settings=settings)
    first.page.click("#write")
    second.page.click("#write")
    first.wait()
    second.wait()
    assert "four" in "".join(first.tokens()) and "Paris" in "".join(second.tokens())
    assert first.count(".tried-run") == second.count(".tried-run") == 1
    first.close()
    second.close()


def test_a_server_that_wants_a_key(browser: Any, default_model_file: Path) -> None:
    lm = unspool.load(default_model_file)
    with RunningServer({"m": lm}, keys=("a-long-secret",), max_rows=4, memory=200 << 20, block_size=64) as running:
        studio = StudioPage(browser, running.address)
        studio.allowed = ["401"]
        studio.page.goto(running.address)
        for key in ("wrong-secret", "a-long-secret"):
            studio.page.wait_for_selector("#key")
            studio.page.fill("#key", key)
            studio.page.keyboard.press("Enter")
            studio.page.wait_for_timeout(300)
        studio.page.wait_for_selector("#write")
        studio.page.select_option("#preset", label="Greedy")
        studio.run()
        assert len(studio.tokens()) > 4
        studio.page.reload()  # the key stays in the tab
        studio.page.wait_for_selector("#write")
        assert studio.page.evaluate("() => Object.values(localStorage).join().includes('secret')") is False
        studio.close()


def measure_frame(studio: StudioPage) -> float:
    """The median time of a frame, in milliseconds, while the text is scrolled."""
    frames = studio.page.evaluate(
        """() => new Promise((done) => {
          const box = document.querySelector(".token-text"); const times = []; let before = performance.now();
          const step = (now) => { times.push(now - before); before = now; box.scrollTop += 97;
            if (times.length < 60) requestAnimationFrame(step); else done(times); };
          requestAnimationFrame(step); })"""
    )
    return float(sorted(frames)[len(frames) // 2])


def test_ten_thousand_tokens(studio: StudioPage) -> None:
    texts = ["\n" if at % 97 == 96 else f" word{at % 13}" for at in range(10_000)]
    events = [{**one, "top": one["top"][:3]} if one["type"] == "token" else one for one in make_events(texts)]
    studio.open(prompt="x", settings={})
    studio.replay(as_stream(events[:1001]))
    studio.run()
    short = measure_frame(studio)
    studio.page.unroute("**/v1/trace")
    studio.replay(as_stream(events))
    studio.run()
    assert studio.count(".token-text .t") == 10_000
    assert measure_frame(studio) < 2 * short + 10  # a text ten times as long scrolls as well
    # A click deep in the text is answered at once.
    studio.page.evaluate("() => { document.querySelector('.token-text').scrollTop = 1e9; }")
    took = studio.page.evaluate(
        """() => { const all = document.querySelectorAll('.token-text .t'); const start = performance.now();
          all[9990].click(); document.body.offsetHeight; return performance.now() - start; }"""
    )
    assert took < 500 and "Token 9,991" in studio.text(".inspector")


@pytest.mark.parametrize("text", ["שלום עולם, זה טקסט", "这是一个很长的句子。", "مرحبا بالعالم"])
def test_other_scripts(studio: StudioPage, text: str) -> None:
    pieces = [text[at : at + 3] for at in range(0, len(text), 3)]
    studio.open(prompt=text, settings={})
    studio.replay(make_events(pieces))
    studio.run()
    assert "".join(studio.tokens()) == text
    direction = studio.page.eval_on_selector(".token-text .block", "one => getComputedStyle(one).direction")
    assert direction == ("rtl" if text[0] in "שم" else "ltr")
    studio.page.focus(".token-text")
    studio.page.keyboard.press("Home")
    studio.page.keyboard.press("ArrowLeft" if direction == "rtl" else "ArrowRight")
    assert studio.page.locator(".token-text .is-selected").get_attribute("data-i") == "1"


def test_bytes_that_are_no_whole_character(studio: StudioPage) -> None:
    events = make_events([" a", "<0xF0><0x9F>", "<0x98><0x80>", "!"])
    events[2]["delta"], events[3]["delta"] = "", "😀"
    studio.open(prompt="x", settings={})
    studio.replay(events)
    studio.run()
    assert studio.tokens() == [" a", "▪", "😀", "!"]

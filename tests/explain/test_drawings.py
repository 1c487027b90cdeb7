"""Terminal, SVG and page: what they show, and that nothing in a token gets out of its place."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.explain import traces
from tests.explain.traces import SEARCHES, make_trace, read_words, search
from unspool.decoding.beams.trace import BeamTrace, Candidate
from unspool.explain import BeamTree, build_tree, draw_page, draw_svg, draw_terminal
from unspool.explain.layout import ROW, arrange, spread
from unspool.explain.wording import (
    measure,
    shorten,
    shorten_front,
    show_text,
    show_token,
    wrap,
    write_number,
    write_probability,
)

HOSTILE = [
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "\"'><svg onload=alert(1)>",
    "</style><style>*{display:none}",
    "<!--",
    "]]>",
    "&lt;b&gt;",
    "{{script}}",
    "\x1b[2J\x1b[31m",
    "\x00\x07\ufffe",
    "\u202eevil\u2066",
    "\u2028\u2029",
    "日本語のとても長いトークンです、これは",
    "x" * 500,
    "",
    "\n\r\t  ",
]
SVG = "{http://www.w3.org/2000/svg}"


def hand_made(*texts: str) -> BeamTree:
    words = dict(traces.WORDS)
    words |= dict(zip((1, 2, 3, 4, 5, 6), texts, strict=False))
    return build_tree(make_trace(), lambda ids: "".join(words[one] for one in ids), prompt_text="It was")


def of_search(name: str) -> BeamTree:
    return build_tree(search(name).beam_trace, lambda ids: "".join(f" t{one}" for one in ids), prompt_text="Go")


# --- words -----------------------------------------------------------------------------------------------
def test_words() -> None:
    assert show_token(" red") == "·red" and show_token("") == "∅" and show_token("\n\x1b") == "⏎␛"
    assert show_text("a b\u202ec") == "a b\\u202ec"
    assert [write_probability(value) for value in (0.0, -0.0001, -0.7, -3.0, -9.0, -1e9)] == [
        *("100%", "100%", "50%", "5.0%", "<0.1%", "<0.1%")
    ]
    assert write_number(-1.234) == "−1.23" and write_number(float("-inf")) == "−∞"
    assert shorten("abcdef", 4) == "abc…" and shorten_front("abcdef", 4) == "…def" and shorten("日本", 3) == "日…"
    assert wrap("one two three four", 8, 9) == ["one two", "three", "four"]
    assert wrap("one two three four", 8, 2) == ["one two", "three f…"]


@settings(max_examples=200)
@given(text=st.text(max_size=30), width=st.integers(1, 12), lines=st.integers(1, 4))
def test_wrapped_text_fits(text: str, width: int, lines: int) -> None:
    shown = show_text(text)
    assert measure(shorten(shown, width)) <= width and measure(shorten_front(shown, width)) <= width
    wrapped = wrap(shown, max(2, width), lines)
    assert len(wrapped) <= lines and all(measure(line) <= max(2, width) for line in wrapped)


@settings(max_examples=100)
@given(wanted=st.lists(st.floats(-100, 100), min_size=1, max_size=8), gap=st.floats(0.5, 30))
def test_spread_keeps_order_and_distance(wanted: list[float], gap: float) -> None:
    places = spread(wanted, [1.0] * len(wanted), gap)
    assert all(after - before >= gap - 1e-6 for before, after in itertools.pairwise(places))
    if all(after - before >= gap for before, after in itertools.pairwise(wanted)):
        assert places == pytest.approx(wanted)
    assert sum(places) == pytest.approx(sum(wanted), abs=1e-6)  # pooled means move nothing on the whole


# --- terminal --------------------------------------------------------------------------------------------
def test_the_terminal_s_tree() -> None:
    assert draw_terminal(hand_made(), 47) == (
        "It was                           token    total\n"
        "┆ e 14%\n"
        "├─● ·a                             61%    −0.50\n"
        "│ ┆ <end> 8.2%\n"
        "│ ├─● ·c                           47%    −1.25\n"
        "│ │ ● <end>  ← #1 eos −0.50        78%    −1.50\n"
        "│ └─● ·b                           78%    −0.75\n"
        "│   ┆ f 14%\n"
        "│   ● e  ← #2 length −0.75         22%    −2.25\n"
        "└─○ ·d                             22%    −1.50\n"
        "  ┆ f 37%\n"
        "\n"
        "● returned   ○ kept for a while   ■ finished\n"
        "┆ dropped at once\n"
        "\n"
        "  1    −0.50  eos         a c<end>\n"
        "  2    −0.75  length      a be\n"
    )


@pytest.mark.parametrize("width", [1, 40, 63, 80, 200, 5000])
@pytest.mark.parametrize("name", SEARCHES)
def test_lines_fit_the_width(name: str, width: int) -> None:
    lines = draw_terminal(of_search(name), width).splitlines()
    assert max(map(measure, lines)) <= max(40, min(width, 240))
    assert not any(line != line.rstrip() for line in lines)


@pytest.mark.parametrize("text", HOSTILE)
def test_nothing_acts_in_a_terminal(text: str) -> None:
    drawn = draw_terminal(hand_made(text, text, text, text, text, text), 60)
    assert all(character == "\n" or character.isprintable() for character in drawn)
    assert max(measure(line) for line in drawn.splitlines()[:10]) <= 60


def test_a_deep_tree_is_no_deep_recursion() -> None:
    trace = BeamTrace(2)
    for step in range(1, 3001):
        trace.note(0, step, [Candidate(1, 0, -0.1 * step, None), Candidate(4, 0, -0.2 * step, None)], [0, 1])
    tree = build_tree(trace, read_words)
    lines = draw_terminal(tree, 80).splitlines()
    assert len(lines) > 6000 and max(map(measure, lines)) <= 80
    assert draw_svg(tree).count('<g class="node') == 6000


def test_parts_are_painted_by_role() -> None:
    drawn = draw_terminal(hand_made(), 80, lambda text, role: f"<{role}>{text}</>")
    assert "<best>● ·c</>" in drawn and "<returned>● ·b</>" in drawn and "<kept>○ ·d</>" in drawn
    assert "<dropped>┆ e 14%</>" in drawn


def test_the_rest_is_counted() -> None:
    trace = BeamTrace(2)
    trace.note(0, 1, [Candidate(1, 0, -0.1, None), *(Candidate(5, 0, -2.0 - n, None) for n in range(9))], [0])
    assert "e 13.5%   e 5.0%   +7 more" in draw_terminal(build_tree(trace, read_words), 80, most_dropped=2).replace(
        "14%", "13.5%"
    )
    svg = draw_svg(build_tree(trace, read_words), most_dropped=2)
    assert svg.count('<g class="node drop"') == 2 and "(+7)" in svg


# --- SVG -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", SEARCHES)
def test_the_svg_shows_the_tree(name: str) -> None:
    tree = of_search(name)
    root = ET.fromstring(draw_svg(tree, most_dropped=100))
    groups = [one for one in root.iter(f"{SVG}g") if (one.get("class") or "").startswith("node")]
    assert len(groups) == sum(map(len, tree.steps))
    kinds = [(one.get("class") or "").split()[1] for one in groups]
    assert kinds.count("best") == len(tree.returned[0].node.path())
    edges = [one for one in root.iter(f"{SVG}path") if one.get("data-node") is not None]
    assert len(edges) == len(groups)
    texts = ["".join(one.itertext()) for one in root.iter(f"{SVG}text")]
    assert all(write_number(one.score) in texts for one in tree.returned)


def test_boxes_do_not_touch_and_lines_do_not_cross() -> None:
    for name in SEARCHES:
        layout = arrange(of_search(name), 100.0, most_dropped=4)
        for column in layout.columns:
            assert all(below.y - above.y >= ROW - 1e-6 for above, below in itertools.pairwise(column))
            parents = [0.0 if box.node.parent is None else layout.boxes[id(box.node.parent)].y for box in column]
            assert parents == sorted(parents)
        best = [box.y for box in layout.boxes.values() if 1 in box.node.ranks]
        assert max(best) - min(best) < ROW  # the best sequence is read from left to right


@pytest.mark.parametrize("text", HOSTILE)
def test_nothing_gets_out_of_the_svg(text: str) -> None:
    svg = draw_svg(hand_made(text, text, text, text, text, text))
    root = ET.fromstring(svg)  # well-formed, whatever the tokens are
    assert {one.tag.removeprefix(SVG) for one in root.iter()} <= {
        *("svg", "style", "rect", "text", "tspan", "g", "path", "title")
    }
    assert not any(name.startswith("on") or "href" in name for one in root.iter() for name in one.attrib)
    assert "url(" not in svg and svg.count("http") == 1  # the name space


# --- page ------------------------------------------------------------------------------------------------
class Page(HTMLParser):
    """The elements of a page, and the text of its scripts and styles, as a browser finds them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.raw: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        (self.raw if self.tags[-1:] in (["script"], ["style"]) else self.words).append(data)


@pytest.mark.parametrize("text", HOSTILE)
def test_nothing_gets_out_of_the_page(text: str) -> None:
    safe, page = (Page(draw_page(hand_made(*[one] * 6), about={"model": one})) for one in ("word", text))
    assert page.tags == safe.tags and page.tags.count("script") == 2
    assert [name for name, _ in page.attributes] == [name for name, _ in safe.attributes]
    assert not any(name.startswith("on") or name in ("src", "href", "style") for name, _ in page.attributes)
    data = json.loads(next(raw for raw in page.raw if raw.startswith("[{")))
    assert data[0]["text"] == show_text(text)
    assert "{{" not in "".join(safe.raw + safe.words)


def test_the_page_allows_its_own_script_and_styles_and_nothing_else() -> None:
    page = draw_page(hand_made())
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None and "default-src 'none'" in policy[1] and "unsafe" not in policy[1]
    inline = re.findall(r"<(?:script|style)>(.*?)</(?:script|style)>", page, re.DOTALL)
    assert len(inline) == 3
    for content in inline:
        assert f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'" in policy[1]
    assert page.count("http://") == 1 and "https://" not in page  # the name space of SVG


@pytest.mark.parametrize("name", SEARCHES)
def test_the_page_tells_what_the_tree_knows(name: str) -> None:
    tree = of_search(name)
    page = draw_page(tree, about={"model": "tiny"})
    data = json.loads(next(raw for raw in Page(page).raw if raw.startswith("[{")))
    numbers = [int(number) for number in re.findall(r'<g class="node \w+" data-node="(\d+)"', page)]
    assert sorted(numbers) == list(range(len(data))) and "model: tiny" in page
    for ending, number in zip(tree.returned, re.findall(r'<tr data-node="(\d+)"', page), strict=True):
        path, place = [], int(number)
        while place is not None:
            path.append(data[place]["text"])
            place = data[place]["parent"]
        assert "".join(reversed(path)) == ending.text
        assert data[int(number)]["total"] == write_number(ending.node.sum_logprobs)


def test_the_page_is_worked_by_keyboard_and_heard() -> None:
    """Nodes are buttons with a name, in a group: a picture (role img) could hold none; rows have a button too."""
    tree = hand_made("a", "<b>", " c")
    page = draw_page(tree)
    assert page.count('role="img"') == 0 and draw_svg(tree).count('role="img"') == 1
    kept = re.findall(r'<g class="node (?!drop)[^>]*>', page)
    assert kept and all('role="button"' in one and 'tabindex="0"' in one for one in kept)
    told = [re.search(r'aria-description="([^"]+)"', one) for one in kept]
    assert all(one and "log-probability" in one[1] and "<" not in one[1] for one in told)
    assert page.count("<main>") == 1 and page.count('<td class="rank"><button') == len(tree.returned)
    assert page.count('<th scope="col">') == 5
    assert "tabindex" not in draw_svg(tree) and "button" not in draw_svg(tree)

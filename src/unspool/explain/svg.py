"""A beam search as a static picture: steps from left to right, the returned sequences highlighted."""

from __future__ import annotations

import math
from html import escape

from unspool.explain.layout import (
    CHARACTER,
    GAP,
    HEIGHT,
    PADDING,
    SMALL_CHARACTER,
    Box,
    Layout,
    arrange,
)
from unspool.explain.tree import BeamTree, Node
from unspool.explain.wording import measure, show_text, show_token, wrap, write_number, write_probability

MARGIN = 24.0
NARROWEST = 640.0
HEADER = 34.0
PROMPT_COLUMNS, PROMPT_LINES = 22, 4
RETURNED_ROW = 26.0
_PROMPT_ROW = 18.0
_FONT = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono','Liberation Mono',monospace"
_FATES = {
    "best": "returned, part of the best",
    "good": "returned",
    "done": "finished, not returned",
    "kept": "kept for a while",
    "drop": "dropped",
}
# Written out twice instead of with var(): not every viewer of SVG knows CSS variables.
_LIGHT = {
    "back": "#fcfcfd",
    "ink": "#1d2330",
    "soft": "#565f6d",
    "faint": "#68707c",
    "line": "#a9b1bd",
    "thin": "#d3d8df",
    "box": "#ffffff",
    "edge": "#c9cfd8",
    "best": "#4338ca",
    "bestfill": "#e9e8fd",
    "good": "#6a63d8",
    "goodfill": "#f6f5fe",
    "onbest": "#ffffff",
}
_DARK = {
    "back": "#12161d",
    "ink": "#e7eaf0",
    "soft": "#9aa4b2",
    "faint": "#7c8694",
    "line": "#566070",
    "thin": "#333b47",
    "box": "#1a2029",
    "edge": "#3d4653",
    "best": "#a7a1ff",
    "bestfill": "#2a2856",
    "good": "#8d87e4",
    "goodfill": "#1d1f36",
    "onbest": "#15142b",
}


def draw_svg(tree: BeamTree, *, most_dropped: int | None = None, is_part_of_page: bool = False) -> str:
    """The picture as self-contained SVG text, with the returned sequences below.

    At most `most_dropped` dropped candidates per step are drawn (by default as many as there are beams). A page lists
    the sequences itself, and has its own details of a node.
    """
    prompt = wrap(show_text(tree.prompt) or "(prompt)", PROMPT_COLUMNS, PROMPT_LINES)
    prompt_width = max(map(measure, prompt)) * CHARACTER + 2 * PADDING + 4
    layout = arrange(
        tree, MARGIN + prompt_width + GAP, most_dropped=tree.num_beams if most_dropped is None else most_dropped
    )
    half_prompt = (len(prompt) * _PROMPT_ROW + 10) / 2
    top = MARGIN + HEADER + max(0.0, half_prompt - layout.root_y)
    bottom = top + max(layout.height, layout.root_y + half_prompt)
    width, height, notes = layout.width + MARGIN, bottom + MARGIN, []
    if not is_part_of_page:
        width = max(width, _measure_returned(tree), NARROWEST)
        height += 34 + RETURNED_ROW * len(tree.returned) + 16
        notes = [*_draw_returned(tree, bottom + 34), *_draw_legend(width - MARGIN, height - MARGIN + 6)]
    title = escape(f"Beam search with {tree.num_beams} beams after: {show_text(tree.prompt)[:200]}")
    role = "group" if is_part_of_page else "img"  # nodes of a page are buttons, which a picture could not hold
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="beams" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" role="{role}" aria-label="{title}">',
        f"<style>{build_style()}</style>",
        f'<rect class="back" width="{width:.0f}" height="{height:.0f}" rx="12"/>',
        *_draw_steps(layout),
        f'<g transform="translate(0 {top:.1f})">',
        *_draw_edges(layout, MARGIN + prompt_width),
        *_draw_prompt(prompt, prompt_width, layout.root_y),
        *(_draw_box(box, is_static=not is_part_of_page) for column in layout.columns for box in column),
        "</g>",
        *notes,
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def kind_of(node: Node) -> str:
    """How a node is drawn: `best`, `good` (returned too), `done` (finished), `kept` or `drop`."""
    if node.is_returned:
        return "best" if 1 in node.ranks else "good"
    return "done" if node.is_finished else "kept" if node.is_kept else "drop"


def build_style() -> str:
    """The picture's CSS rules: light, and dark if the reader's screen is."""
    return f"{_rules(_LIGHT)}@media (prefers-color-scheme:dark){{{_rules(_DARK)}}}"


def _rules(colour: dict[str, str]) -> str:
    return (
        f".beams text{{font:13px {_FONT};fill:{colour['ink']}}}"
        f".beams .back{{fill:{colour['back']}}}"
        f".beams .step{{font-size:11px;fill:{colour['faint']};text-anchor:middle}}"
        ".beams .first-step{text-anchor:start}"
        f".beams .prompt rect{{fill:{colour['ink']}}}.beams .prompt text{{fill:{colour['back']};font-weight:600}}"
        f".beams .box{{fill:{colour['box']};stroke:{colour['edge']}}}"
        f".beams .bar{{fill:{colour['line']};opacity:.55}}"
        f".beams .share{{font-size:11px;fill:{colour['soft']}}}.beams .gap{{fill:{colour['line']}}}"
        f".beams .edge{{fill:none;stroke:{colour['line']};stroke-width:1.3}}"
        f".beams .drop .box{{fill:none;stroke:none}}.beams .drop text,.beams .more{{fill:{colour['faint']}}}"
        f".beams .edge.drop{{stroke:{colour['thin']};stroke-dasharray:3 3;stroke-width:1}}"
        f".beams .more{{font-size:11px;text-anchor:middle}}"
        f".beams .good .box{{fill:{colour['goodfill']};stroke:{colour['good']}}}"
        f".beams .edge.good{{stroke:{colour['good']};stroke-width:1.8}}.beams .good .bar{{fill:{colour['good']}}}"
        f".beams .best .box{{fill:{colour['bestfill']};stroke:{colour['best']};stroke-width:1.6}}"
        f".beams .edge.best{{stroke:{colour['best']};stroke-width:3}}"
        f".beams .best .bar{{fill:{colour['best']};opacity:.8}}.beams .best .label{{font-weight:700}}"
        f".beams .badge rect{{fill:{colour['soft']}}}.beams .badge text{{font-size:11px;font-weight:700;"
        f"fill:{colour['onbest']};text-anchor:middle}}"
        f".beams .good .badge rect{{fill:{colour['good']}}}.beams .best .badge rect{{fill:{colour['best']}}}"
        f".beams .done .box{{stroke-dasharray:4 2}}.beams .score{{fill:{colour['soft']}}}"
        f".beams .first{{fill:{colour['best']};font-weight:700}}"
    )


# --- parts ----------------------------------------------------------------------------------------------
def _draw_steps(layout: Layout) -> list[str]:
    """The number over each step, and how many of its candidates are not drawn."""
    parts = [_text("step first-step", MARGIN, MARGIN + 6, "step")]
    for place, (left, width) in enumerate(zip(layout.lefts, layout.widths, strict=True)):
        middle = left + width / 2
        hidden = layout.hidden[place]
        more = f' <tspan class="more">(+{hidden})</tspan>' if hidden else ""
        parts.append(
            f'<text class="step" x="{middle:.1f}" y="{MARGIN + 6}" data-step="{place + 1}">{place + 1}{more}</text>'
        )
    return parts


def _draw_prompt(lines: list[str], width: float, y: float) -> list[str]:
    height = len(lines) * _PROMPT_ROW + 10
    first = y - height / 2 + 18
    words = [
        _text("", MARGIN + PADDING + 2, first + place * _PROMPT_ROW, escape(line)) for place, line in enumerate(lines)
    ]
    return ['<g class="prompt">', _rect("", MARGIN, y - height / 2, width, height, 7), *words, "</g>"]


def _draw_edges(layout: Layout, root_right: float) -> list[str]:
    order = ("drop", "kept", "done", "good", "best")  # the last is on top
    found: list[tuple[int, str]] = []
    for column in layout.columns:
        for box in column:
            parent = box.node.parent
            above = None if parent is None else layout.boxes[id(parent)]
            x, y = (root_right, layout.root_y) if above is None else (above.x + above.width, above.y)
            kind = kind_of(box.node)
            bend = box.x - GAP * 0.45
            found.append(
                (
                    order.index(kind),
                    f'<path class="edge {kind}" data-node="{box.number}" data-step="{box.node.step}" '
                    f'd="M{x:.1f} {y:.1f}H{box.x - GAP:.1f}C{bend:.1f} {y:.1f} {bend:.1f} {box.y:.1f} {box.x:.1f} '
                    f'{box.y:.1f}"/>',
                )
            )
    return [path for _, path in sorted(found, key=lambda pair: pair[0])]


def _draw_box(box: Box, *, is_static: bool) -> str:
    node, kind = box.node, kind_of(box.node)
    base = box.y + 3.4
    label_width = measure(box.label) * CHARACTER
    inner = 2 * PADDING + label_width + 7 + len(box.share) * SMALL_CHARACTER
    num_spaces = len(box.label) - len(box.label.lstrip("·")) if node.text.startswith(" ") else 0
    label = escape(box.label[num_spaces:])
    if num_spaces:
        label = f'<tspan class="gap">{"·" * num_spaces}</tspan>{label}'
    named = ""
    if not is_static and kind != "drop":
        about = escape(" ".join(describe(node).split()))  # its name is what it shows: token, probability, place
        named = f' tabindex="0" role="button" aria-pressed="false" aria-description="{about}"'
    parts = [f'<g class="node {kind}" data-node="{box.number}" data-step="{node.step}"{named}>']
    if is_static:
        parts.append(f"<title>{escape(describe(node))}</title>")
    parts.append(_rect("box", box.x, box.y - HEIGHT / 2, inner, HEIGHT, 6))
    if kind != "drop":
        share = math.exp(min(0.0, node.logprob))
        parts.append(_rect("bar", box.x + 6, box.y + HEIGHT / 2 - 3.4, max(1.0, (inner - 12) * share), 2, 1))
    parts.append(_text("label", box.x + PADDING, base, label))
    parts.append(_text("share", box.x + PADDING + label_width + 7, base, escape(box.share)))
    if box.badge:
        left, width = box.x + inner + 4, box.width - inner - 4
        shown = _text("", left + width / 2, box.y + 3.9, escape(box.badge))
        parts.append(f'<g class="badge">{_rect("", left, box.y - 8.5, width, 17, 8.5)}{shown}</g>')
    return "".join([*parts, "</g>"])


def _rect(kind: str, x: float, y: float, width: float, height: float, radius: float) -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<rect{named} x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:g}" rx="{radius:g}"/>'


def _text(kind: str, x: float, y: float, content: str) -> str:
    """A line of text; `content` is markup."""
    named = f' class="{kind}"' if kind else ""
    return f'<text{named} x="{x:.1f}" y="{y:.1f}" xml:space="preserve">{content}</text>'


def describe(node: Node) -> str:
    """A node in words: its token, its probability, and what happened to it."""
    return (
        f"{show_token(node.text)}  {write_probability(node.logprob)}\n"
        f"log-probability {write_number(node.logprob)}, in all {write_number(node.sum_logprobs)}\n"
        f"{describe_fate(node)}"
    )


def describe_fate(node: Node) -> str:
    """What happened to a node, in words."""
    ends = f", its sequence ended by {node.reason}" if node.reason is not None else ""
    score = f", score {write_number(node.score)}" if node.score is not None else ""
    return f"{_FATES[kind_of(node)]}{ends}{score}"


# --- the returned sequences -----------------------------------------------------------------------------
def _list_returned(tree: BeamTree) -> list[tuple[str, str, str]]:
    return [
        (f"#{one.rank}", write_number(one.score), wrap(show_text(one.text).lstrip(), 110, 1)[0])
        for one in tree.returned
    ]


def _measure_returned(tree: BeamTree) -> float:
    return 2 * MARGIN + 118 + max((measure(text) * CHARACTER for *_, text in _list_returned(tree)), default=0.0)


def _draw_returned(tree: BeamTree, top: float) -> list[str]:
    parts = []
    for place, (rank, score, text) in enumerate(_list_returned(tree)):
        y = top + 16 + place * RETURNED_ROW
        kind = "first" if place == 0 else ""
        parts += [_text(kind, MARGIN, y, rank), _text("score", MARGIN + 44, y, escape(score))]
        parts.append(_text(kind, MARGIN + 112, y, escape(text)))
    return parts


def _draw_legend(right: float, y: float) -> list[str]:
    """What the lines mean, from the right."""
    parts = []
    for kind, word in (("drop", "dropped"), ("kept", "kept for a while"), ("good", "returned"), ("best", "the best")):
        left = right - len(word) * SMALL_CHARACTER
        parts.append(_text("share", left, y, word))
        parts.append(f'<path class="edge {kind}" d="M{left - 34:.1f} {y - 4:.1f}h26"/>')
        right = left - 54
    return parts

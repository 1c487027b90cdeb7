"""A beam search as one web page: the picture, details of each node, the returned sequences; nothing from a network."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from html import escape
from importlib.resources import files
from typing import Any

from unspool.explain.layout import arrange
from unspool.explain.svg import build_style, describe_fate, draw_svg
from unspool.explain.tree import BeamTree, Node
from unspool.explain.wording import show_text, show_token, write_number, write_probability
from unspool.page_policy import build_policy


def draw_page(tree: BeamTree, *, about: Mapping[str, Any] | None = None, most_dropped: int | None = None) -> str:
    """The page as HTML text; `about` are facts to show below the prompt, such as the model's name.

    Tokens come from a model and could be anything: they are escaped everywhere, and the page's policy allows no script
    and no style but its own, and no request at all.
    """
    script, style = _read("page.js"), _read("page.css")
    facts = {"beams": tree.num_beams, "steps": len(tree.steps), **(about or {})}
    numbered = _number(tree, most_dropped)
    parts = {
        "policy": build_policy(scripts=[script], styles=[style, build_style()]),
        "title": escape(f"Beams: {show_text(tree.prompt)[:80]}"),
        "style": style,
        "prompt": escape(show_text(tree.prompt)) or "Beam search",
        "facts": escape(" · ".join(f"{name}: {show_text(str(value))}" for name, value in facts.items())),
        "last": str(len(tree.steps)),
        "svg": draw_svg(tree, most_dropped=most_dropped, is_part_of_page=True),
        "rows": _list_returned(tree, numbered),
        "data": _as_json([_describe(node, parent) for node, parent in numbered]),
        "script": script,
    }
    # One pass: inserted text is not searched for names again.
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _PAGE)


def _read(name: str) -> str:
    return files("unspool.explain").joinpath(name).read_text(encoding="utf-8")


def _as_json(value: Any) -> str:
    """JSON that can stand in a script element: nothing in it can end the element or begin a comment."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _number(tree: BeamTree, most_dropped: int | None) -> list[tuple[Node, int | None]]:
    """The nodes as the picture numbers them, each with its parent's number."""
    layout = arrange(tree, 0.0, most_dropped=tree.num_beams if most_dropped is None else most_dropped)
    boxes = [box for column in layout.columns for box in column]
    return [(box.node, None if box.node.parent is None else layout.boxes[id(box.node.parent)].number) for box in boxes]


def _describe(node: Node, parent: int | None) -> dict[str, Any]:
    group = f", group {node.group + 1}" if node.group else ""
    return {
        "parent": parent,
        "text": show_text(node.text),
        "token": f"{show_token(node.text)}  (id {node.token})",
        "step": f"{node.step}{group}",
        "probability": write_probability(node.logprob),
        "logprob": write_number(node.logprob),
        "total": write_number(node.sum_logprobs),
        "fate": describe_fate(node),
    }


def _list_returned(tree: BeamTree, numbered: list[tuple[Node, int | None]]) -> str:
    numbers = {id(node): place for place, (node, _) in enumerate(numbered)}
    return "\n".join(
        f'<tr data-node="{numbers[id(one.node)]}"><td class="rank">'
        f'<button type="button" aria-label="{one.rank}, show its path">{one.rank}</button></td>'
        f'<td class="number">{escape(write_number(one.score))}</td>'
        f'<td class="number">{escape(write_number(one.node.sum_logprobs))}</td>'
        f'<td class="text">{escape(show_text(one.text).lstrip())}</td><td>{escape(one.reason)}</td></tr>'
        for one in tree.returned
    )


_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{{policy}}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{title}}</title>
<style>{{style}}</style>
</head>
<body>
<header>
<div><h1>{{prompt}}</h1><p>{{facts}}</p></div>
<label>steps <input id="steps" type="range" min="1" max="{{last}}" value="{{last}}"><output id="shown"></output></label>
</header>
<main>
<div class="picture" tabindex="0" role="group" aria-label="The beams">{{svg}}</div>
<div class="below">
<section aria-label="Returned"><h2>Returned</h2>
<div class="scroll" tabindex="0" role="group" aria-label="Returned texts">
<table><thead><tr><th scope="col">#</th><th scope="col">score</th><th scope="col">log-probability</th>
<th scope="col">text</th><th scope="col">ended by</th></tr></thead>
<tbody>
{{rows}}
</tbody></table></div></section>
<section aria-label="Node" aria-live="polite"><h2>Node</h2>
<p id="hint">Point at a token to see its numbers and its path; click to keep them.</p>
<dl id="details" hidden><dt>token</dt><dd id="token"></dd><dt>step</dt><dd id="step"></dd>
<dt>probability</dt><dd id="probability"></dd><dt>log-probability</dt><dd id="logprob"></dd>
<dt>in all so far</dt><dd id="total"></dd><dt>fate</dt><dd id="fate"></dd>
<dt>text</dt><dd id="sofar" class="text"></dd></dl>
</section>
</div>
</main>
<script id="data" type="application/json">{{data}}</script>
<script>{{script}}</script>
</body>
</html>
"""

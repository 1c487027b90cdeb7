"""A judged text as one web page: its tokens coloured, and the z score as it grows; nothing from a network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from unspool.page_policy import build_policy
from unspool.watermark.scoring import Evidence, MarkScorer

WIDTH, HEIGHT, LEFT, BOTTOM = 860.0, 240.0, 44.0, 26.0
MOST_POINTS = 2000
_STYLE = """
body{font:16px/1.6 system-ui,sans-serif;
max-width:900px;margin:2rem auto;padding:0 1rem;color:#1d2330;background:#fcfcfd}
h1{font-size:1.4rem}dl{display:grid;grid-template-columns:max-content auto;gap:.1rem 1rem}dt{color:#656e7d}dd{margin:0}
.text{white-space:pre-wrap;overflow-wrap:anywhere;border:1px solid #d3d8df;border-radius:6px;padding:1rem}
.g{background:#bfe8c9}.r{background:#f6cccc}.n{color:#868e9a}svg{width:100%;height:auto}
.line{fill:none;stroke:#4338ca;stroke-width:2}.axis{stroke:#a9b1bd}.level{stroke:#c0392b;stroke-dasharray:5 4}
text{font:12px system-ui,sans-serif;fill:#656e7d}
@media (prefers-color-scheme:dark){body{color:#e7eaf0;background:#12161d}.text{border-color:#333b47}
.g{background:#1d5a2d}.r{background:#6b2226}.line{stroke:#a7a1ff}}
"""


def draw_page(
    scorer: MarkScorer,
    evidence: Evidence,
    pieces: Sequence[str],
    verdict: str,
    facts: Mapping[str, Any],
    z_level: float = 3.0,
) -> str:
    """The page as HTML text; `pieces` are the tokens' texts, which come from anyone and are escaped."""
    listed = "".join(f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>" for name, value in facts.items())
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{build_policy(styles=[_STYLE])}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Watermark: {escape(verdict)}</title><style>{_STYLE}</style></head>\n"
        f"<body><h1>{escape(verdict)}</h1><dl>{listed}</dl>\n{draw_growth(find_growth(scorer, evidence), z_level)}\n"
        f'<p class="text">{_colour(evidence, pieces)}</p>\n'
        '<p><span class="g">green</span>: on the marked side · <span class="r">red</span>: on the other · '
        '<span class="n">grey</span>: not counted (no context, or one that was counted before)</p></body></html>\n'
    )


def find_growth(scorer: MarkScorer, evidence: Evidence) -> list[float]:
    """The z score after each token that counts."""
    values = evidence.values[evidence.is_independent]
    counts = np.arange(1, len(values) + 1, dtype=np.float64)
    growth: list[float] = scorer.standardise(np.cumsum(values), counts).tolist()
    return growth


def draw_growth(growth: Sequence[float], z_level: float = 3.0) -> str:
    """The z score against the tokens counted, as SVG."""
    step = max(1, len(growth) // MOST_POINTS)
    shown = [*range(0, len(growth), step)]
    low, high = min(0.0, *growth, -1.0), max(z_level + 1, *growth, 1.0)
    across = (WIDTH - LEFT - 8) / max(1, len(growth) - 1)

    def up(z: float) -> float:
        return round((HEIGHT - BOTTOM) * (high - z) / (high - low) + 4, 1)

    points = " ".join(f"{LEFT + place * across:.1f},{up(growth[place])}" for place in shown)
    return (
        f'<svg viewBox="0 0 {WIDTH:g} {HEIGHT + 12:g}" role="img" aria-label="z score against tokens counted">'
        f'<line class="axis" x1="{LEFT}" x2="{WIDTH}" y1="{up(0)}" y2="{up(0)}"/>'
        f'<line class="level" x1="{LEFT}" x2="{WIDTH}" y1="{up(z_level)}" y2="{up(z_level)}"/>'
        f'<polyline class="line" points="{points}"/>'
        f'<text x="2" y="{up(0) + 4}">0</text><text x="2" y="{up(z_level) + 4}">z = {z_level:g}</text>'
        f'<text x="{WIDTH}" y="{HEIGHT + 8:g}" text-anchor="end">{len(growth)} tokens, z = {growth[-1]:.2f}</text>'
        "</svg>"
    )


def _colour(evidence: Evidence, pieces: Sequence[str]) -> str:
    parts = []
    for place, piece in enumerate(pieces):
        at = place - evidence.first
        if at < 0 or not evidence.is_independent[at]:
            kind = "n"
        else:
            kind = "g" if evidence.is_marked_side[at] else "r"
        parts.append(f'<span class="{kind}">{escape(piece)}</span>')
    return "".join(parts)

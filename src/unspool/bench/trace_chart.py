"""A trace as a picture: a line per request, from its arrival over its first token to its end."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from unspool.bench.chart import draw_about, draw_style
from unspool.bench.trace import ServedRequest, TraceReport, find_figures

MARGIN, HEADER, PANEL, GAP, WIDTH = 24.0, 56.0, 220.0, 40.0, 780.0


def draw_trace(report: TraceReport) -> str:
    """The picture as a self-contained SVG: the engine above, static batches below, on one scale of time."""
    last = max(one.ended for one in (*report.served, *report.static))
    parts, y = [], MARGIN + HEADER
    for name, served in (("engine", report.served), ("static batches", report.static)):
        figures = find_figures(served)
        words = f"{figures.tokens_per_second:,.1f} tokens/s, first token after {figures.first_median:.2f} s (median)"
        parts += [
            f'<text class="title" x="{MARGIN}" y="{y:.1f}">{name} <tspan class="soft">{escape(words)}</tspan></text>',
            *_draw_requests(served, y + 10, last),
        ]
        y += PANEL + GAP
    height = y - GAP + MARGIN + 20
    return (
        "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" class="bench" width="{WIDTH:.0f}" height="{height:.0f}" '
                f'viewBox="0 0 {WIDTH:.0f} {height:.0f}" role="img" aria-label="unspool bench --engine">',
                draw_style(),
                f'<rect class="back" width="{WIDTH:.0f}" height="{height:.0f}" rx="12"/>',
                *draw_about(report.about),
                *parts,
                f'<text class="soft" x="{MARGIN}" y="{height - 14:.1f}">each line is a request over {last:.1f} s: '
                "waiting and reading (light), writing (dark)</text>",
                "</svg>",
            ]
        )
        + "\n"
    )


def _draw_requests(served: Sequence[ServedRequest], top: float, last: float) -> list[str]:
    scale, step = (WIDTH - 2 * MARGIN) / max(last, 1e-9), (PANEL - 20) / len(served)
    height = max(0.6, min(12.0, step * 0.8))
    parts = []
    for number, one in enumerate(served):
        y = top + number * step
        for kind, begin, end in (("peer", one.arrived, one.first), ("own", one.first, one.ended)):
            x, width = MARGIN + begin * scale, max(0.5, (end - begin) * scale)
            parts.append(f'<rect class="{kind}" x="{x:.1f}" y="{y:.2f}" width="{width:.1f}" height="{height:.2f}"/>')
    return parts

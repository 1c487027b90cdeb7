"""The results as a picture: one panel per scenario, one bar per engine, the floor as a line."""

from __future__ import annotations

from html import escape

from unspool.bench.report import Report, show_figure
from unspool.bench.scenarios import Scenario

MARGIN, ROW, BAR, GAP, HEADER = 24.0, 24.0, 16.0, 26.0, 56.0
LABEL_WIDTH, BAR_WIDTH, FIGURE_WIDTH = 150.0, 420.0, 150.0
WIDTH = 2 * MARGIN + LABEL_WIDTH + BAR_WIDTH + FIGURE_WIDTH
_FONT = "system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif"
# Written out twice instead of with var(): not every viewer of SVG knows CSS variables.
_LIGHT = {
    "back": "#fcfcfd",
    "ink": "#1d2330",
    "soft": "#656e7d",
    "own": "#4338ca",
    "more": "#8a84e8",
    "peer": "#a9b1bd",
}
_DARK = {"back": "#12161d", "ink": "#e7eaf0", "soft": "#9aa4b2", "own": "#a7a1ff", "more": "#6f69c9", "peer": "#566070"}


def draw_chart(report: Report) -> str:
    """The picture as a self-contained SVG, light or dark as the reader's screen is."""
    panels, y = [], MARGIN + HEADER
    for scenario in report.scenarios:
        drawn, height = _draw_panel(report, scenario, y)
        panels += drawn
        y += height + GAP
    height = y - GAP + MARGIN
    title = escape("unspool bench: " + ", ".join(scenario.label for scenario in report.scenarios))
    return (
        "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" class="bench" width="{WIDTH:.0f}" height="{height:.0f}" '
                f'viewBox="0 0 {WIDTH:.0f} {height:.0f}" role="img" aria-label="{title}">',
                draw_style(),
                f'<rect class="back" width="{WIDTH:.0f}" height="{height:.0f}" rx="12"/>',
                *draw_about(report.about),
                *panels,
                "</svg>",
            ]
        )
        + "\n"
    )


def draw_style() -> str:
    """The colours, light or dark as the reader's screen is."""
    return f"<style>{_rules(_LIGHT)}@media (prefers-color-scheme:dark){{{_rules(_DARK)}}}</style>"


def _rules(colour: dict[str, str]) -> str:
    return (
        f".bench text{{font:13px {_FONT};fill:{colour['ink']}}}.bench .back{{fill:{colour['back']}}}"
        f".bench .soft{{fill:{colour['soft']};font-size:11px;font-weight:400}}.bench .name{{text-anchor:end}}"
        f".bench .title{{font-weight:600}}.bench .own{{fill:{colour['own']}}}.bench .more{{fill:{colour['more']}}}"
        f".bench .peer{{fill:{colour['peer']}}}"
        f".bench .floor{{stroke:{colour['ink']};stroke-width:1.4;stroke-dasharray:4 3}}"
    )


def draw_about(about: str) -> list[str]:
    """The line about the run, in as many lines as it takes."""
    words, lines = about.split(" · "), [""]
    for word in words:
        longer = f"{lines[-1]} · {word}" if lines[-1] else word
        if len(longer) > 110 and lines[-1]:
            lines.append(word)
        else:
            lines[-1] = longer
    return [
        f'<text class="soft" x="{MARGIN}" y="{MARGIN + 10 + 15 * number:.0f}">{escape(line)}</text>'
        for number, line in enumerate(lines[:3])
    ]


def _draw_panel(report: Report, scenario: Scenario, top: float) -> tuple[list[str], float]:
    """A scenario's title and bars, and their height."""
    hint = "more is better" if scenario.is_rate else "less is better"
    parts = [
        f'<text class="title" x="{MARGIN}" y="{top:.1f}">{escape(scenario.label)} '
        f'<tspan class="soft">{escape(scenario.unit)}, {hint}</tspan></text>'
    ]
    medians = {
        name: result.median
        for name in report.engines
        if (result := report.results.get((name, scenario.label))) is not None and result.median is not None
    }
    scale = BAR_WIDTH / max([*medians.values(), report.floors.get(scenario.label, 0.0), 1e-9])
    y, left = top + 12, MARGIN + LABEL_WIDTH
    first = next(iter(report.engines))
    for name, median in medians.items():
        kind = "own" if name == first else "more" if name.startswith("unspool") else "peer"
        ratio = report.find_ratio(name, scenario)
        figure = show_figure(median) + ("" if name == first or ratio is None else f" ({ratio:.2f}×)")
        width = max(1.0, median * scale)
        parts += [
            f'<text class="name" x="{left - 8:.1f}" y="{y + BAR - 3:.1f}">{escape(name)}</text>',
            f'<rect class="{kind}" x="{left:.1f}" y="{y:.1f}" width="{width:.1f}" height="{BAR:g}" rx="3"/>',
            f'<text x="{left + width + 8:.1f}" y="{y + BAR - 3:.1f}">{escape(figure)}</text>',
        ]
        y += ROW
    floor = report.floors.get(scenario.label)
    if floor is not None:
        x = left + floor * scale
        parts += [
            f'<path class="floor" d="M{x:.1f} {top + 8:.1f}V{y:.1f}"><title>memory floor: {show_figure(floor)} '
            f"{escape(scenario.unit)}</title></path>",
            f'<text class="soft" x="{x + 4:.1f}" y="{y + 8:.1f}">memory floor {show_figure(floor)}</text>',
        ]
        y += 12
    return parts, y - top

"""Charts of a simulation, as SVG."""

from __future__ import annotations

from collections.abc import Sequence

from simulator.book import Result
from simulator.clock import Simulation

_COLOURS = ("#4338ca", "#0f8a5f", "#c2660c", "#b3261e")


def _draw(title: str, curves: dict[str, list[tuple[float, float]]], unit: str, most: float) -> str:
    """Curves over one axis, each as a part of `most`, as SVG."""
    width, left, base, height = 640.0, 60.0, 260.0, 220.0
    last = max((x for points in curves.values() for x, _ in points), default=1.0) or 1.0
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} 320" font-family="sans-serif" font-size="12">'
        f'<rect width="100%" height="100%" fill="#fff"/><text x="{left}" y="20">{title}</text>'
    ]
    for part in (0, 0.25, 0.5, 0.75, 1):
        y = base - height * part
        parts.append(
            f'<path d="M{left} {y}H{width - 20}" stroke="#ddd"/><text x="8" y="{y + 4}">{most * part:.3g}</text>'
        )
        x = left + (width - left - 20) * part
        parts.append(f'<text x="{x:.1f}" y="{base + 18}" text-anchor="middle">{last * part:.3g}</text>')
    parts.append(f'<text x="{width - 20}" y="{base + 34}" text-anchor="end">{unit}</text>')
    for number, (name, points) in enumerate(curves.items()):
        path = " ".join(
            f"{left + (width - left - 20) * x / last:.1f},{base - height * min(1.0, y / most):.1f}" for x, y in points
        )
        colour = _COLOURS[number % len(_COLOURS)]
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{left + 190 * number}" y="{base + 50}" fill="{colour}">{name}</text>')
    return "".join([*parts, "</svg>"])


def draw_time(simulation: Simulation) -> str:
    """How busy the replicas were, over the simulated time."""
    book, replicas = simulation.book, simulation.replicas
    rows = replicas[0].machine.max_rows
    points: dict[str, list[tuple[float, float]]] = {"busy": [], "rows": []}
    for place in sorted(book.slices):
        busy, running, _ = book.slices[place]
        at, whole = place * book.width, book.width * len(replicas)
        points["busy"].append((at, min(1.0, busy / whole)))
        points["rows"].append((at, running / whole / rows))
    return _draw("part of the replicas' time, and of their rows", points, "seconds", 1.0)


def draw_loads(results: Sequence[tuple[float, Result]]) -> str:
    """Latencies against load."""
    curves = {
        "first token p50": [(load, one.first_p50) for load, one in results],
        "first token p99": [(load, one.first_p99) for load, one in results],
        "whole p99": [(load, one.latency_p99) for load, one in results],
    }
    most = max(y for points in curves.values() for _, y in points)
    return _draw("seconds, by load", curves, "load", most or 1.0)

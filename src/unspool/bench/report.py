"""A run's results: as rows of a table, as text, as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unspool.bench.rounds import Figures
from unspool.bench.scenarios import Scenario

FLOOR = "memory floor"


@dataclass(frozen=True, slots=True)
class Report:
    """A run's results, and what is needed to read them."""

    about: str  # date, machine, model and sizes, in one line
    engines: Mapping[str, str]  # descriptions by name; ours first
    scenarios: Sequence[Scenario]
    results: Mapping[tuple[str, str], Figures]  # by engine and scenario
    floors: Mapping[str, float]  # by scenario: milliseconds
    bandwidth: float  # bytes per second

    def find_ratio(self, engine: str, scenario: Scenario) -> float | None:
        """How many times faster our first engine is; None if there is nothing to compare."""
        own, other = self._median(next(iter(self.engines)), scenario), self._median(engine, scenario)
        if own is None or other is None or not own or not other:
            return None
        return own / other if scenario.is_rate else other / own

    def find_agreement(self, engine: str, scenario: Scenario) -> float | None:
        """The fraction of new tokens, from the first on, in which this engine and our first one agree."""
        own, other = (
            self.results.get((next(iter(self.engines)), scenario.label)),
            self.results.get((engine, scenario.label)),
        )
        if own is None or other is None or not own.tokens or not other.tokens:
            return None
        pairs = zip(own.tokens, other.tokens, strict=False)
        alike = next((place for place, (mine, theirs) in enumerate(pairs) if mine != theirs), len(own.tokens))
        return alike / len(own.tokens)

    def _median(self, engine: str, scenario: Scenario) -> float | None:
        result = self.results.get((engine, scenario.label))
        return None if result is None else result.median


def build_rows(report: Report) -> tuple[list[str], list[list[str]]]:
    """The table's heading and its rows, cell by cell."""
    heading = ["", *(f"{scenario.label}\n{scenario.unit}" for scenario in report.scenarios)]
    rows = [[name, *(_show_cell(report, name, scenario) for scenario in report.scenarios)] for name in report.engines]
    if report.floors:
        rows.append([FLOOR, *(_show_floor(report, scenario) for scenario in report.scenarios)])
    return heading, rows


def list_notes(report: Report) -> list[str]:
    """The notes below the table: descriptions of the engines, and failures."""
    notes = [f"{name}: {words}{_describe_agreement(report, name)}" for name, words in report.engines.items()]
    notes.append(f"{FLOOR}: weights and keys of a step, read at {report.bandwidth / 1e9:.1f} GB/s")
    for (engine, label), result in report.results.items():
        if result.failure is not None:
            notes.append(f"{engine} failed at {label}: {result.failure}")
    return notes


def _describe_agreement(report: Report, engine: str) -> str:
    """How far an engine's text equals ours, if both wrote one: different rounding ends in different words."""
    first = next(iter(report.engines))
    shares = {scenario.label: report.find_agreement(engine, scenario) for scenario in report.scenarios}
    label, share = next(((label, share) for label, share in shares.items() if share is not None), ("", None))
    if engine == first or share is None:
        return ""
    return f"; writes what {first} writes for {share:.0%} of {label}"


def format_table(report: Report) -> str:
    """The table in plain text, ratios to our first engine in brackets, with its notes."""
    heading, rows = build_rows(report)
    tops = [cell.split("\n") for cell in heading]
    lines = [[cell[0] for cell in tops], [cell[-1] if len(cell) > 1 else "" for cell in tops], *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(heading))]
    drawn = ["  ".join(_align(cell, width, place) for place, (cell, width) in _number(line, widths)) for line in lines]
    drawn.insert(2, "─" * max(map(len, drawn)))
    return "\n".join([report.about, "", *(line.rstrip() for line in drawn), "", *list_notes(report)]) + "\n"


def _number(line: Sequence[str], widths: Sequence[int]) -> list[tuple[int, tuple[str, int]]]:
    return list(enumerate(zip(line, widths, strict=True)))


def _align(cell: str, width: int, column: int) -> str:
    return cell.ljust(width) if column == 0 else cell.rjust(width)


def to_json(report: Report) -> str:
    """Everything, as a JSON object."""
    scenarios = []
    for scenario in report.scenarios:
        found: dict[str, Any] = {}
        for engine in report.engines:
            result = report.results.get((engine, scenario.label))
            if result is None:
                continue
            found[engine] = {
                "median": result.median,
                "tenths": result.spread,
                "num_values": len(result.values),
                "ratio": report.find_ratio(engine, scenario),
                "same_tokens": report.find_agreement(engine, scenario),
                "failure": result.failure,
            }
        scenarios.append(
            {
                "scenario": scenario.label,
                "unit": scenario.unit,
                "floor": report.floors.get(scenario.label),
                "engines": found,
            }
        )
    whole = {
        "about": report.about,
        "engines": dict(report.engines),
        "bandwidth_bytes_per_second": report.bandwidth,
        "scenarios": scenarios,
    }
    return json.dumps(whole, ensure_ascii=False, allow_nan=False, indent=1) + "\n"


def _show_cell(report: Report, engine: str, scenario: Scenario) -> str:
    result = report.results.get((engine, scenario.label))
    if result is None:
        return "–"
    if result.failure is not None or result.median is None:
        return "failed"
    ratio = report.find_ratio(engine, scenario)
    is_first = engine == next(iter(report.engines))
    return show_figure(result.median) + ("" if is_first or ratio is None else f" ({ratio:.2f}×)")


def _show_floor(report: Report, scenario: Scenario) -> str:
    floor = report.floors.get(scenario.label)
    if floor is None:
        return ""
    own = report.results[next(iter(report.engines)), scenario.label].median
    return show_figure(floor) + (f" ({floor / own:.0%})" if own else "")


def show_figure(value: float) -> str:
    """A figure with three significant digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"

"""The table, the JSON and the chart of a run."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

from unspool.bench.benchmark import Benchmark
from unspool.bench.chart import draw_chart
from unspool.bench.report import Report, format_table, show_figure, to_json
from unspool.bench.rounds import Figures
from unspool.bench.scenarios import list_scenarios


def make_report(**changes: object) -> Report:
    scenarios = list_scenarios(Benchmark("m", Path("m.gguf"), "gguf", only=("decode", "beam", "batch")))
    one, eight, beam, batch = scenarios
    results = {
        ("unspool", one.label): Figures([4.0, 5.0, 4.5], [1, 2, 3, 4]),
        ("unspool", eight.label): Figures([20.0, 22.0], [1, 2, 3, 4]),
        ("unspool", beam.label): Figures([12.0], [1, 2]),
        ("unspool", batch.label): Figures([600.0], [1]),
        ("other <&>", one.label): Figures([45.0, 46.0, 44.0], [1, 2, 9, 4]),
        ("other <&>", eight.label): Figures(failure="MemoryError: no room"),
        ("other <&>", batch.label): Figures([150.0], [1]),
    }
    fields = {
        "about": "2026-01-01 · a machine · " + " · ".join(["long words about it"] * 9),
        "engines": {"unspool": "ours, blocks", "other <&>": "theirs, float32"},
        "scenarios": scenarios,
        "results": results,
        "floors": {one.label: 3.0, eight.label: 3.3},
        "bandwidth": 31.25e9,
    }
    return Report(**{**fields, **changes})


def test_table() -> None:
    about, _, *lines = format_table(make_report()).splitlines()
    assert about.startswith("2026-01-01 · a machine")
    assert lines == [
        "                  decode ×1   decode ×8     beam 4     batch 16",
        "                  ms a step   ms a step  ms a step     tokens/s",
        "───────────────────────────────────────────────────────────────",
        "unspool                4.50        21.0       12.0          600",
        "other <&>     45.0 (10.00×)      failed          –  150 (4.00×)",
        "memory floor     3.00 (67%)  3.30 (16%)",
        "",
        "unspool: ours, blocks",
        "other <&>: theirs, float32; writes what unspool writes for 50% of decode ×1",
        "memory floor: weights and keys of a step, read at 31.2 GB/s",
        "other <&> failed at decode ×8: MemoryError: no room",
    ]


def test_json_has_all_figures() -> None:
    found = json.loads(to_json(make_report()))
    assert found["bandwidth_bytes_per_second"] == 31.25e9 and list(found["engines"]) == ["unspool", "other <&>"]
    one, eight, beam, batch = found["scenarios"]
    assert one["floor"] == 3.0 and beam["floor"] is None
    other = one["engines"]["other <&>"]
    assert other["median"] == 45.0 and other["ratio"] == 10.0 and other["same_tokens"] == 0.5
    assert other["num_values"] == 3 and other["tenths"] == [44.2, 45.8]
    assert eight["engines"]["other <&>"] == {
        "median": None,
        "tenths": None,
        "num_values": 0,
        "ratio": None,
        "same_tokens": None,
        "failure": "MemoryError: no room",
    }
    assert "other <&>" not in beam["engines"] and batch["engines"]["other <&>"]["ratio"] == 4.0


def test_chart_is_a_picture_of_the_figures() -> None:
    root = ET.fromstring(draw_chart(make_report()))
    name = "{http://www.w3.org/2000/svg}"
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    bars = [bar for bar in root.iter(f"{name}rect") if bar.attrib.get("class") in ("own", "more", "peer")]
    assert len(bars) == 6  # what failed and what an engine can't do have none
    widths = [float(bar.attrib["width"]) for bar in bars]
    assert abs(widths[0] / widths[1] - 0.1) < 0.01  # 4.5 and 45 ms
    for bar in bars:
        assert float(bar.attrib["x"]) + float(bar.attrib["width"]) < width
        assert float(bar.attrib["y"]) + float(bar.attrib["height"]) < height
    assert len(list(root.iter(f"{name}path"))) == 2  # two floors
    shown = [text for text in root.itertext() if text.strip()]
    assert "other <&>" in shown and "45.0 (10.00×)" in shown


def test_figures_have_three_digits() -> None:
    assert [show_figure(value) for value in (0.1234, 1.0, 9.876, 98.76, 987.6, 12345.0)] == [
        *("0.12", "1.00", "9.88", "98.8", "988", "12,345")
    ]

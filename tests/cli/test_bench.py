"""`unspool bench`."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

MODELS = Path(__file__).parents[1] / "conformance" / "goldens" / "models"
SMALL = ("--device", "cpu", "--new", "4", "--prompt", "5", "--prefill", "12", "--batch", "2", "--rounds", "2")


def test_table_json_and_chart(cli: Callable[..., Any], tiny: str, tmp_path: Path) -> None:
    figures, chart = tmp_path / "bench.json", tmp_path / "bench.svg"
    ended = cli(
        "bench", tiny, "--peer", "transformers", *SMALL, "--json", str(figures), "--plot", str(chart),
        "--quantize", "auto", "none",
    )  # fmt: skip
    assert ended.code == 0
    lines = ended.out.splitlines()
    assert "prompt 5, 4 new tokens, greedy, 2 rounds in turns, medians" in lines[0]
    assert lines[2].split() == ["decode", "×1", "decode", "×8", "prefill", "12", "beam", "4", "batch", "2"]
    assert [line.split("  ")[0] for line in lines[5:9]] == ["unspool", "unspool plain", "transformers", "memory floor"]
    assert "writes what unspool writes for 100% of decode ×1" in ended.out
    assert ended.err == f"wrote {figures}\nwrote {chart}\n"
    found = json.loads(figures.read_text())
    assert [scenario["scenario"] for scenario in found["scenarios"]] == [
        "decode ×1",
        "decode ×8",
        "prefill 12",
        "beam 4",
        "batch 2",
    ]
    for scenario in found["scenarios"]:
        assert list(scenario["engines"]) == ["unspool", "unspool plain", "transformers"]
        assert all(each["median"] > 0 and each["same_tokens"] == 1.0 for each in scenario["engines"].values())
    assert found["scenarios"][0]["engines"]["unspool"]["num_values"] == 2
    assert ET.fromstring(chart.read_text()).tag.endswith("svg")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--new", "0"), "--new 0 is no whole number from 2 to 4096"),
        (("--new", "nan"), "--new"),
        (("--peer", "tranformers"), "did you mean transformers?"),
        (("--peer", "llama-cpp=no/such.gguf"), "--peer llama-cpp=no/such.gguf: there is no such file or folder"),
        (("--only", "sleep"), "use decode, prefill, beam, batch"),
        (("--json", "no/such/folder/x.json"), "there is no folder"),
        (("--prefill", "4000"), "the model's context ends at 128"),
        (("--plot", "x", "--json", "x"), "two of them name the same file"),
    ],
)
def test_what_cant_be_is_refused(cli: Callable[..., Any], tiny: str, words: tuple[str, ...], message: str) -> None:
    ended = cli("bench", tiny, *SMALL, *words)
    assert ended.code == 2 and message in ended.err and ended.out == ""


def test_an_encoder_decoder_is_measured_beside_transformers(cli: Callable[..., Any], tmp_path: Path) -> None:
    figures = tmp_path / "x.json"
    words = ("--prompt", "100", "--prefill", "120", "--new", "20", "--peer", "transformers", "--json", str(figures))
    ended = cli("bench", str(MODELS / "bart"), *SMALL, *words)
    assert ended.code == 0, ended.err
    for scenario in json.loads(figures.read_text())["scenarios"]:
        assert all(each["same_tokens"] == 1.0 for each in scenario["engines"].values())


def test_only_what_is_asked_is_measured(cli: Callable[..., Any], tiny: str) -> None:
    ended = cli("bench", tiny, *SMALL, "--only", "prefill")
    assert ended.code == 0 and ended.out.splitlines()[2].split() == ["prefill", "12"]
    assert "memory floor" not in ended.out.splitlines()[5]


def test_requests_over_time(cli: Callable[..., Any], tiny: str, tmp_path: Path) -> None:
    trace, figures, chart = tmp_path / "trace.jsonl", tmp_path / "x.json", tmp_path / "x.svg"
    trace.write_text('{"at": 0.05, "prompt": 3, "new": 4}\n{"at": 0, "prompt": 6, "new": 3}\n')
    ended = cli(
        "bench", tiny, "--engine", "--trace", str(trace), "--device", "cpu", "--batch", "2", "--json", str(figures),
        "--plot", str(chart),
    )  # fmt: skip
    assert ended.code == 0 and "static batches" in ended.out
    assert [one["new"] for one in json.loads(figures.read_text())["requests"]] == [3, 4]
    assert ET.fromstring(chart.read_text()).tag.endswith("svg")
    for words, told in (
        (("--engine", "--peer", "transformers"), "--peer"),
        (("--rate", "3"), "add --engine"),
        (("--engine", "--rate", "nan"), "--rate"),
        (("--engine", "--trace", "x", "--requests", "3"), "leave --requests"),
    ):
        ended = cli("bench", tiny, "--device", "cpu", *words)
        assert ended.code == 2 and told in ended.err

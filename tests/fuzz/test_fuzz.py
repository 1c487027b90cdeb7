"""A short share of every kind of hostile input, and the runner itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz import findings, mutate, runner
from tests.fuzz.kinds._harmful import HARM
from unspool.errors import LoadError


@pytest.mark.filterwarnings("ignore")  # of torch and transformers, in what makes the inputs
@pytest.mark.parametrize("name", findings.list_kinds())
def test_inputs_end_in_a_result_or_a_clear_error(name: str, tmp_path: Path) -> None:
    kind = findings.find_kind(name)
    for seed in range(kind.short):
        folder = tmp_path / str(seed)
        folder.mkdir()
        outcome = findings.try_input(kind, seed, folder)
        assert outcome.verdict in ("clean", "refused"), f"seed {seed}: {outcome.verdict}\n{outcome.details}"


@pytest.mark.filterwarnings("ignore")  # of torch and transformers, in what makes the inputs
@pytest.mark.parametrize("name", findings.list_kinds())
def test_an_input_is_made_again_from_its_seed(name: str) -> None:
    kind = findings.find_kind(name)
    for seed in range(3):
        assert repr(findings.make_input(kind, seed)) == repr(findings.make_input(kind, seed))


def test_texts_of_errors_are_checked() -> None:
    findings.check_error(LoadError("a line\nand another"))
    for text in ("", "x" * 2_001, "\x1b]0;title\x07", "\x9b31m", "a\x00b", "\ud800"):
        with pytest.raises(findings.Difference):
            findings.check_error(ValueError(text))


@pytest.mark.parametrize("text", ["x" * 70_000, "\x1b]0;title\x07" * 500, "a\ud800\x9b\u202e", "advice"])
def test_our_own_errors_keep_that(text: str) -> None:
    error = LoadError(f"{text}, use another")
    findings.check_error(error)
    assert str(error).endswith("use another")


def test_raw_text_stands_in_json_as_it_is() -> None:
    text = mutate.dump_json({"a": [mutate.Raw("9" * 5_000), "\ud800"], "b": float("nan")})
    assert text == b'{"a": [' + b"9" * 5_000 + b', "\\ud800"], "b": NaN}'


def test_the_runner_outlives_its_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "WALL_SECONDS", 2.0)
    kind = findings.find_kind("_harmful")
    deeds = [findings.make_input(kind, seed) for seed in range(126, 135)]
    assert set(deeds) == set(HARM)
    said: list[str] = []
    tally = runner.run(["_harmful"], count=9, first_seed=126, jobs=1, say=said.append)
    faults = [(seed, HARM[deed]) for seed, deed in enumerate(deeds, 126) if HARM[deed] in findings.FAULTS]
    assert [(finding.seed, finding.verdict) for finding in tally.findings] == faults
    assert tally.tried == 9
    assert tally.counts["_harmful"]["refused"] == deeds.count("refuse")
    assert "--kind _harmful" in said[0]
    assert tally.table().splitlines()[-1].split("|")[2].strip() == "9"

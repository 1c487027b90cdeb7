from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unspool.beams import BeamHypotheses
from unspool.errors import NoTokenLeftError, SettingError

TOKENS = torch.arange(10)


def test_the_worst_one_goes() -> None:
    hypotheses = BeamHypotheses(num_beams=4, length_penalty=2.0, early_stopping=False)
    assert hypotheses.worst_score == 1e9
    for number in range(5):
        hypotheses.add(TOKENS, -10.0 + number)
    assert len(hypotheses) == 4
    assert [score for score, _, _ in hypotheses.beams] == [(-9.0 + number) / 100 for number in range(4)]
    assert hypotheses.worst_score == -9.0 / 100
    hypotheses.add(TOKENS, -9.0)  # no better than the worst
    assert [score for score, _, _ in hypotheses.beams] == [(-9.0 + number) / 100 for number in range(4)]
    assert not hypotheses.is_done(-5.0, 10)
    assert hypotheses.is_done(-20.0, 10)


@given(st.lists(st.integers(-40, -1), max_size=20), st.integers(2, 5))
def test_the_best_are_kept(sums: list[int], num_beams: int) -> None:
    hypotheses = BeamHypotheses(num_beams, 1.0, True)
    for number, total in enumerate(sums):
        hypotheses.add(torch.tensor([number]), total, generated_len=4, beam_indices=(number,))
    assert sorted(one.score for one in hypotheses.beams) == sorted(total / 4 for total in sums)[-num_beams:]
    assert hypotheses.is_done(0.0, 1) == (len(sums) >= num_beams)
    for score, tokens, beam_indices in hypotheses.beams:
        assert score == sums[int(tokens)] / 4 and beam_indices == (int(tokens),)
    if len(sums) >= num_beams:
        assert hypotheses.worst_score == min(one.score for one in hypotheses.beams)


@pytest.mark.parametrize(
    ("early_stopping", "length_penalty", "best", "is_done"),
    [
        (True, 1.0, 0.0, True),
        # one hypothesis of -8 over 4 written tokens; the prompt has 2, the longest sequence 12
        (False, 1.0, -9.9, False),  # -9.9 / 5 > -2
        (False, 1.0, -10.0, True),
        (False, 0.0, -7.9, False),
        (False, 0.0, -8.0, True),
        (False, -1.0, -6.3, False),  # -6.3 * 5 > -32
        (False, -1.0, -6.5, True),
        ("never", 1.0, -19.9, False),  # -19.9 / 10 > -2
        ("never", 1.0, -20.0, True),
        ("never", -1.0, -6.3, False),
        ("never", -1.0, -6.5, True),
    ],
)
def test_when_no_better_one_is_expected(early_stopping: Any, length_penalty: float, best: float, is_done: bool) -> None:
    hypotheses = BeamHypotheses(1, length_penalty, early_stopping, max_length=12)
    assert not hypotheses.is_done(-100.0, 7, 2)
    hypotheses.add(TOKENS[:6], -8.0, generated_len=4)
    assert hypotheses.is_done(best, cur_len=7, decoder_prompt_len=2) is is_done


def test_what_cannot_be_scored() -> None:
    with pytest.raises(SettingError, match="max_length"):
        BeamHypotheses(2, 1.0, "never")
    with pytest.raises(SettingError, match="early_stopping"):
        BeamHypotheses(2, 1.0, "always", max_length=3)
    with pytest.raises(SettingError, match="length_penalty"):
        BeamHypotheses(2, math.nan, False)
    full = BeamHypotheses(1, 1.0, "never", max_length=3)
    full.add(TOKENS, -1.0)
    with pytest.raises(SettingError, match="max_length"):
        full.is_done(-1.0, 5, decoder_prompt_len=3)
    with pytest.raises(SettingError, match="length_penalty"):
        full.add(TOKENS, -1.0, generated_len=0)
    with pytest.raises(SettingError, match="length_penalty"):
        BeamHypotheses(1, 1e6, False).add(TOKENS, -1.0)
    with pytest.raises(NoTokenLeftError, match="NaN"):
        full.add(TOKENS, math.nan)
    assert len(full) == 1

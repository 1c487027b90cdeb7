"""Stopping where a text only repeats itself: any period, any strategy, alone and among others."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from tests.engine.fakes import BLOCK_BYTES
from tests.server.running import Reciting, make_fake_lm

from unspool.engine import Engine
from unspool.errors import SettingError
from unspool.stopping import RepeatCriteria


def is_loop(ids: list[int], count: int) -> bool:
    """The same, said plainly."""
    tail = ids[-count:]
    return len(ids) >= count and any(tail[p:] == tail[:-p] for p in range(1, count // 3 + 1))


def test_loops_of_every_period_are_found_and_nothing_else() -> None:
    draw = random.Random(2)
    for _ in range(400):
        count, period = draw.randint(6, 40), draw.randint(1, 15)
        word = [draw.randrange(3) for _ in range(period)]
        ids = (
            [draw.randrange(3) for _ in range(draw.randint(0, 9))]
            + word * draw.randint(1, 9)
            + word[: draw.randrange(4)]
        )
        stop = RepeatCriteria(count)
        assert (stop.match(ids) is not None) == is_loop(ids, count), (count, ids)
        assert bool(stop(torch.tensor([ids]), None)) == is_loop(ids, count)


@pytest.mark.parametrize(
    "strategy", [{}, {"do_sample": True, "seed": 1}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 4}]
)
def test_a_text_that_loops_ends(strategy: dict[str, Any]) -> None:
    lm = make_fake_lm(Reciting([40, 41, 42, 43, 44]))
    free = lm.generate([[5, 6, 7]], max_new_tokens=60)
    answer = lm.generate([[5, 6, 7]], max_new_tokens=60, stop_on_repeats=20, **strategy)
    assert answer.finish_reasons == ["repetition"] and len(answer.token_ids[0]) == 20
    assert answer.token_ids[0] == free.token_ids[0][:20]
    assert "".join(lm.stream([[5, 6, 7]], max_new_tokens=60, stop_on_repeats=20, **strategy)) == answer.text


def test_rows_of_an_engine_end_each_for_itself() -> None:
    lm = make_fake_lm(Reciting([40, 41, 42, 43, 44, 45]))
    asked: list[dict[str, Any]] = [{"stop_on_repeats": 18}, {}, {"stop_on_repeats": 30}, {"stop_on_repeats": 0}]
    with Engine(lm, max_rows=4, memory=BLOCK_BYTES * 400, block_size=16) as engine:
        made = [one.result() for one in [engine.submit([5, 6], max_new_tokens=40, **more) for more in asked]]
    assert [(len(one.token_ids[0]), one.finish_reasons[0]) for one in made] == [
        (18, "repetition"),
        (40, "length"),
        (30, "repetition"),
        (40, "length"),
    ]


def test_what_can_not_be_is_refused() -> None:
    for value in (5, -1, 5000, True):
        with pytest.raises(SettingError, match="stop_on_repeats"):
            make_fake_lm().generate([[5]], stop_on_repeats=value, max_new_tokens=2)

"""Drawing with a drafter that draws: the distribution is the model's own, whatever the drafter thinks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.decoding.speculative.drafting_fakes import Layered, make_drafters
from unspool import generate
from unspool.decoding.randomness import draw_uniform
from unspool.decoding.speculative.drafters.base import Draft
from unspool.decoding.speculative.verify import choose_against
from unspool.logits import RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper, TopPLogitsWarper

VOCAB, PROMPT, NUM_ROWS = 5, [1, 2], 2000
# The chi-square that one in a thousand true distributions exceeds, by degrees of freedom.
CRITICAL = {4: 18.5, 24: 51.2}


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    expected = probabilities * counts.sum()
    possible = expected > 0
    assert int(counts[~possible].sum()) == 0  # what can't come never does
    return float(((counts - expected)[possible] ** 2 / expected[possible]).sum())


def shape_scores(ids: list[int], scores: torch.Tensor, settings: dict[str, Any]) -> torch.Tensor:
    """The processed distribution after a text, by the processors' own definition."""
    row, history = scores[None], torch.tensor([ids])
    if "repetition_penalty" in settings:
        row = RepetitionPenaltyLogitsProcessor(settings["repetition_penalty"])(history, row)
    row = TemperatureLogitsWarper(settings["temperature"])(history, row)
    if "top_p" in settings:
        row = TopPLogitsWarper(settings["top_p"])(history, row)
    return row[0].double().softmax(-1)


@pytest.mark.parametrize("drafter", ["lookup", "model", "unsure model", "lookup and model", "early exit", "auto model"])
@pytest.mark.parametrize(
    "settings",
    [{"temperature": 4.0}, {"temperature": 5.0, "top_p": 0.9, "repetition_penalty": 1.6}],
    ids=["plain", "shaped"],
)
def test_draws_follow_the_models_distribution(drafter: str, settings: dict[str, Any]) -> None:
    target = Layered(VOCAB, amount=2.0)
    output = generate(
        target,
        [PROMPT],
        max_new_tokens=4,
        do_sample=True,
        top_k=0,
        seed=11,
        num_return_sequences=NUM_ROWS,
        return_dict_in_generate=True,
        **settings,
        **make_drafters(target, 2.0)[drafter],
    )
    if drafter != "auto model":
        assert 0.05 < output.speculation.acceptance < 0.98  # both ways out of a check are taken
    drawn = output.sequences[:, 2:]
    chance = torch.zeros(VOCAB, VOCAB, VOCAB, dtype=torch.float64)  # of the first three tokens
    for first in range(VOCAB):
        for second in range(VOCAB):
            third = shape_scores([*PROMPT, first, second], target.score([*PROMPT, first, second]), settings)
            chance[first, second] = third
        chance[first] *= shape_scores([*PROMPT, first], target.score([*PROMPT, first]), settings)[:, None]
    chance *= shape_scores(PROMPT, target.score(PROMPT), settings)[:, None, None]
    singles = {0: chance.sum((1, 2)), 1: chance.sum((0, 2)), 2: chance.sum((0, 1))}
    for place, expected in singles.items():
        counts = torch.bincount(drawn[:, place], minlength=VOCAB).double()
        assert chi_square(counts, expected) < CRITICAL[4]
    for places, expected in (((0, 1), chance.sum(2)), ((1, 2), chance.sum(0))):
        pairs = drawn[:, places[0]] * VOCAB + drawn[:, places[1]]
        counts = torch.bincount(pairs, minlength=VOCAB**2).double()
        assert chi_square(counts, expected.flatten()) < CRITICAL[24]


def test_the_rule_by_itself() -> None:
    """One position, drafts drawn from q: what comes out is p, and as often the guess as can be."""
    n = 20_000
    p = torch.tensor([0.5, 0.0, 0.2, 0.3, 0.0])
    q = torch.tensor([0.1, 0.4, 0.2, 0.3, 0.0])
    place = torch.arange(n)
    guesses = torch.searchsorted(q.cumsum(0).double(), draw_uniform(place, place, 3), right=True).clamp(max=4)
    numbers = [draw_uniform(place, place, stream) for stream in (0, 2)]
    chosen = choose_against(p.log().expand(n, -1), guesses, q.expand(n, -1), *numbers)
    assert chi_square(torch.bincount(chosen, minlength=5).double(), p.double()) < 13.8  # two degrees of freedom
    overlap = float(torch.minimum(p, q).sum())  # 1 - total variation
    assert float((chosen == guesses).double().mean()) == pytest.approx(overlap, abs=0.012)


def test_the_rule_at_its_edges() -> None:
    half = torch.tensor([0.5])
    same = torch.tensor([[0.25, 0.75]])
    for guess in (0, 1):  # p and q agree: every guess stays
        assert choose_against(same.log(), torch.tensor([guess]), same, half, half).tolist() == [guess]
    none = torch.zeros(1, 2)
    assert choose_against(same.log(), torch.tensor([0]), none, half, half).tolist() == [1]  # no guess: a plain draw
    impossible = torch.full((1, 2), -torch.inf)
    assert choose_against(impossible, torch.tensor([0]), same, half, half).tolist() == [-1]
    only = torch.tensor([[0.0, -torch.inf]])
    assert choose_against(only, torch.tensor([1]), same, half, half).tolist() == [0]  # a forbidden guess never stays


def test_drafts_are_right_filled_and_cut() -> None:
    draft = Draft.of([[1, 2, 3], [], [4]], torch.device("cpu"))
    assert draft.tokens.tolist() == [[1, 2, 3], [0, 0, 0], [4, 0, 0]] and draft.counts == [3, 0, 1]
    shorter = draft.cut([2, 5, 0])
    assert shorter.tokens.tolist() == [[1, 2], [0, 0], [4, 0]] and shorter.counts == [2, 0, 0]

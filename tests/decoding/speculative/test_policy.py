"""How long drafts are: schedules, the confidence threshold, and the policy that weighs costs."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from unspool.decoding.speculative.drafters.confidence import Confidence
from unspool.decoding.speculative.policy import CheckedTurn, Scheduled
from unspool.decoding.speculative.weighing import Acceptance, Weighed


def turn(drafted: list[int], accepted: list[int], draft: float = 0.0, check: float = 1.0) -> CheckedTurn:
    return CheckedTurn(drafted, accepted, len(drafted), len(drafted) + sum(accepted), draft, check)


def test_schedules() -> None:
    constant, heuristic = Scheduled(5), Scheduled(5, "heuristic")
    for accepted, expected in ((5, 7), (3, 6), (6, 8)):
        drafted = heuristic.choose([99])
        heuristic.observe(turn(drafted, [accepted]))
        constant.observe(turn([5], [min(accepted, 5)]))
        assert heuristic.choose([99]) == [expected] and constant.choose([99]) == [5]
    for _ in range(20):
        heuristic.observe(turn([3], [0]))
    assert heuristic.choose([99]) == [1] and heuristic.choose([0]) == [0]
    heuristic.observe(turn([0], [0]))  # nothing was drafted: nothing is learned
    assert heuristic.choose([99]) == [1]
    heuristic.observe(replace(turn([0], [0]), reads_prompt=True))
    assert heuristic.choose([99]) == [3]


def test_the_threshold_goes_where_it_would_have_cost_least() -> None:
    confidence = Confidence(0.4)
    assert confidence.is_enough(0.4) and not confidence.is_enough(0.39)
    confidence.learn([0.9, 0.8, 0.7, 0.3], 3, True)
    assert confidence.threshold == 0.4  # too few yet
    confidence.learn([0.95, 0.2], 1, True)
    assert confidence.threshold == pytest.approx(0.7)  # what was right lies above, what was wrong below
    confidence.learn([0.1, 0.1], 2, False)  # guesses never looked at say nothing
    assert confidence.threshold == pytest.approx(0.1)


def test_no_threshold_never_stops_nor_moves() -> None:
    confidence = Confidence(0.0)
    for _ in range(10):
        confidence.learn([0.5, 0.1], 1, True)
    assert confidence.threshold == 0.0 and confidence.is_enough(0.0)


def test_acceptance_is_learned() -> None:
    acceptance = Acceptance()
    for _ in range(80):
        acceptance.learn([4], [4])
    assert acceptance.expect(4) == pytest.approx(4, abs=0.1)
    for _ in range(80):
        acceptance.learn([4], [0])
    assert acceptance.expect(4) < 0.15


def simulate(
    right: float, slope: float, draft_cost: float, *, is_free: bool, num_tokens: int = 400, found: float = 1.0
) -> tuple[float, float]:
    """Seconds for a text under the policy, where a guess is right so often, over those without drafts; and guesses
    accepted a turn."""
    chance = random.Random(4)
    policy = Weighed(16, is_free=is_free)
    seconds, written, turns = 0.0, 0, 0
    while written < num_tokens:
        wanted = policy.choose([num_tokens - written])
        guesses = wanted[0] if is_free is False or chance.random() < found else 0
        counts = policy.trim([guesses], 1) if guesses else [0]
        accepted = 0
        while accepted < counts[0] and chance.random() < right:
            accepted += 1
        noise = 1 + 0.1 * chance.random()
        one = turn(counts, [accepted], draft_cost * (guesses or 0), noise * (1 + slope * counts[0]))
        policy.observe(one)
        seconds += one.draft_seconds + one.check_seconds
        written += 1 + accepted
        turns += 1
    return seconds / (num_tokens * 1.05), written / turns


@pytest.mark.parametrize("slope", [0.01, 0.15, 0.5, 1.0])
@pytest.mark.parametrize("right", [0.0, 0.2, 0.5, 0.9, 1.0])
@pytest.mark.parametrize(("is_free", "draft_cost"), [(True, 0.0), (False, 0.05), (False, 0.4)])
def test_drafting_never_costs_more_than_it_may(right: float, slope: float, is_free: bool, draft_cost: float) -> None:
    ratio, _ = simulate(right, slope, draft_cost, is_free=is_free)
    assert ratio < 1 / 0.97


def test_drafting_pays_where_it_can() -> None:
    ratio, accepted = simulate(0.95, 0.05, 0.0, is_free=True)
    assert ratio < 0.25 and accepted > 6
    ratio, accepted = simulate(0.8, 0.05, 0.1, is_free=False)
    assert ratio < 0.6
    ratio, _ = simulate(0.9, 0.1, 0.0, is_free=True, found=0.3)
    assert ratio < 0.6


def test_drafting_comes_back_when_the_text_turns_easy() -> None:
    policy = Weighed(8, is_free=True)
    for number in range(300):
        counts = policy.trim(policy.choose([99]), 1) if any(policy.choose([99])) else [0]
        is_easy = number > 150
        policy.observe(turn(counts, counts if is_easy else [0], check=1 + 0.2 * counts[0]))
    assert policy.trim(policy.choose([99]), 1)[0] >= 6

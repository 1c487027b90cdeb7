"""The numbers sampling draws: uniform, and a function of seed and position alone."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unspool.decoding.randomness import AHEAD, Positions, derive_seed, draw_seed, draw_uniform
from unspool.decoding.select import draw, draw_plainly, take_likeliest
from unspool.kernels.splitmix import MASK, STEP, mix

MANY = 20_000


def draw_many(over: str) -> torch.Tensor:
    fixed, moving = torch.full((MANY,), 7), torch.arange(MANY)
    if over == "positions":
        return draw_uniform(fixed, moving)
    if over == "seeds":
        return draw_uniform(moving, fixed)
    if over == "copies of one seed":
        return draw_uniform(torch.tensor([derive_seed(7, index) for index in range(MANY)]), fixed)
    return torch.stack([draw_uniform(moving[:200], torch.full((200,), place)) for place in range(100)]).flatten()


@pytest.mark.parametrize("over", ["positions", "seeds", "copies of one seed", "both"])
def test_numbers_are_uniform(over: str) -> None:
    numbers = draw_many(over)
    assert numbers.dtype == torch.float64
    assert float(numbers.min()) >= 0 and float(numbers.max()) < 1
    sigma = 1 / math.sqrt(12 * MANY)
    assert abs(float(numbers.mean()) - 0.5) < 4 * sigma
    assert abs(float(numbers.var()) - 1 / 12) < 4 / math.sqrt(180 * MANY)
    steps = torch.arange(MANY + 1, dtype=torch.float64) / MANY
    ordered = numbers.sort().values
    distance = torch.maximum((ordered - steps[:-1]).abs().max(), (ordered - steps[1:]).abs().max())
    assert float(distance) < 1.95 / math.sqrt(MANY)  # Kolmogorov-Smirnov at 0.1 %


@pytest.mark.parametrize("over", ["positions", "seeds", "copies of one seed"])
@pytest.mark.parametrize("lag", [1, 2, 17])
def test_neighbours_are_independent(over: str, lag: int) -> None:
    numbers = draw_many(over) - 0.5
    correlation = (numbers[:-lag] * numbers[lag:]).mean() * 12
    assert abs(float(correlation)) < 4 / math.sqrt(MANY)


def test_seed_and_position_are_not_interchangeable() -> None:
    """Neither their sum nor their order decides: the table of pairs has no two alike."""
    seeds, positions = torch.meshgrid(torch.arange(100), torch.arange(100), indexing="ij")
    numbers = draw_uniform(seeds.flatten(), positions.flatten())
    assert len(set(numbers.tolist())) == 100 * 100


@given(
    pairs=st.lists(st.tuples(st.integers(0, 2**63 - 1), st.integers(0, 2**31)), min_size=1, max_size=8),
    stream=st.integers(0, 3),
)
def test_a_number_does_not_depend_on_the_batch(pairs: list[tuple[int, int]], stream: int) -> None:
    seeds, positions = (torch.tensor(column) for column in zip(*pairs, strict=True))
    whole = draw_uniform(seeds, positions, stream)
    alone = [draw_uniform(seeds[i : i + 1], positions[i : i + 1], stream).item() for i in range(len(pairs))]
    assert whole.tolist() == alone


def test_streams_differ() -> None:
    seeds, positions = torch.arange(1000), torch.zeros(1000, dtype=torch.int64)
    first, second = (draw_uniform(seeds, positions, stream) for stream in (0, 1))
    assert not (first == second).any()
    assert abs(float(((first - 0.5) * (second - 0.5)).mean() * 12)) < 4 / math.sqrt(1000)


@given(seed=st.integers(0, 2**63 - 1), position=st.integers(0, 2**24), stream=st.integers(0, 3))
def test_a_number_is_what_it_says(seed: int, position: int, stream: int) -> None:
    """In whole numbers of 64 bits, so that a seed gives the same tokens in every version and on every device."""
    state = mix((mix((seed + STEP * (stream + 1)) & MASK) + position * STEP) & MASK)
    found = draw_uniform(torch.tensor([seed]), torch.tensor([position]), stream)
    assert found.item() == (state >> 11) * 2.0**-53


def test_derived_seeds_are_distinct_and_fit() -> None:
    seeds = [derive_seed(seed, index) for seed in (0, 1, 2, 3, 2**63 - 1) for index in range(2000)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed(42, 0) == 42


def test_a_drawn_seed_follows_torch() -> None:
    torch.manual_seed(5)
    first = [draw_seed() for _ in range(3)]
    torch.manual_seed(5)
    assert first == [draw_seed() for _ in range(3)]
    assert len(set(first)) == 3 and all(0 <= seed < 2**63 for seed in first)


# --- choosing a token ---------------------------------------------------------------------------------------


@given(
    scores=st.lists(st.sampled_from([-math.inf, -30.0, -2.0, 0.0, 1.0, 5.0, 30.0]), min_size=1, max_size=9),
    uniform=st.floats(0, 1, exclude_max=True) | st.sampled_from([0.0, 1 - 2**-53]),
)
def test_draw_is_where_the_cumulated_probability_passes(scores: list[float], uniform: float) -> None:
    if all(score == -math.inf for score in scores):
        return
    # The library's exponentials are a float's, right to 2e-7 of each share.
    for make, exactness in ((draw_plainly, 1e-12), (draw, 1e-6)):
        chosen = int(make(torch.tensor([scores]), torch.tensor([uniform], dtype=torch.float64)))
        assert scores[chosen] > -math.inf  # a token of probability zero is never drawn
        weights = [math.exp(score) for score in scores]
        below, total = sum(weights[:chosen]), sum(weights)
        assert below / total <= uniform + exactness
        assert uniform - exactness <= (below + weights[chosen]) / total


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-53])
def test_forbidden_ends_are_never_drawn(uniform: float) -> None:
    scores = torch.full((1, 50_000), -torch.inf)
    scores[0, 20_000:20_003] = torch.tensor([1.0, -100.0, 1.0])
    assert int(draw(scores, torch.tensor([uniform], dtype=torch.float64))) in (20_000, 20_002)


def test_the_first_of_equals_is_the_likeliest() -> None:
    scores = torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0], [-torch.inf, -1.0, -1.0]])
    assert take_likeliest(scores).tolist() == [1, 0, 1]


def test_positions_are_those_that_were_asked_for() -> None:
    positions, device = Positions(), torch.device("cpu")
    asked = [[3, 9], [4, 10], [6, 12], [5, 11], [5, 12], [3 + AHEAD, 10 + AHEAD], [7], [8], [8, 8, 9], [2, 2, 3]]
    for each in asked:
        assert positions.take(each, device).tolist() == each

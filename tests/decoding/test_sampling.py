"""Sampling: the right distribution, and the same tokens for the same request whatever stands beside it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.fakes import FakeModel, decode_slowly, pad_left
from unspool import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, generate
from unspool.decoding.randomness import derive_seed, draw_uniform
from unspool.errors import NoTokenLeftError, SettingError

ROWS = [[1, 2, 3], [4, 5, 6, 7, 8], [9]]
PLAIN = {"do_sample": True, "top_k": 0}


def sample_slowly(model: FakeModel, prompt: list[int], num_new: int, seed: int, warp: Any = None) -> list[int]:
    """The slow loop with a number for each position, and the cumulated probability walked by hand."""

    def choose(scores: torch.Tensor, position: int) -> int:
        scores = scores if warp is None else warp(torch.tensor([[0]]), scores[None])[0]
        uniform = float(draw_uniform(torch.tensor([seed]), torch.tensor([position])))
        passed = 0.0
        for token, probability in enumerate(torch.softmax(scores.double(), -1).tolist()):
            passed += probability
            if passed > uniform:
                return token
        raise AssertionError("the probabilities do not add up")

    return decode_slowly(model, prompt, num_new, choose=choose)


def new_tokens(model: FakeModel, rows: list[list[int]], num_new: int = 8, **settings: Any) -> list[list[int]]:
    width = max(map(len, rows))
    return generate(model, **pad_left(rows), max_new_tokens=num_new, **settings)[:, width:].tolist()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.5},
        {"top_k": 4},
        {"top_p": 0.8},
        {"temperature": 1.7, "top_k": 9, "top_p": 0.9},
    ],
    ids=str,
)
def test_draws_equal_the_slow_loop(settings: dict[str, Any]) -> None:
    warp = LogitsProcessorList()
    for name, make in (
        ("temperature", TemperatureLogitsWarper),
        ("top_k", TopKLogitsWarper),
        ("top_p", TopPLogitsWarper),
    ):
        if name in settings:
            warp.append(make(settings[name]))
    model = FakeModel()
    found = new_tokens(model, ROWS, seed=[3, 5, 3], **PLAIN | settings)
    expected = [sample_slowly(model, row, 8, seed, warp) for row, seed in zip(ROWS, (3, 5, 3), strict=True)]
    assert found == expected


def test_top_k_is_fifty_where_nobody_says_otherwise() -> None:
    model = FakeModel(80)
    found = new_tokens(model, ROWS, num_new=20, do_sample=True, seed=[1, 2, 3])
    warp = LogitsProcessorList([TopKLogitsWarper(50)])
    assert found == [sample_slowly(model, row, 20, seed, warp) for row, seed in zip(ROWS, (1, 2, 3), strict=True)]


# --- the same request gives the same tokens -----------------------------------------------------------------


@pytest.mark.parametrize(
    "way",
    [{}, {"use_cache": False}, {"cache_implementation": "static"}, {"prefill_chunk_size": 2}],
    ids=str,
)
def test_rows_alone_equal_rows_in_a_batch(way: dict[str, Any]) -> None:
    model = FakeModel()
    seeds = [11, 12, 13]
    whole = new_tokens(model, ROWS, seed=seeds, **PLAIN, **way)
    assert whole == [new_tokens(model, [row], seed=seed, **PLAIN)[0] for row, seed in zip(ROWS, seeds, strict=True)]
    back = new_tokens(model, ROWS[::-1], seed=seeds[::-1], **PLAIN, **way)
    assert back == whole[::-1]


def test_rows_go_on_alike_when_others_leave() -> None:
    model = FakeModel()
    settings = PLAIN | {"eos_token_id": [0, 1, 2, 3, 4, 5], "pad_token_id": 22, "temperature": [0.7, 1.3, 2.0]}
    settings |= {"top_k": [5, 0, 9], "top_p": [1.0, 0.9, 0.8]}
    output = generate(
        model, **pad_left(ROWS), max_new_tokens=12, seed=[2, 4, 6], return_dict_in_generate=True, **settings
    )
    leaving = generate(model, **pad_left(ROWS), max_new_tokens=12, seed=[2, 4, 6], **settings)
    assert len(set(model.rows_of_passes)) > 1, "choose seeds with which rows end at different steps"
    assert torch.equal(output.sequences, leaving)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", [0.3, 1.0, 2.5]),
        ("top_k", [1, 0, 5]),
        ("top_p", [0.1, 1.0, 0.7]),
        ("seed", [0, 2**63 - 1, 8]),
    ],
)
def test_a_value_a_row_equals_each_row_alone(name: str, values: list[Any]) -> None:
    model = FakeModel()
    settings = PLAIN | {"seed": [7, 8, 9]}
    found = new_tokens(model, ROWS, **settings | {name: values})
    for place, (row, value) in enumerate(zip(ROWS, values, strict=True)):
        alone = PLAIN | {"seed": settings["seed"][place]} | {name: value}
        assert new_tokens(model, [row], **alone) == [found[place]]


def test_all_at_once_a_value_a_row() -> None:
    model = FakeModel()
    lists = {"temperature": [0.5, 1.5, 1.0], "top_k": [3, 0, 12], "top_p": [0.9, 0.6, 1.0], "seed": [1, 2, 3]}
    found = new_tokens(model, ROWS, do_sample=True, num_return_sequences=2, **lists)
    for place, row in enumerate(ROWS):
        alone = {name: values[place] for name, values in lists.items()}
        assert (
            new_tokens(model, [row], do_sample=True, num_return_sequences=2, **alone)
            == found[2 * place : 2 * place + 2]
        )


def test_seeds_decide() -> None:
    model = FakeModel()
    first, again, other = (new_tokens(model, ROWS, seed=seed, **PLAIN) for seed in (1, 1, 2))
    assert first == again
    assert all(mine != theirs for mine, theirs in zip(first, other, strict=True))


@pytest.mark.parametrize(
    "settings", [{}, {"top_k": 4}, {"top_k": 4, "top_p": 0.7, "temperature": 1.5}, {"top_k": [2, 0, 9]}], ids=str
)
def test_what_is_returned_beside_them_changes_no_token(settings: dict[str, Any]) -> None:
    """Whoever asks for scores must not get other tokens: a short cut is the same way."""
    model = FakeModel(60)
    settings = PLAIN | {"seed": [1, 2, 3], "max_new_tokens": 12} | settings
    plain = generate(model, **pad_left(ROWS), **settings)
    for extra in ({"output_scores": True}, {"output_logits": True}, {"logprobs": 2}, {"prompt_logprobs": 0}):
        output = generate(model, **pad_left(ROWS), return_dict_in_generate=True, **settings, **extra)
        assert torch.equal(output.sequences, plain)


def test_unseeded_calls_follow_torch() -> None:
    model = FakeModel()
    torch.manual_seed(3)
    first, second = new_tokens(model, ROWS, **PLAIN), new_tokens(model, ROWS, **PLAIN)
    torch.manual_seed(3)
    assert [first, second] == [new_tokens(model, ROWS, **PLAIN), new_tokens(model, ROWS, **PLAIN)]
    assert first != second


def test_only_unseeded_sampling_draws_from_torch() -> None:
    model = FakeModel()
    before = torch.get_rng_state()
    new_tokens(model, ROWS, seed=4, **PLAIN)
    new_tokens(model, ROWS)
    assert torch.equal(torch.get_rng_state(), before)


def test_no_two_rows_of_a_call_share_a_seed() -> None:
    """The same prompt everywhere, so that two rows of one seed would say the same."""
    model = FakeModel()
    found = new_tokens(model, [[1, 2]] * 5, num_new=12, seed=1, num_return_sequences=5, temperature=2.0, **PLAIN)
    assert len({tuple(tokens) for tokens in found}) == 25
    unseeded = new_tokens(model, [[1, 2]] * 5, num_new=12, num_return_sequences=5, temperature=2.0, **PLAIN)
    assert len({tuple(tokens) for tokens in unseeded}) == 25


def test_several_sequences_of_one_prompt() -> None:
    model = FakeModel()
    found = new_tokens(model, [[1, 2]], seed=5, num_return_sequences=3, **PLAIN)
    assert found == [sample_slowly(model, [1, 2], 8, derive_seed(5, copy)) for copy in range(3)]
    assert found[0] == new_tokens(model, [[1, 2]], seed=5, **PLAIN)[0]


@pytest.mark.parametrize("way", [{}, {"cache_implementation": "static"}, {"prefill_chunk_size": 2}], ids=str)
def test_the_prompt_is_read_once_however_many_sequences(way: dict[str, Any]) -> None:
    model = FakeModel()
    found = generate(model, **pad_left(ROWS), max_new_tokens=4, seed=5, num_return_sequences=3, **PLAIN, **way)
    assert found.shape == (9, 9)
    assert found[:, :5].tolist() == pad_left(ROWS)["input_ids"].repeat_interleave(3, 0).tolist()
    assert model.num_tokens_read == 9 + 3 * 9


# --- the distribution ---------------------------------------------------------------------------------------


def critical(freedom: int) -> float:
    """The chi-square value exceeded once in ten thousand times (Wilson and Hilferty, 1931)."""
    spread = 2 / (9 * freedom)
    return freedom * (1 - spread + 3.719 * math.sqrt(spread)) ** 3


@pytest.mark.parametrize(
    ("settings", "warp"),
    [
        ({}, None),
        ({"temperature": 1.8}, TemperatureLogitsWarper(1.8)),
        ({"temperature": 0.6}, TemperatureLogitsWarper(0.6)),
        ({"top_k": 4}, TopKLogitsWarper(4)),
        ({"top_p": 0.9}, TopPLogitsWarper(0.9)),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",  # an address would be another in every process
)
@pytest.mark.parametrize("seeding", ["copies", "rows"])
def test_frequencies_follow_the_distribution(settings: dict[str, Any], warp: Any, seeding: str) -> None:
    model = FakeModel(11, seed=4)
    model.table /= 3
    model.places /= 6
    num = 6000
    if seeding == "copies":
        found = new_tokens(model, [[1, 2]], num_new=1, seed=99, num_return_sequences=num, **PLAIN | settings)
    else:
        found = new_tokens(model, [[1, 2]] * num, num_new=1, seed=list(range(num)), **PLAIN | settings)
    counts = torch.bincount(torch.tensor(found).flatten(), minlength=11)
    scores = model.score([1, 2])[None]
    expected = torch.softmax(scores if warp is None else warp(torch.tensor([[0]]), scores), -1)[0] * num
    possible = expected > 0
    assert not counts[~possible].any()  # what has no probability never comes
    assert float(expected[possible].min()) > 5, "too rare for the test to hold"
    chi_square = float(((counts - expected)[possible] ** 2 / expected[possible]).sum())
    assert chi_square < critical(int(possible.sum()) - 1)


def test_a_low_temperature_is_greedy() -> None:
    model = FakeModel()
    assert new_tokens(model, ROWS, temperature=1e-4, seed=1, **PLAIN) == new_tokens(model, ROWS)


def test_nothing_left_to_choose_is_told() -> None:
    def forbid(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.full_like(scores, -torch.inf) if input_ids.shape[1] > 4 else scores

    with pytest.raises(NoTokenLeftError, match="row 0, at position 5: forbid"):
        generate(FakeModel(), torch.tensor([[1, 2, 3]]), max_new_tokens=5, logits_processor=[forbid], seed=1, **PLAIN)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("temperature", 0.0, "strictly positive"),
        ("temperature", [0.5, -1.0, 1.0], "strictly positive"),
        ("temperature", float("nan"), "finite"),
        ("top_p", 1.5, "from 0 to 1"),
        ("top_p", -0.1, "from 0 to 1"),
        ("top_k", -1, "at least 0"),
        ("top_k", [1, 2], "2 values for 3 prompts"),
        ("seed", [1], "1 values for 3 prompts"),
        ("seed", -1, "at least 0"),
    ],
)
def test_impossible_values_are_refused_before_the_first_pass(name: str, value: Any, told: str) -> None:
    model = FakeModel()
    with pytest.raises(SettingError, match=told):
        new_tokens(model, ROWS, **PLAIN | {name: value})
    assert model.num_passes == 0

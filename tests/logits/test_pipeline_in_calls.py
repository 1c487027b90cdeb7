"""Processors in whole calls: a row alone is a row in a batch, and draws follow the distribution."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.fakes import FakeModel, pad_left

import unspool
from unspool import GenerationConfig, generate
from unspool.logits.building import Context
from unspool.logits.pipeline import build_processors

VOCAB, EOS = 23, 2
ROWS = [[1, 2, 3], [4, 5, 6, 7, 8], [9]]
SAMPLED = {"do_sample": True, "top_k": 0}
CONTROLS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.5},
    {"repetition_penalty": 1.5, "repetition_penalty_ignores_prompt": True},
    {"encoder_repetition_penalty": 2.0},
    {"presence_penalty": 2.0},
    {"frequency_penalty": 1.0},
    {"no_repeat_ngram_size": 1},
    {"no_repeat_ngram_size": 2},
    {"encoder_no_repeat_ngram_size": 1},
    {"encoder_no_repeat_ngram_size": 2},
    {"dry_multiplier": 2.0, "dry_allowed_length": 1},
    {"sequence_bias": [[[4], 3.0], [[4, 5], 9.0]], "bad_words_ids": [[4, 4]]},
    {"logit_bias": {3: 5.0}},
    {"min_new_tokens": 6},
    {"suppress_tokens": [1, 2, 3]},
    {"exponential_decay_length_penalty": (2, 1.5)},
    {"temperature": 1.5, "top_k": 7, "top_p": 0.9, "min_p": 0.05, **SAMPLED, "seed": 3},
    {"xtc_probability": 0.5, "xtc_threshold": 0.05, **SAMPLED, "seed": 3},
    {"mirostat_tau": 1.0, "mirostat_eta": 0.4, **SAMPLED, "seed": 3},
    {"dynatemp_range": 0.5, "top_n_sigma": 2.0, **SAMPLED, "seed": 3},
    {"typical_p": 0.8, "top_a": 0.1, **SAMPLED, "seed": 3},
]


@pytest.mark.parametrize("settings", CONTROLS, ids=str)
def test_rows_alone_are_rows_in_a_batch_whatever_their_lengths(settings: dict[str, Any]) -> None:
    """Padding that unspool makes is told to the processors, so that no row depends on the others' lengths."""
    from unspool.api.starting import start

    def run(rows: list[list[int]], **more: Any) -> list[list[int]]:
        width = max(map(len, rows))
        padded = pad_left(rows, pad=0)
        call = start(
            FakeModel(VOCAB, seed=5), **padded, hides_padding=True, max_new_tokens=10, eos_token_id=EOS, **more
        )
        for _ in call:
            pass
        assert call.parts.prompt_ids.shape[1] == width
        return call.emitted

    seeds = {"seed": [3, 4, 5]} if "seed" in settings else {}
    whole = run(ROWS, **settings | seeds)
    for row, prompt in enumerate(ROWS):
        own = {"seed": seeds["seed"][row]} if seeds else {}
        assert run([prompt], **settings | own) == [whole[row]]


def test_one_value_a_row_is_each_row_with_its_own() -> None:
    model = FakeModel(VOCAB, seed=3)
    per_row: dict[str, list[Any]] = {
        "temperature": [0.3, 1.0, 2.0],
        "top_p": [0.9, 1.0, 0.7],
        "top_k": [3, 0, 10],
        "min_p": [0.0, 0.2, 0.01],
        "repetition_penalty": [1.0, 1.5, 0.8],
        "presence_penalty": [0.0, 0.5, -0.5],
        "min_new_tokens": [0, 4, 8],
        "seed": [1, 2, 3],
    }
    prompts = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    common = {"max_new_tokens": 8, "do_sample": True, "eos_token_id": [EOS, 5, 9], "pad_token_id": 0}
    whole = generate(model, prompts, **common, **per_row)
    for row, prompt in enumerate(prompts):
        alone = generate(model, [prompt], **common, **{name: values[row] for name, values in per_row.items()})
        assert whole[row, : alone.shape[1]].tolist() == alone[0].tolist()
        assert set(whole[row, alone.shape[1] :].tolist()) <= {0}


@pytest.mark.parametrize(
    "settings", [{"top_k": 5}, {"top_k": 9, "top_p": 0.8, "temperature": 1.4, "min_p": 0.02}], ids=str
)
def test_asking_for_scores_changes_no_token(settings: dict[str, Any]) -> None:
    """With them the plain chain runs, without them the fused one."""
    model = FakeModel(VOCAB)
    common = {
        **pad_left(ROWS),
        "max_new_tokens": 12,
        "do_sample": True,
        "seed": 8,
        "repetition_penalty": 1.2,
        **settings,
    }
    plain = generate(model, return_dict_in_generate=True, output_scores=True, **common)
    assert plain.scores[0].shape == (3, VOCAB)
    assert torch.equal(plain.sequences, generate(model, **common))


def test_prefix_function_sees_the_rows_that_are_left_by_their_number() -> None:
    seen: set[int] = set()

    def allow(row: int, ids: torch.Tensor) -> list[int]:
        seen.add(row)
        return [10 + row] if len(ids) < 5 + 2 * row else [EOS]

    found = generate(
        FakeModel(VOCAB),
        [[1, 2, 3]] * 3,
        max_new_tokens=9,
        eos_token_id=EOS,
        pad_token_id=0,
        prefix_allowed_tokens_fn=allow,
    )
    assert seen == {0, 1, 2}
    assert found[:, 3:].tolist() == [
        [10, 10, EOS, 0, 0, 0, 0],
        [11, 11, 11, 11, EOS, 0, 0],
        [12, 12, 12, 12, 12, 12, EOS],
    ]


def test_penalties_count_new_tokens_where_they_say_so() -> None:
    """A bias so large that one token is written for ever, were it not for the penalties."""
    model = FakeModel(VOCAB)
    common = {"max_new_tokens": 3, "logit_bias": {7: 1000.0, 8: 950.0}}
    assert generate(model, [[7, 7]], presence_penalty=100.0, **common)[0, 2:].tolist() == [7, 8, 7]
    assert generate(model, [[7, 7]], frequency_penalty=30.0, **common)[0, 2:].tolist() == [7, 7, 8]
    strong = {"repetition_penalty": 2.0, **common}
    assert generate(model, [[7, 7]], **strong)[0, 2].item() == 8
    assert generate(model, [[7, 7]], repetition_penalty_ignores_prompt=True, **strong)[0, 2].item() == 7


def critical(freedom: int) -> float:
    """The chi-square value exceeded once in ten thousand times (Wilson and Hilferty, 1931)."""
    spread = 2 / (9 * freedom)
    return freedom * (1 - spread + 3.719 * math.sqrt(spread)) ** 3


@pytest.mark.parametrize(
    ("settings", "warp"),
    [
        ({"min_p": 0.2}, unspool.MinPLogitsWarper(0.2)),
        ({"typical_p": 0.8}, unspool.TypicalLogitsWarper(0.8)),
        ({"epsilon_cutoff": 0.05}, unspool.EpsilonLogitsWarper(0.05)),
        ({"eta_cutoff": 0.2}, unspool.EtaLogitsWarper(0.2)),
        ({"top_h": 0.7}, unspool.TopHLogitsWarper(0.7)),
        ({"top_a": 1.0}, unspool.TopALogitsWarper(1.0)),
        ({"top_n_sigma": 1.0}, unspool.TopNSigmaLogitsWarper(1.0)),
        ({"mirostat_tau": 1.7}, unspool.MirostatLogitsWarper(1.7)),
        ({"dynatemp_range": 0.9, "temperature": 1.2}, unspool.DynamicTemperatureLogitsWarper(1.2, 0.9)),
        ({"temperature": 1.3, "top_k": 6, "top_p": 0.95, "min_p": 0.05}, None),
        ({"xtc_probability": 0.4, "xtc_threshold": 0.1}, None),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",  # an address would be another in every process
)
def test_frequencies_follow_the_distribution(settings: dict[str, Any], warp: Any) -> None:
    model = FakeModel(11, seed=4)
    model.table /= 4
    model.places /= 6
    num, ids = 6000, torch.tensor([[1, 2]])
    found = generate(model, ids, max_new_tokens=1, seed=99, num_return_sequences=num, **SAMPLED | settings)
    scores = model.score([1, 2])[None]
    if "xtc_probability" in settings:
        cut = unspool.XTCLogitsWarper(1.0, 0.1)(ids, scores, uniforms=torch.zeros(1)).softmax(-1)
        expected = 0.4 * cut + 0.6 * scores.softmax(-1)
    elif warp is None:
        config = GenerationConfig(do_sample=True, **settings)
        expected = build_processors(config, Context(1, 11, 2, 3))(ids, scores).softmax(-1)
    else:
        expected = warp(ids, scores).softmax(-1)
        assert not torch.allclose(expected, scores.softmax(-1))  # it does something here
    expected = expected[0] * num
    counts = torch.bincount(found[:, 2], minlength=11)
    possible = expected > 0
    assert not counts[~possible].any()
    assert float(expected[possible].min()) > 5, "too rare for the test to hold"
    chi_square = float(((counts - expected)[possible] ** 2 / expected[possible]).sum())
    assert chi_square < critical(int(possible.sum()) - 1)


def test_fewest_new_tokens_override_the_shortest_length() -> None:
    asked = {"max_new_tokens": 4, "eos_token_id": EOS, "pad_token_id": 0}
    output = generate(
        FakeModel(VOCAB),
        [[1, 2, 3]],
        **asked,
        min_length=40,
        min_new_tokens=2,
        return_dict_in_generate=True,
        output_scores=True,
    )
    forbidden = [bool(scores[0, EOS].isneginf()) for scores in output.scores]
    assert forbidden == [step < 2 for step in range(len(forbidden))]

"""Tokens that captured passes choose at their end: those of steps one by one, whose choice the host launches.

The kernels run on a GPU, or slowly in Triton's interpreter, with `TRITON_INTERPRET=1`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.gpu.kernel_checks import DEVICE, needs_gpu, pytestmark
from tests.gpu.models import make_model
from tests.gpu.test_captured_pairs import draw_sources, load

import unspool
from unspool.decoding.randomness import draw_uniform
from unspool.decoding.strategies import ahead
from unspool.decoding.strategies.sample import Sample
from unspool.errors import NoTokenLeftError

__all__ = ["pytestmark"]


@pytest.mark.parametrize("rows", [1, 2, 5, 200])
def test_uniforms_are_those_of_the_host(rows: int) -> None:
    from unspool.kernels.gpu.sampling.captured_choice import draw_uniforms

    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), dtype=torch.int64)
    lengths = torch.randint(-1, 2**31 - 2, (rows,), dtype=torch.int32)
    out = torch.full((rows,), torch.nan, dtype=torch.float64, device=DEVICE)
    draw_uniforms(seeds.to(DEVICE), lengths.to(DEVICE), out)
    assert out.tolist() == draw_uniform(seeds, lengths.long() + 1).tolist()


@pytest.mark.parametrize("rows", [1, 3, 200])
def test_tokens_are_entered(rows: int) -> None:
    from unspool.kernels.gpu.sampling.captured_choice import enter_tokens

    chosen = torch.randint(-1, 50_000, (rows,), device=DEVICE)
    lengths = torch.randint(-1, 40, (rows,), dtype=torch.int32, device=DEVICE)
    before, tokens, log = lengths.clone(), torch.zeros_like(chosen), torch.full((16, rows), -7, device=DEVICE)
    enter_tokens(chosen, tokens, lengths, log)
    assert tokens.tolist() == chosen.tolist()
    assert lengths.tolist() == [n + 1 if n >= 0 else n for n in before.tolist()]
    for row, length in enumerate(before.tolist()):
        expected = [-7] * 16
        expected[max(length, 0) % 16] = int(chosen[row])
        assert log[:, row].tolist() == expected


CHOICES: list[dict[str, Any]] = [
    {},
    {"top_k": 0},
    {"top_k": 0, "temperature": 1.3},
    {"temperature": 1.5, "top_p": 0.8, "min_p": 0.02},
    {"top_k": 300, "temperature": 0.8},  # more than are ranked
    {"top_k": 0, "top_p": 0.9, "temperature": 1.2, "epsilon_cutoff": 0.001},
    {"top_k": 0, "typical_p": 0.8},
    {"top_k": 20, "typical_p": 0.9, "eta_cutoff": 0.002},
    {"suppress_tokens": list(range(10, 60))},
    {"suppress_tokens": [4, 5, 6], "do_sample": False},
    {"bad_words_ids": [[7], [8]], "min_new_tokens": 9, "do_sample": False},
    {"min_new_tokens": 9, "temperature": 2.0},
]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Steps are launched together from now on, whatever they take; how many were."""
    counts: list[int] = []
    launch = Sample.launch

    def note(self: Sample, rows: Any, num_steps: int) -> Any:
        found = launch(self, rows, num_steps)
        counts.append(0 if found is None else len(found))
        return found

    monkeypatch.setattr(Sample, "launch", note)
    monkeypatch.setattr(ahead, "SECONDS_AT_ONCE", 1e3)
    return counts


def check(model: Any, given: dict[str, Any], settings: dict[str, Any], request: Any) -> None:
    asked = {"do_sample": True, "seed": 11, "max_new_tokens": 40, "pad_token_id": 1, "eos_token_id": None}
    asked = {**asked, **settings}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sample, "launch", lambda *_: None)
        alone = unspool.generate(model, **given, **asked).tolist()
    launched = request.getfixturevalue("launched")
    assert unspool.generate(model, **given, **asked).tolist() == alone
    assert max(launched) == ahead.MOST_STEPS
    ends = {**asked, "eos_token_id": [3, alone[0][-9], alone[-1][-5]]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sample, "launch", lambda *_: None)
        short = unspool.generate(model, **given, **ends).tolist()
    assert unspool.generate(model, **given, **ends).tolist() == short


@needs_gpu
@pytest.mark.parametrize("settings", CHOICES, ids=str)
@pytest.mark.parametrize("rows", [1, 3])
def test_a_decoder_chooses_the_same(settings: dict[str, Any], rows: int, request: Any) -> None:
    ids = torch.randint(3, 90, (rows, 7), generator=torch.Generator().manual_seed(rows))
    mask = torch.ones_like(ids)
    if rows > 1:
        mask[1, :4] = 0  # rows of different lengths
    check(make_model(None, torch.float32), {"inputs": ids.cuda(), "attention_mask": mask.cuda()}, settings, request)


@needs_gpu
@pytest.mark.parametrize("settings", CHOICES[:5] + CHOICES[8:], ids=str)
@pytest.mark.parametrize("name", ["bart", "whisper", "t5-gated-wide"])
def test_an_encoder_decoder_chooses_the_same(settings: dict[str, Any], name: str, request: Any) -> None:
    source = {key: value.cuda() for key, value in draw_sources(name, 2, 9).items()}
    check(load(name, "cuda"), source, settings, request)


@needs_gpu
def test_rows_have_their_own_settings(request: Any) -> None:
    ids = torch.randint(3, 90, (3, 7), generator=torch.Generator().manual_seed(5)).cuda()
    settings = {"temperature": [0.5, 1.0, 3.0], "top_k": [3, 40, 90], "top_p": [0.7, 1.0, 0.9]}
    check(make_model(None, torch.float32), {"inputs": ids}, settings, request)


@needs_gpu
def test_steps_with_other_settings_share_a_graph(launched: list[int]) -> None:
    """What a graph reads follows the call: settings, seeds and masks are inputs."""
    model = make_model(None, torch.float32)
    ids = torch.randint(3, 90, (2, 7), generator=torch.Generator().manual_seed(6)).cuda()

    def run(**settings: Any) -> list[list[int]]:
        asked = {"do_sample": True, "max_new_tokens": 20, "eos_token_id": None, "top_k": 12, **settings}
        tokens: list[list[int]] = unspool.generate(model, ids, **asked).tolist()
        return tokens

    calls = [{"seed": seed, "temperature": heat} for seed in (1, 2) for heat in (0.7, 2.5)]
    first = [run(**call) for call in calls]
    assert [run(**call) for call in calls[::-1]][::-1] == first and max(launched) > 1
    assert len({str(tokens) for tokens in first}) == len(calls)
    masked = [run(seed=1, suppress_tokens=list(range(low, low + 40))) for low in (3, 43)]
    for low, rows in zip((3, 43), masked, strict=True):
        assert not any(low <= token < low + 40 for row in rows for token in row[7:])


@needs_gpu
@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("num_good", [0, 6])
def test_no_token_left_is_explained_at_its_own_step(do_sample: bool, num_good: int, request: Any) -> None:
    """At once, or after a token whose embedding is no number."""
    model = make_model(None, torch.float32)
    ids = torch.randint(3, 90, (1, 7), generator=torch.Generator().manual_seed(6)).cuda()
    asked: dict[str, Any] = {"max_new_tokens": 20, "eos_token_id": None, "do_sample": do_sample, "seed": 3}
    asked["suppress_tokens"] = [4, 5] if num_good else list(range(96))
    if num_good:
        tokens = unspool.generate(model, ids, **asked)[0, 7:].tolist()
        model.weights.embedding.weight[tokens[num_good - 1]] = torch.nan
        place = 7 + tokens.index(tokens[num_good - 1]) + 1
    else:
        place = 7
    launched = request.getfixturevalue("launched")
    with pytest.raises(NoTokenLeftError, match=rf"row 0, at position {place}\b"):
        unspool.generate(model, ids, **asked)
    assert max(launched) > 1 or not num_good


@needs_gpu
@pytest.mark.parametrize("rows", [2, 5])
def test_greedy_rows_of_different_lengths_are_launched_together(rows: int, launched: list[int]) -> None:
    model = make_model(None, torch.float32)
    ids = torch.randint(3, 90, (rows, 30), generator=torch.Generator().manual_seed(rows)).cuda()
    mask = torch.ones_like(ids)
    for row in range(rows):
        mask[row, : 5 * row] = 0
    found = unspool.generate(model, ids, attention_mask=mask, max_new_tokens=40, eos_token_id=None)
    assert max(launched) == ahead.MOST_STEPS
    for row in range(rows):
        alone = unspool.generate(model, ids[row : row + 1, 5 * row :], max_new_tokens=40, eos_token_id=None)
        assert alone[0, -40:].tolist() == found[row, -40:].tolist()

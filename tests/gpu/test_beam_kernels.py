"""The kernels of a beam search's step beside the same operator by operator.

They run on a GPU, or slowly in Triton's interpreter: `TRITON_INTERPRET=1 pytest tests/gpu/test_beam_kernels.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.gpu.kernel_checks import DEVICE, pytestmark

from unspool.decoding.beams.selection import (
    Drawing,
    Selection,
    read_candidates,
    select_by_operators,
    select_groups_on_host,
)
from unspool.decoding.beams.settings import NEVER, BeamSettings

__all__ = ["pytestmark"]

INF = float("inf")


def make_settings(num_beams: int, num_ends: int) -> BeamSettings:
    ends = tuple(range(3, 3 + num_ends))
    return BeamSettings(num_beams, 1, 1.0, False, False, eos_token_ids=ends, max_new_tokens=9)


def choose(logits: torch.Tensor, running: torch.Tensor, settings: BeamSettings, **more: Any) -> Selection:
    from unspool.kernels.gpu.sampling.beams import choose_beams

    ends = torch.tensor(settings.eos_token_ids, dtype=torch.int64, device=DEVICE)
    counts = {"num_beams": settings.num_beams, "num_candidates": settings.num_candidates, "never": NEVER}
    report = {"is_normalised": False, **counts, **more}
    found = choose_beams(logits.to(DEVICE), running.to(DEVICE), ends, **report)
    return Selection(*(one.cpu() for one in found))


@pytest.mark.parametrize("num_beams,num_ends,vocab", [(2, 1, 9_000), (4, 0, 60), (3, 2, 5_000)])
def test_drawn_candidates(num_beams: int, num_ends: int, vocab: int) -> None:
    settings = make_settings(num_beams, num_ends)
    generator = torch.Generator().manual_seed(vocab)
    for prompts in (1, 3):
        rows = prompts * num_beams
        logprobs = (torch.randn(rows, vocab, generator=generator) * 2).log_softmax(-1)
        running = -torch.rand(rows, generator=generator) * 3
        seeds = torch.randint(0, 2**62, (rows,), generator=generator)[::num_beams]
        positions = torch.randint(0, 5_000, (prompts,), generator=generator)
        ends = torch.tensor(settings.eos_token_ids, dtype=torch.int64)
        expected = select_by_operators(logprobs, running, ends, settings, Drawing(seeds, positions))
        drawing = (seeds.to(DEVICE), positions.to(DEVICE))
        check(choose(logprobs, running, settings, is_normalised=True, drawing=drawing), expected)


def check(found: Selection, expected: Selection) -> None:
    own, theirs = read_candidates(found.packed), read_candidates(expected.packed)
    assert own[:2] == theirs[:2]
    torch.testing.assert_close(torch.tensor(own[2]), torch.tensor(theirs[2]), rtol=1e-6, atol=2e-6)
    assert found.parents.tolist() == expected.parents.tolist()
    assert found.tokens.tolist() == expected.tokens.tolist()
    torch.testing.assert_close(found.running, expected.running, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("num_beams,num_ends", [(2, 0), (4, 1), (3, 4), (10, 2)])
@pytest.mark.parametrize("vocab", [9_000, 60])
@pytest.mark.parametrize("is_normalised", [False, True])
def test_candidates_and_beams(num_beams: int, num_ends: int, vocab: int, is_normalised: bool) -> None:
    settings = make_settings(num_beams, num_ends)
    generator = torch.Generator().manual_seed(num_beams)
    for prompts in (1, 3):
        logits = torch.randn(prompts * num_beams, vocab, generator=generator) * 3
        logits[:, 3 : 3 + num_ends] += 9.0  # ends are among the candidates
        running = -torch.rand(prompts * num_beams, generator=generator) * 3
        logprobs = logits.log_softmax(-1)
        ends = torch.tensor(settings.eos_token_ids, dtype=torch.int64)
        found = choose(logprobs if is_normalised else logits, running, settings, is_normalised=is_normalised)
        check(found, select_by_operators(logprobs, running, ends, settings))


@pytest.mark.parametrize("num_beams,num_ends,vocab", [(2, 1, 9_000), (4, 0, 60), (3, 2, 5_000)])
def test_a_choice_that_a_pass_goes_on_from(num_beams: int, num_ends: int, vocab: int) -> None:
    """Where the beams' log-probabilities were their next ones stand, tokens are where a pass reads them, and rows are
    longer by one but for absent ones, which belong to no prompt. A mask is added once scores are normalised."""
    from unspool.kernels.gpu.sampling.beams import Chosen

    settings = make_settings(num_beams, num_ends)
    generator = torch.Generator().manual_seed(vocab)
    rows = 2 * num_beams
    logits = torch.randn(rows + 1, vocab, generator=generator) * 3
    logits[0, 9:20] = -INF
    running = -torch.rand(rows + 1, generator=generator) * 3
    mask = torch.zeros(vocab)
    mask[logits[:rows].argmax(dim=1)] = -INF
    mask[30 : vocab - 20] = -INF  # whole tiles are forbidden
    ends = torch.tensor(settings.eos_token_ids, dtype=torch.int64)
    expected = select_by_operators(logits[:rows].log_softmax(-1) + mask, running[:rows], ends, settings)
    held = running.to(DEVICE)
    parents, tokens, read = torch.full((3, rows + 1), -7, dtype=torch.int64, device=DEVICE).unbind()
    packed = torch.empty(2, 3, settings.num_candidates, dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor([5] * rows + [-1], dtype=torch.int32, device=DEVICE)
    into = Chosen(packed, parents, tokens, held)
    choose(logits, held, settings, chosen=into, next_pass=(read, lengths), mask=mask.to(DEVICE))
    assert lengths.tolist() == [6] * rows + [-1]
    assert read.tolist() == tokens.tolist() == [*expected.tokens.tolist(), -7]
    check(Selection(packed.cpu(), *(one[:rows].cpu() for one in into[1:])), expected)


@pytest.mark.parametrize("vocab,count", [(9_000, 2), (60, 20), (4_096, 1)])
def test_reported_logprobs(vocab: int, count: int) -> None:
    from unspool.kernels.gpu.sampling.beams import report_logprobs

    generator = torch.Generator().manual_seed(count)
    logits = torch.randn(5, vocab, generator=generator) * 4
    logits[2, 7:] = -INF
    asked = torch.tensor([5, vocab - 1, 3, -1, 6])
    report = report_logprobs(logits.to(DEVICE)[:, :vocab], asked.to(DEVICE), count).cpu()
    logprobs = logits.log_softmax(-1)
    tokens, own, found, values = report.split([1, 1, count, count], dim=1)
    assert tokens.flatten().tolist() == [5, vocab - 1, 3, 0, 6]
    torch.testing.assert_close(own.float(), logprobs.gather(1, tokens.long()), rtol=1e-6, atol=2e-6)
    expected = logprobs.topk(count)
    torch.testing.assert_close(values.float(), expected.values, rtol=1e-6, atol=2e-6)
    finite = expected.values > -INF
    assert found[finite].tolist() == expected.indices[finite].tolist()


@pytest.mark.parametrize("num_beams,num_groups,num_ends", [(4, 2, 0), (4, 4, 1), (6, 2, 2), (6, 3, 1)])
@pytest.mark.parametrize("vocab", [9_000, 30, 5])
@pytest.mark.parametrize("is_normalised", [False, True])
def test_groups_avoid_what_earlier_ones_chose(
    num_beams: int, num_groups: int, num_ends: int, vocab: int, is_normalised: bool
) -> None:
    from unspool.kernels.gpu.sampling.beams import choose_in_groups

    settings = replace(make_settings(num_beams, num_ends), num_groups=num_groups)
    generator = torch.Generator().manual_seed(vocab + num_beams)
    ends = torch.tensor(settings.eos_token_ids, dtype=torch.int64)
    size = num_beams // num_groups
    num_candidates = min(settings.count_candidates(size), size * vocab)
    few = min(num_candidates + num_beams - size, vocab)
    for prompts in (1, 3):
        logits = torch.randn(prompts * num_beams, vocab, generator=generator) * 2
        logits[:, 1] += 4.0  # most groups would choose it
        running = -torch.rand(prompts * num_beams, generator=generator)
        logprobs = logits.log_softmax(-1)
        found = choose_in_groups(
            (logprobs if is_normalised else logits).to(DEVICE),
            running.to(DEVICE),
            ends.to(DEVICE),
            num_beams=num_beams,
            num_groups=num_groups,
            num_candidates=num_candidates,
            num_ranked=few,
            penalty=0.7,
            never=NEVER,
            is_normalised=is_normalised,
        )
        expected = select_groups_on_host(
            logprobs, running, ends, settings, 0.7, (num_candidates, few), is_normalised=True
        )
        own = Selection(*(one.cpu() for one in found))
        for group in range(num_groups):
            check(replace(own, packed=own.packed[:, group]), replace(expected, packed=expected.packed[:, group]))


def test_the_first_step_has_one_beam_a_prompt() -> None:
    settings = make_settings(4, 1)
    logits = (torch.randn(2, 500, generator=torch.Generator().manual_seed(1)) * 3).repeat_interleave(4, 0)
    logits[:4, 3] += 20.0  # an end comes first: all others that go on are this beam's too
    running = torch.tensor([0.0, NEVER, NEVER, NEVER]).repeat(2)
    found = choose(logits, running, settings)
    check(found, select_by_operators(logits.log_softmax(-1), running, torch.tensor([3]), settings))
    assert found.parents.tolist() == [0] * 4 + [4] * 4


def test_forbidden_tokens_come_last() -> None:
    settings = make_settings(2, 1)
    logits = torch.full((4, 5_000), -INF)
    logits[0, 3], logits[1, 4_999] = 1.0, 2.0
    logits[2:, 10:20] = torch.arange(20.0).view(2, 10)
    found = choose(logits, torch.tensor([-1.0, -2.0, -0.5, 0.0]), settings)
    tokens, beams, best = read_candidates(found.packed)
    assert tokens[0][:2] == [3, 4_999] and beams[0][:2] == [0, 1] and best[0][:2] == [-1.0, -2.0]
    assert best[0][2:] == [-INF, -INF] and all(0 <= token < 5_000 for token in tokens[0])
    # The one that does not end goes on, then the one that does, crossed out, before what is impossible.
    assert found.tokens[:2].tolist() == [4_999, 3] and found.parents[:2].tolist() == [1, 0]
    assert found.running[:2].tolist() == [-2.0, torch.tensor(-1.0 + NEVER, dtype=torch.float32).item()]
    assert tokens[1] == [19, 19, 18, 18] and beams[1] == [1, 0, 1, 0]


@pytest.mark.parametrize("num_beams,num_ends,num_open", [(2, 1, 40), (3, 2, 2), (2, 0, 1)])
def test_by_order_the_first_that_do_not_end_go_on(num_beams: int, num_ends: int, num_open: int) -> None:
    settings = make_settings(num_beams, num_ends)
    generator = torch.Generator().manual_seed(num_open)
    logprobs = torch.full((2 * num_beams, 5_000), -INF)
    logprobs[:, 10 : 10 + num_open] = -torch.rand(2 * num_beams, num_open, generator=generator)
    logprobs[:, 3 : 3 + num_ends] = -0.1
    running = -torch.rand(2 * num_beams, generator=generator)
    found = choose(logprobs, running, settings, is_normalised=True, by_order=True)
    tokens, beams, _ = read_candidates(found.packed)
    own = [list(zip(*each, strict=True)) for each in zip(tokens, beams, strict=True)]
    kept = [[one for one in each if one[0] not in settings.eos_token_ids][:num_beams] for each in own]
    assert found.tokens.view(2, -1).tolist() == [[token for token, _ in each] for each in kept]
    assert (found.parents.view(2, -1) % num_beams).tolist() == [[beam for _, beam in each] for each in kept]


@pytest.mark.parametrize("vocab", [4_100, 7])
@pytest.mark.parametrize("is_drawn", [False, True])
def test_no_candidate_is_named_twice(vocab: int, is_drawn: bool) -> None:
    settings = make_settings(2, 1)
    logprobs = torch.full((4, vocab), -INF)
    logprobs[:, 3] = 0.0  # an end is forced
    drawing = (torch.tensor([5, 6], device=DEVICE), torch.tensor([9, 9], device=DEVICE)) if is_drawn else None
    found = choose(logprobs, torch.zeros(4), settings, is_normalised=True, drawing=drawing)
    tokens, beams, best = read_candidates(found.packed)
    for prompt in range(2):
        assert len(set(zip(tokens[prompt], beams[prompt], strict=True))) == settings.num_candidates
        assert all(0 <= token < vocab for token in tokens[prompt])
        assert tokens[prompt][:2] == [3, 3] and best[prompt] == [0.0, 0.0, -INF, -INF]
        assert 3 not in tokens[prompt][2:]


@pytest.mark.parametrize("is_normalised", [False, True])
def test_what_is_no_number_is_found_first(is_normalised: bool) -> None:
    settings = make_settings(2, 1)
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(1))
    logits[1, 7] = float("nan")
    scores = logits.log_softmax(-1) if is_normalised else logits
    found = choose(scores, torch.zeros(4), settings, is_normalised=is_normalised)
    _, beams, best = read_candidates(found.packed)
    assert beams[0] == [1] * 4 and all(one != one for one in best[0])
    assert not any(one != one for one in best[1])


def test_infinite_scores_are_numbers() -> None:
    settings = make_settings(2, 1)
    scores = torch.randn(2, 300, generator=torch.Generator().manual_seed(1))
    scores[1, 7] = INF  # as a bias makes them
    found = choose(scores, torch.zeros(2), settings, is_normalised=True)
    check(found, select_by_operators(scores, torch.zeros(2), torch.tensor([3]), settings))
    assert read_candidates(found.packed)[2][0][0] == INF

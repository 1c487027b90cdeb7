"""The sampling tail's kernels beside the plain chain of processors and the draw.

They run on a GPU, or slowly in Triton's interpreter: `TRITON_INTERPRET=1 pytest tests/gpu/test_sampling_tail.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.gpu.kernel_checks import DEVICE, HAS_GPU, needs_gpu, pytestmark

from unspool import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopALogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)
from unspool.decoding.randomness import draw_uniform
from unspool.decoding.select import NO_TOKEN, draw, draw_plainly
from unspool.decoding.tails import JoinedTails, draw_by_kernels, draw_by_operators, draw_from_tail
from unspool.logits.fused import FusedTail, split_tail

__all__ = ["pytestmark"]

INF = float("inf")
NAN = float("nan")
# temperature, top_k, top_p, min_p
CHAINS: dict[str, tuple[Any, ...]] = {
    "usual": (0.8, 50, 0.9, None),
    "top-k alone": (None, 7, None, None),
    "one token": (None, 1, 0.45, None),  # two that tie have a half each: no number on that edge
    "top-p of nothing": (0.7, 20, 0.0, None),
    "min-p": (1.7, 40, None, 0.1),
    "all of them": (0.5, 90, 0.6, 0.02),
    "many candidates": (1.3, 300, 0.95, None),
}
SCORES = ("spread", "peaked", "coarse", "side by side")


def make_tail(temperature: Any, top_k: Any, top_p: Any = None, min_p: Any = None, fewest: int = 1) -> FusedTail:
    parts: list[Any] = [] if temperature is None else [TemperatureLogitsWarper(temperature)]
    parts.append(TopKLogitsWarper(top_k))
    parts += [] if top_p is None else [TopPLogitsWarper(top_p, min_tokens_to_keep=fewest)]
    parts += [] if min_p is None else [MinPLogitsWarper(min_p)]
    _, tail = split_tail(LogitsProcessorList(parts))
    assert tail is not None
    return tail


def make_scores(kind: str, rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(rows, vocab, generator=generator) * 2
    if kind == "peaked":
        scores[:, vocab // 3] += 12.0
    elif kind == "coarse":  # as bfloat16 leaves them: some tie
        scores = scores.bfloat16().float()
    elif kind == "side by side":  # the highest are neighbours
        scores[:, : min(vocab, 400)] += 20.0
    return scores


def make_uniforms(rows: int, seed: int = 0) -> torch.Tensor:
    return draw_uniform(torch.arange(rows), torch.full((rows,), seed))


def draw_here(tail: FusedTail, scores: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    return draw_by_kernels(tail, scores.to(DEVICE), uniforms.to(DEVICE)).cpu()


def run_chain(tail: FusedTail, scores: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    return draw_plainly(tail.run_plainly(scores), uniforms)


def check(found: torch.Tensor, settings: tuple[Any, ...], scores: torch.Tensor, uniforms: torch.Tensor) -> None:
    """The plain chain's tokens; where rounding may decide, those of a top-p or a number a hair away."""
    temperature, top_k, top_p, min_p = settings
    exact = run_chain(make_tail(temperature, top_k, top_p, min_p), scores, uniforms)
    is_right = found == exact
    if not bool(is_right.all()):
        for hair in (-1e-6, 1e-6):
            near = top_p if top_p in (None, 0.0) else top_p * (1 + hair)
            for moved in (uniforms, uniforms * (1 + 1e-9), uniforms * (1 - 1e-9)):
                is_right |= found == run_chain(make_tail(temperature, top_k, near, min_p), scores, moved)
    assert bool(is_right.all()), (found.tolist(), exact.tolist())
    assert int((found != exact).sum()) <= max(1, len(found) // 50)


@pytest.mark.parametrize("vocab", [40, 1_500, 20_003])
@pytest.mark.parametrize("kind", SCORES)
@pytest.mark.parametrize("name", CHAINS)
def test_tokens_are_the_plain_chains(name: str, kind: str, vocab: int) -> None:
    rows = 64 if HAS_GPU else 2
    for seed in range(8 if HAS_GPU else 1):
        scores, uniforms = make_scores(kind, rows, vocab, seed), make_uniforms(rows, seed)
        check(draw_here(make_tail(*CHAINS[name]), scores, uniforms), CHAINS[name], scores, uniforms)


@pytest.mark.parametrize("kind", SCORES)
def test_tails_drawn_together(kind: str) -> None:
    names = ["usual", "top-k alone", "top-p of nothing", "min-p", "all of them"]
    tails, rows = [make_tail(*CHAINS[name]) for name in names], 16 if HAS_GPU else 2
    scores, uniforms = make_scores(kind, rows * len(tails), 3_000), make_uniforms(rows * len(tails))
    joined = JoinedTails([(tail, rows) for tail in tails])
    found = joined.draw(scores.to(DEVICE), uniforms.to(DEVICE)).cpu().split(rows)
    for tail, own, part, numbers in zip(tails, found, scores.split(rows), uniforms.split(rows), strict=True):
        assert own.tolist() == draw_here(tail, part, numbers).tolist()


def test_what_is_drawn_beside_others() -> None:
    assert JoinedTails.fits(make_tail(*CHAINS["all of them"]), DEVICE) == HAS_GPU
    assert not JoinedTails.fits(None, DEVICE)
    assert not JoinedTails.fits(make_tail(*CHAINS["many candidates"]), DEVICE)  # they are not ranked by the kernels
    assert not JoinedTails.fits(make_tail(0.7, 20, 0.5, fewest=2), DEVICE)


# top_a, typical, epsilon, eta
AFTER: dict[str, tuple[float | None, ...]] = {
    "typical": (None, 0.7, None, None),
    "top-a": (0.2, None, None, None),
    "epsilon": (None, None, 0.02, None),
    "eta": (None, None, None, 0.05),
    "all of them": (0.05, 0.8, 0.01, 0.02),
}


def add_cuts(tail: FusedTail, name: str, hair: float = 0.0) -> FusedTail:
    """A tail that cuts more, at places a hair away."""
    kinds = {"top_a": TopALogitsWarper, "typical": TypicalLogitsWarper}
    kinds |= {"epsilon": EpsilonLogitsWarper, "eta": EtaLogitsWarper}
    values = zip(kinds.items(), AFTER[name], strict=True)
    return replace(tail, **{part: kind(value * (1 + hair)) for (part, kind), value in values if value is not None})


@pytest.mark.parametrize("kind", [*SCORES, "whole numbers"])  # the last: more tie than there is room for
@pytest.mark.parametrize("name", AFTER)
@pytest.mark.parametrize("top_p", [None, 0.9])
def test_cuts_after_min_p(name: str, kind: str, top_p: float | None) -> None:
    rows, vocab = (16, 20_003) if HAS_GPU else (2, 1_801)
    plain = make_tail(0.8, 60, top_p, 0.003)
    for seed in range(3 if HAS_GPU else 1):
        scores, uniforms = make_scores(kind, rows, vocab, seed), make_uniforms(rows, seed)
        scores = scores.round() if kind == "whole numbers" else scores
        found = draw_here(add_cuts(plain, name), scores, uniforms)
        exact = run_chain(add_cuts(plain, name), scores, uniforms)
        is_right = found == exact
        for hair in (-1e-5, 1e-5):
            is_right |= found == run_chain(add_cuts(plain, name, hair), scores, uniforms)
        assert bool(is_right.all()), (found.tolist(), exact.tolist())
        assert int((found != exact).sum()) <= max(1, rows // 50)


@pytest.mark.parametrize("vocab", [32_000, 128_256, 262_144])
def test_wide_vocabularies(vocab: int) -> None:
    rows = 16 if HAS_GPU else 1
    for kind in SCORES:
        for seed in range(16 if HAS_GPU else 1):
            scores, uniforms = make_scores(kind, rows, vocab, seed), make_uniforms(rows, seed)
            check(draw_here(make_tail(0.8, 50, 0.9), scores, uniforms), CHAINS["usual"], scores, uniforms)


@pytest.mark.parametrize("rows", [1, 2, 3, 16, 64])
def test_any_number_of_rows(rows: int) -> None:
    scores, uniforms = make_scores("spread", rows, 500), make_uniforms(rows)
    check(draw_here(make_tail(0.8, 50, 0.9), scores, uniforms), CHAINS["usual"], scores, uniforms)


@pytest.mark.parametrize("top_k", [1_000, 1_024])
def test_as_many_candidates_as_a_tail_may_have(top_k: int) -> None:
    rows = 8 if HAS_GPU else 1
    scores, uniforms = make_scores("spread", rows, 9_000), make_uniforms(rows)
    settings = (None, top_k, 0.97, None)
    check(draw_here(make_tail(*settings), scores, uniforms), settings, scores, uniforms)


@pytest.mark.parametrize(
    "settings",
    [(None, 20, None, None), (0.8, 50, 0.9, None), (1.0, 3, 0.2, 0.1), (None, 5, 0.0, None), (2.0, 300, 0.99, None)],
)
@pytest.mark.parametrize("kind", ["all equal", "whole numbers", "one above", "few groups"])
def test_more_ties_than_there_is_room_for(kind: str, settings: tuple[Any, ...]) -> None:
    rows, vocab = 3, 1_801
    scores = torch.zeros(rows, vocab)
    if kind == "whole numbers":
        scores = make_scores("spread", rows, vocab).round()
    elif kind == "one above":
        scores[:, 1_234] = 2.0
        scores[:, ::2] -= 1.0
    elif kind == "few groups":
        scores = torch.full((rows, vocab), -INF)
        scores[:, 700:1_500] = make_scores("spread", rows, 800).round()
    uniforms = torch.tensor([0.0203, 0.6004, 0.9999], dtype=torch.float64)
    check(draw_here(make_tail(*settings), scores, uniforms), settings, scores, uniforms)


@pytest.mark.parametrize("kind", ["spread", "all equal"])
def test_the_fewest_tokens_that_top_p_leaves(kind: str) -> None:
    scores = make_scores("peaked", 9, 1_200) if kind == "spread" else torch.zeros(9, 1_200)
    uniforms = torch.linspace(0.0513, 0.9991, 9, dtype=torch.float64)
    for top_p in (0.0, 0.3004):
        tail = make_tail(0.9, 60, top_p, fewest=5)
        assert torch.equal(draw_here(tail, scores, uniforms), run_chain(tail, scores, uniforms))


def test_every_number_finds_its_token() -> None:
    """Numbers on both sides of every step of the cumulated probabilities, and the ends."""
    tail, scores = make_tail(0.8, 12, 0.95), make_scores("spread", 1, 3_000)
    kept = torch.softmax(tail.run_plainly(scores)[0].double(), -1)
    steps = kept[kept > 0].cumsum(0)
    uniforms = torch.cat([steps[:-1] - 1e-9, steps[:-1] + 1e-9, torch.tensor([0.0, 1 - 2.0**-53]).double()])
    many = scores.expand(len(uniforms), -1)
    assert torch.equal(draw_here(tail, many, uniforms), run_chain(tail, many, uniforms))


def test_rows_without_a_token_do_not_disturb_others() -> None:
    scores = make_scores("spread", 9, 2_000)
    scores[1] = -INF
    scores[2] = NAN
    scores[3, 77] = NAN  # in a group of its own
    scores[4, 1_999] = INF
    scores[5, :1_990] = -INF  # fewer than k are possible
    scores[6, 1:] = -INF
    scores[7, ::2] = -0.0
    uniforms = make_uniforms(9)
    tail = make_tail(0.8, 50, 0.9)
    found = draw_here(tail, scores, uniforms)
    assert found[1:5].tolist() == [NO_TOKEN] * 4
    check(found, CHAINS["usual"], scores, uniforms)
    assert draw_by_operators(tail, scores, uniforms)[1:5].tolist() == [NO_TOKEN] * 4


def test_one_number_a_row() -> None:
    settings = ([0.5, 0.7, 1.0, 2.0], [50, 3, 7, 120], [0.9, 1.0, 0.2, 0.99], [0.0, 0.1, 0.5, 0.01])
    tail, scores, uniforms = make_tail(*settings), make_scores("coarse", 4, 5_000), make_uniforms(4)
    found = draw_here(tail, scores, uniforms)
    assert torch.equal(found, run_chain(tail, scores, uniforms))
    index = torch.tensor([2, 0])
    chosen = draw_here(tail.select_rows(index.to(DEVICE)), scores[index], uniforms[index])
    assert torch.equal(chosen, found[index])
    for row in range(4):  # alone as among others
        alone = draw_here(
            make_tail(*(one[row] for one in settings[:2])), scores[row : row + 1], uniforms[row : row + 1]
        )
        few = make_tail(*settings[:2])
        assert alone.item() == draw_here(few, scores, uniforms)[row].item()


def test_scores_whose_rows_lie_apart() -> None:
    wide, uniforms = make_scores("spread", 3, 4_000), make_uniforms(6)
    tail = make_tail(0.8, 50, 0.9)
    expected = draw_here(tail, wide[:, :1_700].contiguous(), uniforms[::2].contiguous())
    assert torch.equal(draw_here(tail, wide[:, :1_700], uniforms[::2]), expected)
    turned = wide[:, :1_700].t().contiguous().t()
    assert torch.equal(draw_here(tail, turned, uniforms[::2]), expected)


def test_frequencies_are_the_probabilities() -> None:
    """Chi-square at 0.1 % over what a tail keeps, with fixed seeds."""
    rows, num_rounds = (256, 80) if HAS_GPU else (64, 4)
    tail, scores = make_tail(0.8, 12, 0.9), make_scores("spread", 1, 1_000, seed=3)
    kept = torch.softmax(tail.run_plainly(scores)[0].double(), -1)
    many = scores.expand(rows, -1).contiguous()
    counts = torch.zeros(1_000, dtype=torch.float64)
    for number in range(num_rounds):
        counts += torch.bincount(draw_here(tail, many, make_uniforms(rows, number)), minlength=1_000)
    expected = kept * rows * num_rounds
    assert not counts[kept == 0].any()
    is_kept = kept > 0
    distance = ((counts - expected)[is_kept].square() / expected[is_kept]).sum()
    spare = 2 / (9 * (int(is_kept.sum()) - 1))
    assert float(distance) < (1 - spare + 3.09 * spare**0.5) ** 3 * 2 / (9 * spare)  # Wilson and Hilferty (1931)


def draw_row_here(scores: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    from unspool.kernels.gpu.sampling.row_draw import draw_row

    return draw_row(scores.to(DEVICE), uniforms.to(DEVICE)).cpu()


@pytest.mark.parametrize("vocab", [1, 40, 1_500, 128_256])
@pytest.mark.parametrize("kind", ["spread", "peaked", "coarse", "cut"])
def test_draws_from_whole_rows(kind: str, vocab: int) -> None:
    rows = 64 if HAS_GPU else 3
    for seed in range(8 if HAS_GPU else 1):
        scores, uniforms = make_scores(kind, rows, vocab, seed), make_uniforms(rows, seed)
        if kind == "cut":
            scores = scores.masked_fill(scores < scores.amax(-1, keepdim=True) - 3.0, -INF)
        found, expected = draw_row_here(scores, uniforms), draw_plainly(scores, uniforms)
        near = [draw_plainly(scores, uniforms * (1 + hair)) for hair in (-1e-9, 1e-9)]
        assert bool(((found == expected) | (found == near[0]) | (found == near[1])).all())
        assert int((found != expected).sum()) <= 1


def test_whole_rows_and_every_number() -> None:
    scores = make_scores("spread", 1, 2_100).masked_fill(torch.arange(2_100) % 7 > 0, -INF)
    steps = torch.softmax(scores[0].double(), -1).cumsum(0)[::70]
    uniforms = torch.cat([steps[:-1] - 1e-9, steps[:-1] + 1e-9, torch.tensor([0.0, 1 - 2.0**-53]).double()])
    many = scores.expand(len(uniforms), -1)
    assert torch.equal(draw_row_here(many, uniforms), draw_plainly(many, uniforms))


def test_whole_rows_without_a_token() -> None:
    scores, uniforms = make_scores("spread", 6, 3_000), make_uniforms(6)
    scores[0] = -INF
    scores[1, 2_999] = NAN
    scores[2, 5] = INF
    scores[3, :2_999] = -INF
    scores[4, 1:] = -INF
    found = draw_row_here(scores, uniforms)
    assert found[:5].tolist() == [NO_TOKEN, NO_TOKEN, NO_TOKEN, 2_999, 0]
    assert torch.equal(found, draw_plainly(scores, uniforms))


@needs_gpu
def test_the_host_never_waits_and_a_graph_can_hold_it() -> None:
    tail, scores, uniforms = make_tail(0.8, 50, 0.9), make_scores("spread", 4, 128_256).cuda(), make_uniforms(4).cuda()
    expected = draw_from_tail(tail, scores, uniforms)
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = draw_from_tail(tail, scores, uniforms)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(again, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = draw_from_tail(tail, scores, uniforms)
    scores.copy_(make_scores("peaked", 4, 128_256, seed=1))
    graph.replay()
    assert torch.equal(captured, draw_from_tail(tail, scores, uniforms))


@needs_gpu
def test_kernels_run_on_a_gpu_and_operators_agree() -> None:
    tail = make_tail([0.5, 0.7, 1.0, 2.0], 7, 0.9)
    for step in range(20):
        scores, uniforms = make_scores("spread", 4, 128_256, step).cuda(), make_uniforms(4, step).cuda()
        assert torch.equal(draw_from_tail(tail, scores, uniforms), draw_by_operators(tail, scores, uniforms))
        assert torch.equal(draw(scores, uniforms), draw_plainly(scores, uniforms))

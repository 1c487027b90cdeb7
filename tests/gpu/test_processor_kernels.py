"""The kernels of processors beside the processors on a CPU.

They run on a GPU, or slowly in Triton's interpreter: `TRITON_INTERPRET=1 pytest tests/gpu/test_processor_kernels.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.gpu.kernel_checks import DEVICE, HAS_GPU, pytestmark

from unspool import (
    DRYLogitsProcessor,
    DynamicTemperatureLogitsWarper,
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    FrequencyPenaltyLogitsProcessor,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    PresencePenaltyLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TopALogitsWarper,
    TopKLogitsWarper,
    TopNSigmaLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
    XTCLogitsWarper,
)

__all__ = ["pytestmark"]

INF = float("inf")
NO_IDS = torch.zeros(0, 0, dtype=torch.int64)
KINDS = ("spread", "peaked", "coarse", "whole numbers", "few", "far")
VOCABS = [40, 9_000, 128_256] if HAS_GPU else [40, 9_000]


def make_scores(kind: str, rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    scores = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2
    if kind == "peaked":
        scores[:, vocab // 3] += 12.0
    elif kind == "coarse":  # as bfloat16 leaves them: many tie
        scores = scores.bfloat16().float()
    elif kind == "whole numbers":  # more tie than there is room for
        scores = scores.round()
    elif kind == "few":
        scores[:, 5:] = -INF
    elif kind == "far":  # beyond the distances that are looked at first
        scores *= 40.0
    return scores


def check_cut(found: torch.Tensor, scores: torch.Tensor, near: list[torch.Tensor]) -> None:
    """What is kept is unchanged, and is what a processor keeps whose setting lies a hair to either side."""
    least, most = (torch.stack([one > -INF for one in near]) for _ in range(2))
    is_kept = found > -INF
    assert torch.equal(found[is_kept], scores[is_kept])
    assert bool((is_kept >= least.all(0)).all() and (is_kept <= most.any(0)).all())
    assert bool(is_kept.any(-1).all())


@pytest.mark.parametrize("mass", [0.2, 0.9, 0.995])
@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("kind", KINDS)
def test_typical(kind: str, vocab: int, mass: float) -> None:
    from unspool.kernels.gpu.sampling.nearest import cut_beyond

    scores = make_scores(kind, 2, vocab)
    found = cut_beyond(scores.to(DEVICE), torch.full((1, 1), mass, device=DEVICE), "typical", -INF).cpu()
    exact = scores.double()
    check_cut(found, scores, [TypicalLogitsWarper(mass * (1 + hair))(NO_IDS, exact) for hair in (-2e-6, 0.0, 2e-6)])


@pytest.mark.parametrize("mass", [0.0, 0.2, 0.9, 0.995])
@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("kind", KINDS)
def test_top_p(kind: str, vocab: int, mass: float) -> None:
    from unspool.kernels.gpu.sampling.nearest import cut_beyond

    scores = make_scores(kind, 2, vocab)
    given = torch.full((1, 1), mass, dtype=torch.float64, device=DEVICE)
    found = cut_beyond(scores.to(DEVICE), given, "top_p", -INF).cpu()
    exact = scores.double()
    check_cut(found, scores, [TopPLogitsWarper(mass * (1 + hair))(NO_IDS, exact) for hair in (-2e-6, 0.0, 2e-6)])


@pytest.mark.parametrize("k", [1, 7, 3_000])
@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("kind", KINDS)
def test_top_k(kind: str, vocab: int, k: int) -> None:
    from unspool.kernels.gpu.sampling.nearest import cut_beyond

    scores = make_scores(kind, 3, vocab)
    counts = torch.tensor([[k], [2], [0]], device=DEVICE)
    found = cut_beyond(scores.to(DEVICE), counts, "top_k", -INF).cpu()
    assert torch.equal(found, TopKLogitsWarper([k, 2, 0])(NO_IDS, scores))


def test_one_mass_per_row_and_rows_that_stay() -> None:
    from unspool.kernels.gpu.sampling.nearest import cut_beyond

    scores = make_scores("spread", 4, 5_000)
    scores[2] = -INF
    scores[3, 7] = float("nan")
    mass = torch.tensor([[0.5], [2.0], [0.9], [0.9]], device=DEVICE)
    for kind in ("typical", "top_p"):
        found = cut_beyond(scores.to(DEVICE), mass, kind, -INF).cpu()
        assert 1 < int((found[0] > -INF).sum()) < 5_000
        assert torch.equal(found[1], scores[1]) and torch.equal(found[2], scores[2])
        assert torch.isnan(found[3, 7])


CUTS: dict[str, tuple[Any, Any]] = {
    "epsilon": (lambda hair: EpsilonLogitsWarper(3e-4 * hair), lambda one: one._log),
    "eta": (lambda hair: EtaLogitsWarper(2e-3 * hair), lambda one: one._log),
    "min_p": (lambda hair: MinPLogitsWarper(0.07 * hair), lambda one: one._below),
    "top_a": (lambda hair: TopALogitsWarper(0.3 * hair), lambda one: one._below),
    "sigma": (lambda hair: TopNSigmaLogitsWarper(1.3 / hair), lambda one: one._values),
}


@pytest.mark.parametrize("name", CUTS)
@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("kind", KINDS)
def test_floors(kind: str, vocab: int, name: str) -> None:
    from unspool.kernels.gpu.sampling.cuts import cut_below

    make, values = CUTS[name]
    scores = make_scores(kind, 3, vocab)
    given = values(make(1.0)).column(scores).to(DEVICE)
    found = cut_below(scores.to(DEVICE), given, name, -INF).cpu()
    check_cut(found, scores, [make(hair)(NO_IDS, scores.double()) for hair in (1 - 1e-4, 1.0, 1 + 1e-4)])


PENALTIES: dict[str, Any] = {
    "repetition": RepetitionPenaltyLogitsProcessor,
    "presence": PresencePenaltyLogitsProcessor,
    "frequency": FrequencyPenaltyLogitsProcessor,
}


@pytest.mark.parametrize("width", [3, 16, 300])
@pytest.mark.parametrize("given", ["nothing", "pads", "starts"])
@pytest.mark.parametrize("ignored", [None, 2])
@pytest.mark.parametrize("kind", PENALTIES)
def test_penalties(width: int, given: str, ignored: int | None, kind: str) -> None:
    from unspool.kernels.gpu.sampling.seen import penalise

    vocab, rows = 500, 3
    scores = make_scores("spread", rows, vocab)
    scores[0, :50] = -INF
    ids = torch.randint(0, vocab, (rows, width), generator=torch.Generator().manual_seed(width))
    pads = torch.tensor([1, 0, 2]) if given == "pads" else None
    starts = torch.tensor([0, 1, 2]) if given == "starts" else None
    processor = PENALTIES[kind]([1.3, 0.7, 2.0], ignored)
    expected = processor(ids, scores, pads, starts)
    column = None if ignored is None else torch.full((1, 1), ignored, device=DEVICE)
    found = penalise(
        scores.to(DEVICE),
        ids.to(DEVICE),
        processor._values.column(scores).to(DEVICE),
        pads=None if pads is None else pads.to(DEVICE),
        starts=None if starts is None else starts.to(DEVICE),
        ignored=column,
        kind=kind,
    )
    if kind == "frequency":  # added up one by one
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("size", [1, 2, 3, 9])
@pytest.mark.parametrize("has_pads", [False, True])
def test_repeated_n_grams(size: int, has_pads: bool) -> None:
    from unspool.kernels.gpu.sampling.seen import ban_repeated

    rows, vocab = 3, 60
    scores = make_scores("spread", rows, vocab)
    for width in (size, 12, 530):
        ids = torch.randint(0, 3, (rows, width), generator=torch.Generator().manual_seed(width))
        pads = torch.tensor([0, 1, 3]) if has_pads else None
        expected = NoRepeatNGramLogitsProcessor(size)(ids, scores, pads)
        found = ban_repeated(scores.to(DEVICE), ids.to(DEVICE), size, None if pads is None else pads.to(DEVICE))
        assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_temperature_by_entropy(kind: str) -> None:
    from unspool.kernels.gpu.sampling.cuts import temper

    scores = make_scores(kind, 3, 5_000)
    scores[2, 1:] = -INF  # one token is possible
    processor = DynamicTemperatureLogitsWarper(1.1, [0.0, 0.5, 1.0], 1.3)
    values = (processor._middle, processor._spread, processor._exponent)
    found = temper(scores.to(DEVICE), *(one.column(scores).to(DEVICE) for one in values)).cpu()
    torch.testing.assert_close(found, processor(NO_IDS, scores), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("threshold", [0.5, 0.05, 1e-4])
def test_obvious_tokens_are_left_out(kind: str, threshold: float) -> None:
    from unspool.kernels.gpu.sampling.cuts import exclude_top

    scores = make_scores(kind, 3, 5_000)
    uniforms = torch.tensor([0.1, 0.4, 0.9], dtype=torch.float64)
    processor = XTCLogitsWarper([0.5, 0.3, 1.0], threshold)
    found = exclude_top(
        scores.to(DEVICE),
        processor._threshold.column(scores).to(DEVICE),
        processor._probability.column(scores, torch.float64).to(DEVICE),
        uniforms.to(DEVICE),
        -INF,
    ).cpu()
    assert torch.equal(found, processor(NO_IDS, scores, uniforms))


@pytest.mark.parametrize("width", [2, 9, 300])
@pytest.mark.parametrize("has_pads", [False, True])
def test_repetitions_by_their_length(width: int, has_pads: bool) -> None:
    from unspool.kernels.gpu.sampling.seen import penalise_repeats

    rows, vocab = 3, 60
    scores = make_scores("spread", rows, vocab)
    ids = torch.randint(0, 3, (rows, width), generator=torch.Generator().manual_seed(width))
    pads = torch.tensor([0, 1, 2]) if has_pads else None
    processor = DRYLogitsProcessor([0.8, 0.0, 2.0], 1.6, 2, [2])
    is_open = ~torch.isin(ids[:, -50:], torch.tensor([2]))
    found = penalise_repeats(
        scores.to(DEVICE),
        ids.to(DEVICE),
        is_open.to(DEVICE),
        processor._multiplier.column(scores).to(DEVICE),
        processor._base.column(scores).to(DEVICE),
        allowed=2,
        largest=1e30,
        pads=None if pads is None else pads.to(DEVICE),
    )
    torch.testing.assert_close(found.cpu(), processor(ids, scores, pads), rtol=1e-5, atol=1e-5)


def test_the_likeliest() -> None:
    from unspool.kernels.gpu.sampling.tokens import find_likeliest

    scores = make_scores("coarse", 4, 9_000)
    scores[2] = -INF
    scores[3, 5] = float("nan")
    found = find_likeliest(scores.to(DEVICE)).tolist()
    assert found == [*scores[:2].argmax(-1).tolist(), -1, -1]

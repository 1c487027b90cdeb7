"""The watermarks' kernels beside their references.

They run on a GPU, or slowly in Triton's interpreter: `TRITON_INTERPRET=1 pytest tests/gpu/test_watermark_kernels.py`.
"""

from __future__ import annotations

import pytest
import torch
from tests.gpu.kernel_checks import DEVICE, pytestmark

from unspool.kernels.contexts import Text
from unspool.watermark import (
    GumbelWatermarkLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    WatermarkLogitsProcessor,
    twister,
)
from unspool.watermark.contexts import is_last_repeated, take_windows
from unspool.watermark.tournament import PackedBits, mark_plainly

__all__ = ["pytestmark"]

INF = float("inf")


def make_scores(rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    scores = 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))
    scores[0, :: 2 + vocab // 7] = -INF
    return scores


def make_odd_scores(vocab: int) -> torch.Tensor:
    """Rows that no mark can be put into: all forbidden, one NaN, one infinite score."""
    scores = make_scores(4, vocab)
    scores[1], scores[2, vocab // 2], scores[3, 5] = -INF, float("nan"), INF
    return scores


def make_ids(rows: int, length: int, vocab: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, vocab, (rows, length), generator=torch.Generator().manual_seed(seed))


def check_logs(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Probabilities agree, and logarithms where a token is likely: float32 rounds what is left of a small one away."""
    is_likely = expected > -12.0
    torch.testing.assert_close(found.exp(), expected.exp(), atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(found[is_likely], expected[is_likely], atol=1e-4, rtol=1e-5)
    assert torch.equal(found.isneginf(), expected.isneginf())


# --- contexts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("width", "length", "start", "first"), [(1, 5, 0, 0), (4, 300, 0, 7), (3, 40, 6, 2), (2, 6, 6, 0)]
)
@pytest.mark.parametrize("mixes", [False, True])
@pytest.mark.parametrize("has_pads", [False, True])
@pytest.mark.parametrize("has_firsts", [False, True])
def test_contexts_are_the_reference_s(
    width: int, length: int, start: int, first: int, mixes: bool, has_pads: bool, has_firsts: bool
) -> None:
    from unspool.kernels.gpu.marks.contexts import read_contexts

    ids = make_ids(6, length, 3)
    pads = torch.tensor([0, 1, 2, 5, 3, 0]) if has_pads else None
    gumbel = GumbelWatermarkLogitsProcessor(3, None, 2**62 + 5, width)
    synthid = SynthIDTextWatermarkLogitsProcessor(width + 1, [1], 2**4, 0, 8, "cpu")
    hash_plainly, seed = (gumbel.hash_contexts, gumbel._start) if mixes else (synthid._hash, 1)
    sent = None if pads is None else pads.to(DEVICE)
    firsts = torch.tensor([0, 3, length + 2, 1, 2, 130]) if has_firsts else None
    text = Text(ids.to(DEVICE), start, width, first, sent, None if firsts is None else firsts.to(DEVICE))
    states, repeated = read_contexts(text, torch.tensor([seed], device=DEVICE), mixes=mixes)
    if pads is not None:
        ids = ids.masked_fill(torch.arange(length) < pads[:, None], 0)
    windows = take_windows(ids[:, start:], width)
    assert torch.equal(states.cpu(), hash_plainly(windows[:, -1]))
    assert torch.equal(repeated.cpu().bool(), is_last_repeated(windows, first if firsts is None else firsts))


# --- Gumbel -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [7, 1024, 5000])
def test_gumbel_draws_the_reference_s_tokens(vocab: int) -> None:
    from unspool.kernels.gpu.marks.gumbel import leave_drawn

    mark = GumbelWatermarkLogitsProcessor(vocab, None)
    states = mark.hash_contexts(make_ids(8, 4, vocab))
    scores = make_scores(8, vocab)
    repeated = torch.tensor([0, 0, 0, 1, 0, 0, 0, 0], dtype=torch.int32)
    found = leave_drawn(scores.to(DEVICE), states.to(DEVICE), repeated.to(DEVICE)).cpu()
    drawn = mark.draw_plainly(scores, states)
    for row in range(8):
        alone = torch.full((vocab,), -INF).index_fill(0, drawn[row], 0.0)
        assert torch.equal(found[row], scores[row] if repeated[row] else alone)


def test_gumbel_leaves_rows_without_a_finite_highest_score() -> None:
    from unspool.kernels.gpu.marks.gumbel import leave_drawn

    scores, states = make_odd_scores(3000), torch.arange(4)
    found = leave_drawn(scores.to(DEVICE), states.to(DEVICE), torch.zeros(4, dtype=torch.int32, device=DEVICE)).cpu()
    assert found[0].isfinite().sum() == 1
    torch.testing.assert_close(found[1:], scores[1:], atol=0, rtol=0, equal_nan=True)


# --- SynthID-Text -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 10, 12, 30, 34])
@pytest.mark.parametrize(("vocab", "size"), [(300, 2**10), (3000, 2**10), (2500, 2**12)])
def test_tournaments_are_won_as_the_reference_s(depth: int, vocab: int, size: int) -> None:
    from unspool.kernels.gpu.marks.tournament import SortedBits, mark_scores

    mark = SynthIDTextWatermarkLogitsProcessor(5, [7919 * n + 3 for n in range(depth)], size, 1, 8, "cpu")
    bits: PackedBits = mark.packed
    contexts = mark._hash(make_ids(4, 4, vocab))
    scores, repeated = make_scores(4, vocab), torch.tensor([0, 0, 1, 0], dtype=torch.int32)
    expected = mark_plainly(scores, bits, contexts, repeated)
    listed = SortedBits.of(bits.words.to(DEVICE), bits.depth, bits.step)
    arguments = (scores.to(DEVICE), contexts.to(DEVICE), repeated.to(DEVICE), listed)
    found = mark_scores(*arguments)
    check_logs(found.cpu(), expected)
    assert torch.equal(found, mark_scores(*arguments))  # sums don't depend on their order


def test_tournaments_leave_rows_without_a_finite_highest_score() -> None:
    from unspool.kernels.gpu.marks.tournament import SortedBits, mark_scores

    mark = SynthIDTextWatermarkLogitsProcessor(5, [3, 5], 2**10, 1, 8, "cpu")
    scores, none = make_odd_scores(2000), torch.zeros(4, dtype=torch.int32)
    listed = SortedBits.of(mark.packed.words.to(DEVICE), 2, mark.packed.step)
    found = mark_scores(scores.to(DEVICE), torch.arange(4).to(DEVICE), none.to(DEVICE), listed).cpu()
    expected = mark_plainly(scores, mark.packed, torch.arange(4), none)
    check_logs(found[:1], expected[:1])
    torch.testing.assert_close(found[1:], scores[1:], atol=0, rtol=0, equal_nan=True)


# --- green lists --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("vocab", "num_first"), [(2, 1), (160, 40), (997, 996), (2000, 0), (3000, 750), (4096, 2048)])
@pytest.mark.parametrize("bias", [2.0, -1.5])
def test_green_lists_are_torch_s_permutations(vocab: int, num_first: int, bias: float) -> None:
    from unspool.kernels.gpu.marks.green_lists import raise_green

    seeds = torch.tensor([0, 5, 15485863 * 77 & twister.SEED_BITS, 2**32 - 1])
    scores = make_scores(4, vocab)
    found = raise_green(scores.to(DEVICE), seeds.to(DEVICE), num_first, bias).cpu()
    for row, seed in enumerate(seeds.tolist()):
        first = torch.randperm(vocab, generator=torch.Generator().manual_seed(seed))[:num_first]
        is_green = torch.zeros(vocab).index_fill(0, first, 1.0)
        assert torch.equal(found[row], scores[row].add(is_green, alpha=bias))


@pytest.mark.parametrize(("vocab", "num_first"), [(2, 1), (160, 40), (997, 996), (3000, 750)])
def test_single_tokens_are_followed_through_the_shuffle(vocab: int, num_first: int) -> None:
    from unspool.kernels.gpu.marks.own_lists import are_first

    tokens = torch.arange(0, vocab, max(1, vocab // 40))
    seeds = (tokens * 7919 + 12345) & twister.SEED_BITS
    expected = twister.are_first(seeds, tokens, vocab, num_first)
    assert torch.equal(are_first(seeds.to(DEVICE), tokens.to(DEVICE), vocab, num_first).cpu(), expected)


@pytest.mark.parametrize(("vocab", "width"), [(160, 1), (3000, 4)])
def test_candidates_are_raised_by_their_own_lists(vocab: int, width: int) -> None:
    from unspool.kernels.gpu.marks.own_lists import DeviceOwnLists, raise_own

    settings = {"greenlist_ratio": 0.25, "bias": 2.0, "seeding_scheme": "selfhash", "context_width": width}
    mark = WatermarkLogitsProcessor(vocab, "cpu", hashing_key=2**40 + 7, **settings)
    scores, ids = make_scores(3, vocab), make_ids(3, 6, vocab)
    assert mark._table is not None
    table, key = mark._table.to(DEVICE), torch.tensor([2**40 + 7], device=DEVICE)
    lists = DeviceOwnLists(table, key, width - 1, mark.greenlist_size, 40)
    assert torch.equal(raise_own(scores.to(DEVICE), ids.to(DEVICE), lists, 2.0).cpu(), mark(ids, scores))


@pytest.mark.parametrize(("vocab", "k"), [(40, 40), (160, 40), (3000, 40), (5000, 7)])
@pytest.mark.parametrize("kinds", [0, 50, 2])  # of scores: the fewer, the more of them tie
def test_candidates_are_the_likeliest(vocab: int, k: int, kinds: int) -> None:
    from unspool.kernels.gpu.marks.own_lists import list_candidates

    scores = make_scores(4, vocab)
    scores = (kinds * scores.sigmoid()).floor() if kinds else scores
    scores[1, 3:] = -INF  # fewer than k are possible
    scores[2, 5], scores[3, vocab // 2] = INF, float("nan")
    copy, found = list_candidates(scores.to(DEVICE), k)
    torch.testing.assert_close(copy.cpu(), scores, atol=0, rtol=0, equal_nan=True)
    order = scores[:2].sort(descending=True, stable=True)
    expected = order.indices[:, :k].masked_fill(order.values[:, :k].isneginf(), -1)
    assert torch.equal(found[:2].cpu(), expected.to(torch.int32))
    assert (found[2:] == -1).all()

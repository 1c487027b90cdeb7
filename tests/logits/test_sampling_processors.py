from __future__ import annotations

import math

import pytest
import torch
import transformers
from tests.logits.cases import random_scores

from unspool import (
    DynamicTemperatureLogitsWarper,
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    MinPLogitsWarper,
    MirostatLogitsWarper,
    TopALogitsWarper,
    TopHLogitsWarper,
    TopNSigmaLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
    XTCLogitsWarper,
)
from unspool.logits.highest import take_highest

INF = float("inf")
IDS = torch.zeros(1, 3, dtype=torch.long)


def kept(processor, probabilities: list[float], **extra) -> list[int]:
    scores = torch.tensor([probabilities], dtype=torch.float64).log()
    result = processor(IDS, scores, **extra)
    assert torch.equal(result[result > -INF], scores[result > -INF])
    return torch.nonzero(result[0] > -INF).flatten().tolist()


def test_what_each_cut_keeps() -> None:
    assert kept(MinPLogitsWarper(0.5), [0.5, 0.3, 0.2]) == [0, 1]
    assert kept(MinPLogitsWarper(1.0), [0.5, 0.3, 0.2]) == [0]
    assert kept(EpsilonLogitsWarper(0.25), [0.5, 0.3, 0.2]) == [0, 1]
    assert kept(EpsilonLogitsWarper(0.9), [0.5, 0.3, 0.2]) == [0]  # never all
    entropy = -sum(p * math.log(p) for p in (0.5, 0.3, 0.2))
    floor = min(0.6, math.sqrt(0.6) * math.exp(-entropy))
    assert 0.2 < floor < 0.3
    assert kept(EtaLogitsWarper(0.6), [0.5, 0.3, 0.2]) == [0, 1]
    assert kept(TopALogitsWarper(0.79), [0.5, 0.3, 0.2]) == [0, 1, 2]  # 0.79 * 0.5 ** 2 < 0.2
    assert kept(TopALogitsWarper(0.9), [0.5, 0.3, 0.2]) == [0, 1]
    # The surprise nearest to the entropy of 1.03 nats is that of 0.3, which is 1.2; then comes 0.5 with 0.69.
    assert kept(TypicalLogitsWarper(0.2), [0.5, 0.3, 0.2]) == [1]
    assert kept(TypicalLogitsWarper(0.7), [0.5, 0.3, 0.2]) == [0, 1]
    # Parts of the entropy: 0.347, 0.361, 0.322.
    assert kept(TopHLogitsWarper(0.34), [0.5, 0.3, 0.2]) == [0]
    assert kept(TopHLogitsWarper(0.69), [0.5, 0.3, 0.2]) == [0, 1]
    far = TopHLogitsWarper(1.0)(IDS, torch.tensor([[0.0, -200.0, -300.0]]))
    assert far.tolist() == [[0.0, -INF, -INF]]  # what rounds to no probability is not kept


def test_top_n_sigma_looks_at_scores_that_are_possible() -> None:
    scores = torch.tensor([[4.0, 2.0, 0.0, -INF], [4.0, 2.0, 0.0, -2.0]])
    sigma = math.sqrt(8 / 3)
    found = TopNSigmaLogitsWarper(2 / sigma + 1e-4)(IDS, scores[:1])
    assert found.tolist() == [[4.0, 2.0, -INF, -INF]]
    assert TopNSigmaLogitsWarper(2 / sigma - 1e-4)(IDS, scores[:1]).tolist() == [[4.0, -INF, -INF, -INF]]
    one = torch.tensor([[-INF, 3.0, -INF]])
    assert TopNSigmaLogitsWarper(1.0)(IDS, one).tolist() == one.tolist()


def test_xtc_leaves_the_least_likely_of_the_top_choices() -> None:
    def uniforms(value: float) -> dict[str, torch.Tensor]:
        return {"uniforms": torch.tensor([value], dtype=torch.float64)}

    xtc = XTCLogitsWarper(0.5, 0.15)
    assert kept(xtc, [0.5, 0.2, 0.2, 0.1], **uniforms(0.4999)) == [1, 3]
    assert kept(xtc, [0.5, 0.2, 0.2, 0.1], **uniforms(0.5)) == [0, 1, 2, 3]
    assert kept(xtc, [0.86, 0.14], **uniforms(0.0)) == [0, 1]  # one top choice stays
    assert kept(XTCLogitsWarper(0.0, 0.15), [0.5, 0.5], **uniforms(0.0)) == [0, 1]
    assert kept(XTCLogitsWarper(1.0, 0.5), [0.5, 0.5], **uniforms(0.9)) == [0]


def test_dynamic_temperature_follows_the_entropy() -> None:
    flat, sure = torch.zeros(1, 8), torch.tensor([[50.0] + [0.0] * 7])
    warper = DynamicTemperatureLogitsWarper(1.0, 0.5)
    torch.testing.assert_close(warper(IDS, flat + 3), (flat + 3) / 1.5)
    torch.testing.assert_close(warper(IDS, sure), sure / 0.5)
    half = torch.tensor([[2.0, 2.0, -INF, -1e4, -1e4]])  # two of four that are possible: half the entropy
    expected = half / (0.5 + 0.5**2.0)
    torch.testing.assert_close(DynamicTemperatureLogitsWarper(1.0, 0.5, 2.0)(IDS, half), expected)
    only = torch.tensor([[-INF, 3.0]])
    torch.testing.assert_close(warper(IDS, only), only / 0.5)


def test_mirostat_steers_by_what_was_drawn() -> None:
    tau, eta = 2.0, 0.3
    warper = MirostatLogitsWarper(tau, eta)
    scores = torch.tensor([[0.5, 0.3, 0.1, 0.06, 0.04]]).log()
    history, cut = IDS, 2 * tau
    for drawn in (1, 0, 2, 0):
        found = warper(history, scores)
        surprise = -scores / math.log(2)
        assert torch.equal(found > -INF, (surprise <= cut) | (scores == scores.max()))
        assert torch.equal(warper(history, scores), found)  # the same step again
        logprob = found.log_softmax(-1)[0, drawn].item()
        cut -= eta * (-logprob / math.log(2) - tau)
        history = torch.cat((history, torch.tensor([[drawn]])), dim=1)
    other = warper(torch.zeros(1, 2, dtype=torch.long), scores)  # another text starts anew
    assert torch.equal(other, MirostatLogitsWarper(tau, eta)(IDS, scores))


def test_mirostat_state_follows_the_rows() -> None:
    both, scores = MirostatLogitsWarper([1.0, 3.0], 0.5), random_scores(1, rows=2)
    one = MirostatLogitsWarper(3.0, 0.5)
    ids = torch.zeros(2, 1, dtype=torch.long)
    for step in range(3):
        found = both(ids, scores)
        assert torch.equal(one(ids[1:], scores[1:]), found[1:])
        ids = torch.cat((ids, found.argmax(-1, keepdim=True)), dim=1)
        if step == 1:
            both_left = both.select_rows(torch.tensor([1]))
    assert torch.equal(both_left(ids[1:, :3], scores[1:]), found[1:])


@pytest.mark.parametrize("scale", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("ties", [False, True])
def test_top_p_without_a_full_sort_is_top_p(scale: float, ties: bool) -> None:
    scores = torch.randn(9, 2000, generator=torch.Generator().manual_seed(3)) * 3 * scale
    scores = scores.round() if ties else scores
    scores[3] = 0.0
    scores[4, 7:] = -INF
    scores[5] = scores[5].round()

    def assert_same(found: torch.Tensor, expected: torch.Tensor, num_at_the_edge: int) -> None:
        kept, wanted = found > -INF, expected > -INF
        assert bool(((kept != wanted).sum(dim=-1) <= num_at_the_edge).all())
        assert torch.equal(found[kept], scores_of[kept])

    for p in (0.0, 0.1, 0.5, 0.9, 0.999, 1.0):
        for fewest in (1, 3):
            warper = TopPLogitsWarper(p, min_tokens_to_keep=fewest)
            expected, edge = warper._cut_sorted(scores), 2 if p == 0.999 else 0  # there rounding decides
            scores_of = scores
            assert_same(warper(IDS, scores), expected, edge)
            for cut in (warper._cut_head, warper._cut_binned):
                if cut == warper._cut_binned and warper._needs_few:
                    continue
                found, is_open = cut(scores)
                scores_of = scores[~is_open]
                assert_same(found[~is_open], expected[~is_open], edge)
    rows = TopPLogitsWarper([0.1, 1.0, 0.9, 0.5, 0.99, 0.7, 1.0, 0.0, 0.3])
    assert torch.equal(rows(IDS, scores), rows._cut_sorted(scores))


@pytest.mark.parametrize("scale", [0.2, 1.0, 4.0])
def test_typical_without_a_full_sort_is_the_references(scale: float) -> None:
    scores = torch.randn(3, 40_000, generator=torch.Generator().manual_seed(3)) * 3 * scale
    for mass in (0.2, 0.9, 0.99):
        for fewest in (1, 4):
            expected = transformers.TypicalLogitsWarper(mass, min_tokens_to_keep=fewest)(IDS, scores)
            found = TypicalLogitsWarper(mass, min_tokens_to_keep=fewest)(IDS, scores)
            num_kept = (expected > -INF).sum(dim=-1)
            # At the edge rounding may decide otherwise, for a token or two of thousands.
            assert bool(((found > -INF) != (expected > -INF)).sum(dim=-1).le(num_kept // 1000).all())


@pytest.mark.parametrize("vocab", [16_384, 20_001])
def test_highest_in_two_levels_are_the_highest(vocab: int) -> None:
    scores = torch.randn(5, vocab, generator=torch.Generator().manual_seed(0))
    scores[1] = -INF
    scores[1, -3:] = torch.tensor([1.0, 3.0, 2.0])
    for k in (1, 2, 17):
        values, tokens = take_highest(scores, k)
        assert torch.equal(values, torch.topk(scores, k).values)
        assert torch.equal(scores.gather(1, tokens), values)
        assert torch.equal(tokens[2:], torch.topk(scores, k).indices[2:])


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: MinPLogitsWarper(1.5), r"`min_p` has to be a number in \[0, 1\]"),
        (lambda: MinPLogitsWarper(float("nan")), "min_p"),
        (lambda: MinPLogitsWarper(0.1, min_tokens_to_keep=0), "min_tokens_to_keep"),
        (lambda: TypicalLogitsWarper(1.0), "typical_p"),
        (lambda: TypicalLogitsWarper([1.0, 0.0]), "typical_p"),
        (lambda: EpsilonLogitsWarper(0.0), "epsilon_cutoff"),
        (lambda: EtaLogitsWarper(1.0), "eta_cutoff"),
        (lambda: TopHLogitsWarper(0.0), "top_h"),
        (lambda: TopALogitsWarper(-0.1), "top_a"),
        (lambda: TopNSigmaLogitsWarper(0), "top_n_sigma"),
        (lambda: XTCLogitsWarper(1.1), "xtc_probability"),
        (lambda: XTCLogitsWarper(0.5, 0.0), "xtc_threshold"),
        (lambda: MirostatLogitsWarper(0.0), "mirostat_tau"),
        (lambda: MirostatLogitsWarper(1.0, -1.0), "mirostat_eta"),
        (lambda: DynamicTemperatureLogitsWarper(0.5, 0.5), "smaller than `temperature`"),
        (lambda: DynamicTemperatureLogitsWarper(0.5, -0.1), "dynatemp_range"),
    ],
)
def test_what_cannot_be_is_refused(make, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        make()


def test_rows_that_hold_no_number_are_cut_as_a_sort_cuts_them() -> None:
    """And the rows beside them, which are read by the histogram."""
    scores = torch.randn(4, 2_000, generator=torch.Generator().manual_seed(3)) * 0.1
    scores[1, 7], scores[2] = torch.nan, torch.nan
    warper = TopPLogitsWarper(0.9)
    torch.testing.assert_close(warper(IDS, scores), warper._cut_sorted(scores), equal_nan=True, rtol=0, atol=0)
    _, is_open = warper._cut_binned(scores)
    assert is_open.tolist()[1:3] == [True, True]

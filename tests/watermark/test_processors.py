"""The three watermarks' processors beside the reference's, and as pure functions of what they are shown."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from unspool.config import GumbelWatermarkingConfig, SynthIDTextWatermarkingConfig, WatermarkingConfig
from unspool.errors import InputError, SettingError
from unspool.logits.watermark import RowWatermarks
from unspool.watermark import (
    GumbelWatermarkLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    WatermarkLogitsProcessor,
)
from unspool.watermark.green_list import GreenLists

VOCAB = 211
KEYS = [654, 400, 836, 123, 2**40 + 17]
SYNTHID: dict[str, Any] = {
    "ngram_len": 3,
    "keys": KEYS,
    "sampling_table_size": 2**10,
    "sampling_table_seed": 7,
    "context_history_size": 6,
}
CONFIGS: list[Any] = [
    WatermarkingConfig(),
    WatermarkingConfig(seeding_scheme="selfhash", context_width=3),
    SynthIDTextWatermarkingConfig(3, KEYS),
    GumbelWatermarkingConfig(context_width=2),
]


def make_scores(rows: int, seed: int = 0) -> torch.Tensor:
    return 2 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


def make_ids(rows: int, length: int, seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randint(0, vocab, (rows, length), generator=torch.Generator().manual_seed(seed))


# --- green lists --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["lefthash", "selfhash"])
@pytest.mark.parametrize("key", [15485863, 7919, -12345, 2**62 + 1])
@pytest.mark.parametrize(("ratio", "width"), [(0.25, 1), (0.5, 3)])
def test_green_lists_are_the_reference_s(scheme: str, key: int, ratio: float, width: int) -> None:
    settings: dict[str, Any] = {
        "greenlist_ratio": ratio,
        "hashing_key": key,
        "seeding_scheme": scheme,
        "context_width": width,
    }
    theirs = transformers.WatermarkLogitsProcessor(VOCAB, "cpu", **settings)
    ours = WatermarkLogitsProcessor(VOCAB, "cpu", **settings)
    assert ours.hash_key == theirs.hash_key
    ids, scores = make_ids(4, 5), make_scores(4)
    assert torch.equal(ours(ids, scores), theirs(ids, scores))
    assert torch.equal(ours(ids, scores), theirs(ids, scores))  # from the cache


@pytest.mark.parametrize("width", [1, 4])
def test_own_lists_of_a_wide_vocabulary_are_those_of_plain_operators(width: int) -> None:
    settings: dict[str, Any] = {"seeding_scheme": "selfhash", "context_width": width, "greenlist_ratio": 0.3}
    mark = WatermarkLogitsProcessor(20_011, "cpu", **settings)
    generator = torch.Generator().manual_seed(width)
    ids, scores = make_ids(3, 6, vocab=20_011), torch.randn(3, 20_011, generator=generator)
    scores[1, torch.randperm(20_011, generator=generator)[25:]] = -torch.inf  # fewer than the candidates are possible
    found, expected = mark(ids, scores), mark.raise_plainly(ids, scores, 40)
    assert torch.equal(found, expected)
    assert 0 < int((found != scores).sum()) < 105
    for row in range(3):
        assert torch.equal(mark(ids[row : row + 1], scores[row : row + 1])[0], found[row])


def test_cached_lists_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unspool.watermark.green_list.MOST_CACHED_BYTES", 9 * (VOCAB // 8))
    lists, all_of_them = GreenLists(VOCAB, 50), GreenLists(VOCAB, 50)
    all_of_them._most = 100
    for seed in range(5):
        seeds = [(7 * seed + place) % 31 for place in range(8)] * 2
        assert torch.equal(lists.find(seeds), all_of_them.find(seeds))
        assert len(lists) <= 9


def test_processors_of_one_size_share_their_lists() -> None:
    one, two = WatermarkLogitsProcessor(VOCAB, "cpu"), WatermarkLogitsProcessor(VOCAB, "cpu", bias=5.0)
    other = WatermarkLogitsProcessor(VOCAB, "cpu", greenlist_ratio=0.5)
    assert one._lists is two._lists is not other._lists


def test_short_texts_and_other_vocabularies() -> None:
    mark = WatermarkLogitsProcessor(VOCAB, "cpu", context_width=3)
    scores = make_scores(2)
    assert torch.equal(mark(make_ids(2, 2), scores), scores)
    with pytest.raises(InputError, match="vocabulary of 211 tokens, and the scores have 100"):
        mark(make_ids(2, 3), scores[:, :100])
    for bad in ({"greenlist_ratio": 1.0}, {"seeding_scheme": "x"}, {"context_width": 0}):
        with pytest.raises(SettingError, match=next(iter(bad))):
            WatermarkLogitsProcessor(VOCAB, "cpu", **bad)


# --- SynthID-Text -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("size", [2**10, 1000])
def test_synthid_follows_the_reference_without_its_state(skips: bool, size: int) -> None:
    """Call after call, with few tokens, so that contexts come again."""
    settings = {**SYNTHID, "sampling_table_size": size, "skip_first_ngram_calls": skips}
    theirs = transformers.SynthIDTextWatermarkLogitsProcessor(**settings, device="cpu")
    ours = SynthIDTextWatermarkLogitsProcessor(**settings, device="cpu").after_prompt(4)
    ids, num_unmarked = make_ids(3, 24, vocab=3), 0
    for width in range(4, 24):
        scores = make_scores(3, width)
        expected, found = theirs(ids[:, :width], scores), ours(ids[:, :width], scores)
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)
        num_unmarked += int((found == scores).all(dim=-1).sum())
    assert 5 < num_unmarked < 55


@pytest.mark.parametrize("vocab", [VOCAB, 3001])
def test_synthid_of_a_row_does_not_depend_on_the_others(vocab: int) -> None:
    """Bit for bit, however many threads share it; a vocabulary larger than the table has classes of tokens."""
    mark = SynthIDTextWatermarkLogitsProcessor(**{**SYNTHID, "keys": list(range(3, 38))}, device="cpu")
    generator = torch.Generator().manual_seed(0)
    ids, scores = make_ids(8, 9, vocab=vocab), 3 * torch.randn(8, vocab, generator=generator)
    together = mark(ids, scores)
    for row in range(8):
        assert torch.equal(mark(ids[row : row + 1], scores[row : row + 1])[0], together[row])


def test_g_values_and_masks_are_the_reference_s() -> None:
    theirs = transformers.SynthIDTextWatermarkLogitsProcessor(**SYNTHID, device="cpu")
    ours = SynthIDTextWatermarkLogitsProcessor(**SYNTHID, device="cpu")
    ids = make_ids(3, 40, vocab=5)
    assert torch.equal(ours.sampling_table, theirs.sampling_table)
    assert torch.equal(ours.compute_g_values(ids), theirs.compute_g_values(ids))
    ngrams = ids.unfold(1, 3, 1)
    assert torch.equal(ours.compute_ngram_keys(ngrams), theirs.compute_ngram_keys(ngrams))
    assert torch.equal(ours.compute_context_repetition_mask(ids), theirs.compute_context_repetition_mask(ids))
    assert torch.equal(ours.compute_eos_token_mask(ids, 2).bool(), theirs.compute_eos_token_mask(ids, 2).bool())
    assert ours.expected_mean_g_value(VOCAB) == theirs.expected_mean_g_value(VOCAB)
    start = torch.ones(3, dtype=torch.int64)
    assert torch.equal(ours.accumulate_hash(start, ids), theirs.accumulate_hash(start, ids))
    g_values = torch.randint(0, 2, (3, VOCAB, 4))
    scores = make_scores(3)
    assert torch.equal(ours.update_scores(scores, g_values), theirs.update_scores(scores, g_values))


def test_synthid_leaves_forbidden_tokens_forbidden() -> None:
    scores = make_scores(2)
    scores[:, :100] = -float("inf")
    scores[1] = -float("inf")
    marked = SynthIDTextWatermarkLogitsProcessor(**SYNTHID, device="cpu")(make_ids(2, 5), scores)
    assert marked[0, :100].isneginf().all() and marked[0, 100:].isfinite().all()
    assert marked[1].isneginf().all()
    with pytest.raises(InputError, match="shorter than an n-gram of 3"):
        SynthIDTextWatermarkLogitsProcessor(**SYNTHID, device="cpu").compute_g_values(make_ids(1, 2))


# --- Gumbel -------------------------------------------------------------------------------------------------


def test_gumbel_draws_from_the_distribution_over_keys() -> None:
    """A chi-square test over 4,000 keys: the tokens are drawn with their probabilities."""
    scores = torch.tensor([[2.0, 1.0, 0.0, -1.0, -float("inf"), 0.5]])
    ids = torch.tensor([[3, 1, 4, 1]])
    counts = torch.zeros(6)
    for key in range(4000):
        marked = GumbelWatermarkLogitsProcessor(6, "cpu", hashing_key=key)(ids, scores)
        assert marked.isfinite().sum() == 1
        counts[marked.argmax()] += 1
    expected = 4000 * scores.softmax(dim=-1)[0]
    assert counts[4] == 0
    possible = expected > 0
    statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    assert statistic < 18.5  # the 99.9 % quantile of chi-square with 4 degrees of freedom


def test_gumbel_noise_is_uniform_and_its_own_for_every_context() -> None:
    mark = GumbelWatermarkLogitsProcessor(VOCAB, "cpu", context_width=2)
    contexts = make_ids(300, 2)
    states = mark.hash_contexts(contexts)
    noise = mark.draw_noise(states[:, None], torch.arange(VOCAB))
    counts = torch.histc(noise, 50, 0, 1)
    expected = noise.numel() / 50
    assert ((counts - expected) ** 2 / expected).sum() < 85.4  # chi-square, 49 degrees of freedom, 99.9 %
    assert len(states.unique()) == len(contexts.unique(dim=0))
    other = GumbelWatermarkLogitsProcessor(VOCAB, "cpu", 1, context_width=2)
    assert not (states == other.hash_contexts(contexts)).any()
    rows = torch.corrcoef(noise[:40])
    assert (rows - torch.eye(40)).abs().max() < 0.35


def test_gumbel_lets_repeated_contexts_be() -> None:
    mark = GumbelWatermarkLogitsProcessor(VOCAB, "cpu", context_width=2)
    scores = make_scores(2)
    marked = mark(torch.tensor([[1, 2, 3, 1, 2], [1, 2, 3, 4, 2]]), scores)
    assert torch.equal(marked[0], scores[0])
    assert marked[1].isfinite().sum() == 1
    # What the prompt has is not text: there the noise has not been used.
    assert mark.after_prompt(5)(torch.tensor([[1, 2, 3, 1, 2]]), scores[:1]).isfinite().sum() == 1


# --- all of them --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: type(config).__name__)
def test_a_row_alone_is_the_row_in_a_batch(config: Any) -> None:
    mark = config.construct_processor(VOCAB, "cpu")
    ids, scores = make_ids(4, 7), make_scores(4)
    before = ids.clone(), scores.clone()
    whole = mark(ids, scores)
    assert torch.equal(ids, before[0]) and torch.equal(scores, before[1])
    for row in range(4):
        torch.testing.assert_close(mark(ids[row : row + 1], scores[row : row + 1])[0], whole[row])
    torch.testing.assert_close(mark(ids, scores), whole)  # nothing is remembered


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: type(config).__name__)
def test_padding_is_not_seen(config: Any) -> None:
    mark = config.construct_processor(VOCAB, "cpu").after_prompt(4)
    ids, scores = make_ids(1, 5), make_scores(1)
    ids[0, :3] = 9
    padded = mark(ids, scores, torch.tensor([3]))
    ids[0, :3] = 8
    torch.testing.assert_close(mark(ids, scores, torch.tensor([3])), padded)


def test_every_row_may_have_its_own_mark() -> None:
    marks = [config.construct_processor(VOCAB, "cpu") for config in CONFIGS]
    of_rows = [marks[0], None, marks[2], marks[3], marks[0]]
    rows = RowWatermarks.of(of_rows)
    ids, scores = make_ids(5, 6), make_scores(5)
    found = rows(ids, scores)
    for row, mark in enumerate(of_rows):
        expected = scores[row] if mark is None else mark(ids[row : row + 1], scores[row : row + 1])[0]
        torch.testing.assert_close(found[row], expected)
    chosen = rows.select_rows(torch.tensor([3, 1]))
    torch.testing.assert_close(chosen(ids[[3, 1]], scores[[3, 1]]), found[[3, 1]])

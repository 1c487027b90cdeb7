"""The detectors beside the reference's, and their p values beside chance."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from unspool.config import GumbelWatermarkingConfig, SynthIDTextWatermarkingConfig, WatermarkingConfig
from unspool.errors import InputError, SettingError
from unspool.watermark import WatermarkDetector
from unspool.watermark.detector import find_differences
from unspool.watermark.scoring import SynthIDScorer, make_scorer
from unspool.watermark.statistics import binomial_tail, gamma_tail, normal_tail

VOCAB = 211
MODEL = SimpleNamespace(vocab_size=VOCAB, bos_token_id=1, is_encoder_decoder=False)
CONFIGS: list[Any] = [
    WatermarkingConfig(),
    WatermarkingConfig(seeding_scheme="selfhash", context_width=2, greenlist_ratio=0.4),
    SynthIDTextWatermarkingConfig(3, [7919 * place for place in range(100, 110)], sampling_table_size=2**12),
    GumbelWatermarkingConfig(context_width=2),
]


def name(config: Any) -> str:
    return f"{type(config).__name__} {getattr(config, 'seeding_scheme', '')} {getattr(config, 'context_width', '')}"


def write(config: Any, rows: int, length: int, seed: int = 0, temperature: float = 1.0) -> torch.Tensor:
    """Texts of a "model" that finds random tokens likely: (rows, length); marked where there is a config."""
    generator = torch.Generator().manual_seed(seed)
    mark = None if config is None else config.construct_processor(VOCAB, "cpu")
    ids = torch.randint(3, VOCAB, (rows, 1), generator=generator)
    for _ in range(length):
        scores = 1.5 * torch.randn(rows, VOCAB, generator=generator) / temperature
        if mark is not None:
            scores = mark(ids, scores)
        ids = torch.cat((ids, torch.multinomial(scores.softmax(dim=-1), 1, generator=generator)), dim=1)
    return ids[:, 1:]


def repeat_phrases(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    """Repetitive text that knows nothing of a key: a few phrases, over and over."""
    generator = torch.Generator().manual_seed(seed)
    phrases = torch.randint(3, VOCAB, (rows, 6, 12), generator=generator)
    order = torch.randint(0, 6, (rows, length // 12 + 1), generator=generator)
    return torch.stack([phrases[row, order[row]].flatten()[:length] for row in range(rows)])


# --- beside the reference -----------------------------------------------------------------------------------


@pytest.mark.parametrize("ignores", [False, True])
@pytest.mark.parametrize("scheme", ["lefthash", "selfhash"])
@pytest.mark.parametrize("width", [1, 3])
def test_green_lists_are_counted_as_the_reference_counts(ignores: bool, scheme: str, width: int) -> None:
    config = WatermarkingConfig(seeding_scheme=scheme, context_width=width, bias=3.0)
    texts = torch.cat((write(config, 1, 24), repeat_phrases(1, 24)))
    theirs = transformers.WatermarkDetector(
        transformers.GPT2Config(vocab_size=VOCAB, bos_token_id=1), "cpu", config.to_dict(), ignores
    )(texts, return_dict=True)
    detector = WatermarkDetector(MODEL, "cpu", config, ignores)
    ours = detector(texts, return_dict=True)
    for name in ("num_tokens_scored", "num_green_tokens", "green_fraction", "z_score", "prediction"):
        np.testing.assert_allclose(getattr(ours, name), getattr(theirs, name))
    assert (detector(texts) == theirs.prediction).all()
    np.testing.assert_allclose(ours.confidence, 1 - ours.p_value)


def test_a_begin_token_is_left_out() -> None:
    texts = write(CONFIGS[0], 2, 30)
    begun = torch.cat((torch.ones(2, 1, dtype=torch.int64), texts), dim=1)
    detector = WatermarkDetector(MODEL, "cpu", CONFIGS[0].to_dict())
    assert (detector(begun, return_dict=True).z_score == detector(texts, return_dict=True).z_score).all()
    begun[0, 0] = 5
    with pytest.raises(InputError, match="some texts begin with the begin token"):
        detector(begun)


# --- honest -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", CONFIGS, ids=name)
def test_marked_text_is_found_and_other_text_is_not(config: Any) -> None:
    detector = WatermarkDetector({"vocab_size": VOCAB}, "cpu", config, ignore_repeated_ngrams=True)
    marked, plain = detector(write(config, 6, 90), return_dict=True), detector(write(None, 6, 90), return_dict=True)
    assert (marked.p_value < 1e-4).all() and marked.prediction.all()
    assert (plain.p_value > 1e-4).all()
    assert np.median(marked.green_fraction) > np.median(plain.green_fraction) + 0.1


@pytest.mark.parametrize("kind", ["random", "repetitive", "of few words"])
@pytest.mark.parametrize("config", [*CONFIGS, WatermarkingConfig(context_width=4)], ids=name)
def test_p_values_are_honest(config: Any, kind: str) -> None:
    """Of unmarked texts, repetitive ones too, 1 % have a p value below 1 %, and 0.1 % one below 0.1 %.

    Over keys: each text is judged with a key of its own. 95 % intervals; from above alone where a p value can't reach
    its level: a count's is coarse, so less than 1 % of texts lie below 1 %, and SynthID-Text's is a normal
    approximation. Gumbel's is exact and continuous, so that its rates are bounded from below, too.
    """
    is_slow = getattr(config, "seeding_scheme", "") == "selfhash"  # each of its keys takes a table of a million numbers
    num_texts, length = 200 if is_slow else 500, 48
    torch.manual_seed(1)
    if kind == "repetitive":
        texts = repeat_phrases(num_texts, length)
    else:  # of few words, n-grams differ and the pairs of tokens that they have their lists by come again and again
        words = torch.randint(3, VOCAB, (num_texts, length if kind == "random" else 6))
        texts = words.gather(1, torch.randint(0, words.shape[1], (num_texts, length)))
    found = []
    for number, text in enumerate(texts):
        own = config.to_dict()
        if "keys" in own:
            own["keys"] = [number * 1_000_003 + 7919 * place for place in range(10)]
        else:
            own["hashing_key"] = 15_485_863 + 7919 * (number // 25 if is_slow else number)
        scorer = WatermarkDetector(MODEL, "cpu", own)
        found.append(float(scorer.find_p_values([scorer.scorer.read(text.tolist())])[0]))
    rates = np.array(found)
    for level in (0.01, 0.05):
        width = 1.96 * math.sqrt(level * (1 - level) / num_texts)
        rate = (rates <= level).mean()
        assert rate <= level + width
        assert rate >= level - width or not isinstance(config, GumbelWatermarkingConfig)
    assert (rates <= 0.001).sum() <= 3
    assert 0.4 < rates.mean() < 0.65  # of few counts p values are coarse, and so higher on average
    if isinstance(config, GumbelWatermarkingConfig):  # Kolmogorov and Smirnov: as far from uniform as chance makes it
        distance = np.abs(np.sort(rates) - (np.arange(num_texts) + 0.5) / num_texts).max() + 0.5 / num_texts
        assert distance < 1.36 / math.sqrt(num_texts)


def test_repeats_would_mislead() -> None:
    """The same texts, counted with repeats, as the reference does by default: many times 1 % are told to be marked."""
    texts, wrong = repeat_phrases(150, 84), 0
    for number, text in enumerate(texts):
        config = WatermarkingConfig(hashing_key=15_485_863 + 7919 * number)
        told = WatermarkDetector(MODEL, "cpu", config)(text[None], return_dict=True)
        wrong += int(normal_tail(told.z_score)[0] < 0.01)
    assert wrong / 150 > 0.05


def test_tails() -> None:
    np.testing.assert_allclose(binomial_tail(np.array([3.0]), np.array([5.0]), 0.5), [0.5])
    np.testing.assert_allclose(binomial_tail(np.array([0.0]), np.array([5.0]), 0.25), [1.0])
    np.testing.assert_allclose(binomial_tail(np.array([200.0]), np.array([200.0]), 0.25), [0.25**200], rtol=1e-9)
    np.testing.assert_allclose(gamma_tail(np.array([2.0, 1.0]), np.array([1.0, 0.0])), [math.exp(-2), 1.0])
    np.testing.assert_allclose(normal_tail(np.array([0.0, 1.959964])), [0.5, 0.025], rtol=1e-5)


def test_synthid_s_moments_are_those_of_its_bits() -> None:
    for size in (2**16, 5000):
        config = SynthIDTextWatermarkingConfig(3, list(range(7)), sampling_table_size=size)
        for is_weighted in (True, False):
            scorer = SynthIDScorer(config.construct_processor(VOCAB, "cpu"), is_weighted=is_weighted)
            values = scorer.value(torch.randint(0, VOCAB, (20000, 2)), torch.randint(0, VOCAB, (20000,)))
            assert abs(values.mean() - scorer.mean) < 4 * scorer.deviation / math.sqrt(20000)
            assert abs(values.std() / scorer.deviation - 1) < 0.05


# --- what can't be ------------------------------------------------------------------------------------------


def test_bad_input_is_refused() -> None:
    detector = WatermarkDetector(MODEL, "cpu", WatermarkingConfig(context_width=4))
    with pytest.raises(InputError, match="a text of 4 tokens has none to score"):
        detector(torch.full((1, 4), 5))
    with pytest.raises(InputError, match="outside the vocabulary of 211"):
        detector(torch.full((1, 9), 500))
    with pytest.raises(InputError, match="shape"):
        detector(torch.zeros(9, dtype=torch.int64))
    with pytest.raises(SettingError, match="max_cache_size"):
        WatermarkDetector(MODEL, "cpu", WatermarkingConfig(), max_cache_size=-1)
    with pytest.raises(SettingError, match="no `vocab_size`"):
        WatermarkDetector({}, "cpu", WatermarkingConfig())
    with pytest.raises(SettingError, match="not str"):
        WatermarkDetector(MODEL, "cpu", "green")


def test_differences_are_told_without_keys() -> None:
    saved, given = WatermarkingConfig(hashing_key=123456), WatermarkingConfig(hashing_key=654321, bias=3.0)
    told = find_differences(saved.to_dict(), given.to_dict())
    assert told == ["`bias` is 2.0 there and 3.0 here", "`hashing_key` is another one"]
    assert find_differences(saved.to_dict(), saved.to_dict()) == []


def test_the_cache_of_ngrams_is_bounded() -> None:
    scorer: Any = make_scorer(WatermarkingConfig(), VOCAB, most_cached=10)
    for seed in range(3):
        scorer.read(write(None, 1, 30, seed)[0].tolist())
        assert len(scorer._cache) <= 10

"""Losses of texts that are read whole, in pieces, or several at once."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

import unspool
from tests.compression.cases import GOLDENS
from tests.conformance.cases import load_model
from unspool.compression.losses import TextLosses, measure_texts
from unspool.errors import UnsupportedError

FAMILIES = ("llama", "gpt2", "mistral", "mamba")


def make_texts(vocab_size: int, lengths: list[int]) -> list[list[int]]:
    chance = random.Random(3)
    return [[chance.randrange(3, vocab_size) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("family", FAMILIES)
def test_losses_are_those_of_the_logits(family: str) -> None:
    model = load_model(family).model
    texts = make_texts(model.info.vocab_size, [40, 7, 1, 33, 39])
    for text, losses in zip(texts, measure_texts(model, texts), strict=True):
        logits = torch.log_softmax(model(torch.tensor([text])).logits[0].float(), -1)
        expected = [-float(logits[place, token]) for place, token in enumerate(text[1:])]
        np.testing.assert_allclose(losses, expected, atol=2e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_pieces_have_the_losses_of_the_whole(family: str) -> None:
    """Also of caches that can't be taken back, and after going back."""
    model = load_model(family).model
    (text,) = make_texts(model.info.vocab_size, [50])
    (whole,) = measure_texts(model, [text])
    reader = TextLosses(model)
    np.testing.assert_allclose(reader.read(text[:20], keeps=12), whole[:19], atol=2e-4)
    assert reader.num_held == 12
    np.testing.assert_allclose(reader.read(text[12:30], keeps=12), whole[12:29], atol=2e-4)
    np.testing.assert_allclose(reader.read(text[12:], keeps=40), whole[12:], atol=2e-4)
    np.testing.assert_allclose(reader.read(text[40:], keeps=0), whole[40:], atol=2e-4)
    assert reader.num_held == 0
    np.testing.assert_allclose(reader.read(text[:9], keeps=9), whole[:8], atol=2e-4)


def test_keys_are_let_go_in_the_middle() -> None:
    """What is left stays as it was made: later tokens see it at the places where it was written."""
    model = load_model("llama").model
    (text,) = make_texts(model.info.vocab_size, [30])
    reader = TextLosses(model)
    reader.read(text[:20], keeps=20)
    reader.forget(4, 6)
    assert reader.num_held == 14
    cache = model.new_cache(rows=1)
    model.forward(torch.tensor([text[:20]]), cache)
    keys = [model_layer[:, :, [*range(4), *range(10, 20)]] for model_layer in cache.key_cache]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(reader._cache.key_cache, keys, strict=True))
    assert len(reader.read(text[20:], keeps=14)) == 9


def test_models_without_losses_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="encoder-decoder"):
        measure_texts(load_model("t5").model, [[1, 2]])


@pytest.mark.parametrize("name", ["tiny-bert-base-multilingual-cased", "tiny-xlm-roberta-large"])
def test_classifiers_read_texts_of_different_lengths_alike(name: str) -> None:
    from transformers import AutoModelForTokenClassification

    from unspool.loading.token_classifier import load_classifier, open_classifier

    folder = GOLDENS / "models" / name
    source = open_classifier(folder)
    assert source is not None
    model, _ = load_classifier(source, "cpu")
    theirs = AutoModelForTokenClassification.from_pretrained(folder).eval()
    rows = make_texts(1300, [60, 3, 41])
    rows[0][5] = 1  # XLM-R's padding has no position
    seen = [[place != 7 for place in range(len(row))] for row in rows]
    for given in (None, seen):
        for place, found in enumerate(model.classify(rows, given)):
            mask = torch.tensor([[1] * len(rows[place]) if given is None else [int(flag) for flag in given[place]]])
            with torch.no_grad():
                expected = theirs(input_ids=torch.tensor([rows[place]]), attention_mask=mask).logits[0].softmax(-1)
            torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


def test_a_classifier_refuses_what_it_can_not_read() -> None:
    from unspool.loading.token_classifier import load_classifier, open_classifier

    source = open_classifier(GOLDENS / "models" / "tiny-bert-base-multilingual-cased")
    assert source is not None
    model, _ = load_classifier(source, "cpu")
    for rows in ([], [[]], [[1] * 513], [[10**6]]):
        with pytest.raises(unspool.InputError):
            model.classify(rows)
    assert open_classifier(GOLDENS / "models" / "llama") is None

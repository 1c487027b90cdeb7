"""Whisper's model against transformers: features in, logits out; and what it refuses to hear."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import unspool
from unspool.errors import InputError
from unspool.protocols import Want


@pytest.fixture(scope="module")
def pair(golden_pair: Callable[[str], Any]) -> Any:
    return golden_pair("whisper")


def make_features(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, 16, 60, generator=torch.Generator().manual_seed(seed))


TARGET = torch.randint(4, 160, (2, 7), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def test_everything_it_returns_equals_the_reference(pair: Any) -> None:
    features, wanted = make_features(2), {"output_hidden_states": True, "output_attentions": True}
    ours = pair.native(input_features=features, decoder_input_ids=TARGET, **wanted)
    theirs = pair.reference(input_features=features, decoder_input_ids=TARGET, **wanted)
    torch.testing.assert_close(ours.logits, theirs.logits, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(ours.encoder_last_hidden_state, theirs.encoder_last_hidden_state, atol=1e-4, rtol=1e-4)
    for name in ("decoder_hidden_states", "decoder_attentions", "cross_attentions", "encoder_attentions"):
        for mine, other in zip(ours[name], theirs[name], strict=True):
            torch.testing.assert_close(mine, other, atol=2e-3, rtol=1e-3)  # states reach 100


def test_says_what_it_hears(pair: Any) -> None:
    info = pair.native.info
    assert (info.features, info.longest_source, info.max_context) == ((16, 60), 30, 60)


@pytest.mark.parametrize("kind", ["dynamic", "static", "paged", "quantized"])
def test_steps_are_one_pass(pair: Any, kind: str) -> None:
    native = pair.native
    encoded = native.encode(None, features=make_features(2))
    whole = native.forward(TARGET, native.new_cache("dynamic", 2, encoded=encoded), want=Want("all")).logits
    cache = native.new_cache(kind, 2, 16, encoded=encoded)
    steps = torch.stack([native.forward(TARGET[:, i : i + 1], cache).logits for i in range(7)], 1)
    torch.testing.assert_close(steps, whole, atol=1e-3, rtol=1e-3)


def test_generating_is_the_same_from_features_and_from_states(pair: Any) -> None:
    features = make_features(2)
    given = unspool.generate(pair.native, decoder_start_token_id=3, input_features=features, max_new_tokens=6)
    states = pair.native.encode(None, features=features).states
    assert torch.equal(
        unspool.generate(pair.native, decoder_start_token_id=3, encoder_outputs=(states,), max_new_tokens=6), given
    )
    mask = torch.ones(2, 60, dtype=torch.int64)
    mask[1, 40:] = 0  # silence is heard all the same
    masked = unspool.generate(
        pair.native, decoder_start_token_id=3, input_features=features, attention_mask=mask, max_new_tokens=6
    )
    assert torch.equal(masked, given)


def test_a_draft_model_hears_too(pair: Any) -> None:
    features = make_features(1)
    plain = unspool.generate(pair.native, decoder_start_token_id=3, input_features=features, max_new_tokens=8)
    drafted = unspool.generate(
        pair.native,
        decoder_start_token_id=3,
        input_features=features,
        max_new_tokens=8,
        assistant_model=copy.copy(pair.native),
    )
    assert torch.equal(plain, drafted)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"input_ids": torch.tensor([[5, 6]])}, "hears: pass input_features"),
        ({}, "hears: pass input_features"),
        ({"input_features": torch.zeros(1, 16, 59)}, r"\(rows, 16, 60\).*pad the audio"),
        ({"input_features": torch.zeros(1, 80, 60)}, r"\(rows, 16, 60\)"),
        ({"input_features": torch.zeros(0, 16, 60)}, r"\(rows, 16, 60\)"),
        ({"input_features": torch.zeros(16, 60)}, r"floating-point tensor of the shape \(rows, mels, frames\)"),
        ({"input_features": torch.zeros(1, 16, 60, dtype=torch.int64)}, "floating-point"),
        ({"input_features": torch.full((1, 16, 60), torch.nan)}, "NaN"),
        ({"input_features": torch.zeros(1, 16, 60), "attention_mask": torch.ones(1, 30)}, "attention_mask"),
    ],
)
def test_what_it_does_not_hear(pair: Any, given: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        unspool.generate(pair.native, decoder_start_token_id=3, **given, max_new_tokens=2)


def test_a_model_that_reads_does_not_hear(golden_pair: Callable[[str], Any]) -> None:
    with pytest.raises(InputError, match="reads text; pass input_ids"):
        unspool.generate(golden_pair("bart").native, input_features=torch.zeros(1, 16, 60), max_new_tokens=2)
    with pytest.raises(InputError, match="has no encoder"):
        unspool.generate(golden_pair("llama").native, input_features=torch.zeros(1, 16, 60), max_new_tokens=2)

"""Whisper's model against transformers: features in, logits out; and what it refuses to hear."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import unspool
from unspool.protocols import FeatureShape, Want


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
    assert (info.features, info.longest_source, info.max_context) == (FeatureShape(16, 60, 2), 30, 60)


@pytest.mark.parametrize("kind", ["dynamic", "static", "paged", "quantized"])
def test_steps_are_one_pass(pair: Any, kind: str) -> None:
    native = pair.native
    encoded = native.encode(None, embeds=make_features(2))
    whole = native.forward(TARGET, native.new_cache("dynamic", 2, encoded=encoded), want=Want("all")).logits
    cache = native.new_cache(kind, 2, 16, encoded=encoded)
    steps = torch.stack([native.forward(TARGET[:, i : i + 1], cache).logits for i in range(7)], 1)
    torch.testing.assert_close(steps, whole, atol=1e-3, rtol=1e-3)


def test_generating_is_the_same_from_features_and_from_states(pair: Any) -> None:
    features = make_features(2)
    given = unspool.generate(pair.native, decoder_start_token_id=3, input_features=features, max_new_tokens=6)
    states = pair.native.encode(None, embeds=features).states
    assert torch.equal(
        unspool.generate(pair.native, decoder_start_token_id=3, encoder_outputs=(states,), max_new_tokens=6), given
    )

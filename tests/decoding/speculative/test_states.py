"""Hidden states and attentions of drafted rows are those of plain decoding, position by position."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import unspool
from tests.decoding.speculative.drafting_fakes import Layered, make_drafters
from tests.fakes import FakeEncoderDecoder, pad_left
from tests.grammar.tiny import load_tiny
from tests.models.adapters.live_models import make as make_theirs

ROWS = [[1, 2, 3, 1, 2], [4], [5, 6, 5], [7, 1, 7, 1, 7, 1, 7, 1]]
NAMES = ("hidden_states", "attentions", "cross_attentions", "decoder_hidden_states", "decoder_attentions")


def check(model: Any, call: dict[str, Any], drafter: dict[str, Any]) -> None:
    """What plain decoding returns of rows that go on is returned with drafts too, and zeros behind their end."""
    told = {"return_dict_in_generate": True, "output_hidden_states": True, "output_attentions": True, **call}
    plain, drafted = unspool.generate(model, **told), unspool.generate(model, **told, **drafter)
    assert drafted.speculation is not None and any(drafted.speculation.accepted)
    assert drafted.sequences.tolist() == plain.sequences.tolist()
    num_new = [row.count(0) for row in plain.sequences[:, -call["max_new_tokens"] :].tolist()]
    ends = [call["max_new_tokens"] - pads for pads in num_new]  # no row writes the padding token itself
    for name in NAMES:
        expected, found = getattr(plain, name, None), getattr(drafted, name, None)
        assert (expected is None) == (found is None), name
        for step, (ours, theirs) in enumerate(zip(found or (), expected or (), strict=True)):
            for one, other in zip(ours, theirs, strict=True):
                assert one.shape == other.shape, (name, step)
                for row, end in enumerate(ends):
                    wanted = other[row] if step < end else torch.zeros_like(other[row])
                    torch.testing.assert_close(one[row], wanted, atol=1e-4, rtol=1e-4)


DRAWN = {"num_return_sequences": 2, "do_sample": True, "seed": 3, "temperature": 0.5}


@pytest.mark.parametrize(
    ("drafter", "more"),
    [("lookup", {}), ("model", {}), ("early exit", {"eos_token_id": [3, 8]}), ("lookup", DRAWN)],
    ids=["lookup", "model", "ends", "drawn"],
)
def test_of_decoders(drafter: str, more: dict[str, Any]) -> None:
    target = Layered(9, amount=0.3)
    call = {**pad_left(ROWS), "max_new_tokens": 12, "pad_token_id": 0, "suppress_tokens": [0], **more}
    check(target, call, make_drafters(target, amount=0.3)[drafter])


def test_of_pairs() -> None:
    target = FakeEncoderDecoder(9)
    told = {"decoder_start_token_id": 1, "max_new_tokens": 12, "pad_token_id": 0, "suppress_tokens": [0]}
    call = {"input_ids": torch.tensor(ROWS[:1] * 3), "encoder_no_repeat_ngram_size": 3, **told}
    call["input_ids"][1, 2] = 6
    check(target, call, {"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 1})


@pytest.mark.parametrize("native", [True, False])
def test_of_a_model(native: bool) -> None:
    model = load_tiny("llama").model if native else unspool.attach(make_theirs("gpt2"), native=False)
    ids = pad_left([[5, 6, 7, 8, 5, 6], [9, 9, 9], [4, 5, 4, 5, 4, 5, 4]])
    told = {"max_new_tokens": 10, "pad_token_id": 0, "eos_token_id": None, "repetition_penalty": 0.2}
    check(model, {**ids, **told, "suppress_tokens": [0]}, {"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 1})

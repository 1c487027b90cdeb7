"""What an object that runs natively returns as its cache is what transformers' own forward would have written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.fuzz.beside.families import DECODERS, PAIRS, STATES
from tests.fuzz.beside.models import make, make_again

import unspool

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers
IDS = torch.tensor([[5, 6, 7, 8, 9], [0, 0, 12, 13, 14]])
MASK = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
ASKED = {"attention_mask": MASK, "max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True}
ENDLESS = {"eos_token_id": None, "pad_token_id": 0}


@pytest.mark.parametrize("name", sorted({*DECODERS, *PAIRS} - {*STATES, "openai_gpt"}))
def test_keys_are_those_of_the_objects_own_forward(name: str) -> None:
    """Of what both hold: a window's layers forget in transformers, and sources stand right-filled in ours."""
    mask = MASK.flip(1) if name in PAIRS else MASK
    asked: dict[str, Any] = {**ASKED, **ENDLESS, "attention_mask": mask}
    ids = IDS.flip(1) if name in PAIRS else IDS
    theirs = make(name, 0, "eager").generate(ids, **asked)
    ours = unspool.generate(make_again(name, 0, "eager"), ids, **asked)
    assert torch.equal(theirs.sequences, ours.sequences)
    expected, found = theirs.past_key_values, ours.past_key_values
    assert isinstance(found, type(expected)) and found.get_seq_length() == expected.get_seq_length()
    if name in PAIRS:
        expected, found = expected.self_attention_cache, found.self_attention_cache
    for one, other in zip(expected.layers, found.layers, strict=True):
        for mine, its in ((one.keys, other.keys), (one.values, other.values)):
            assert mine.shape[:2] == its.shape[:2] and mine.shape[3] == its.shape[3]
            held = min(mine.shape[2], its.shape[2])
            assert torch.allclose(mine[0, :, -held:], its[0, :, -held:], atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("drafts", [{}, {"prompt_lookup_num_tokens": 3}], ids=["", "drafts"])
@pytest.mark.parametrize("name", ["llama", "bloom", "gemma2", "falcon", "opt", "exaone4", "doge"])
def test_rows_that_ended_hold_their_padding(name: str, drafts: dict[str, Any]) -> None:
    """A caller may go on with a mask of ones over it, as transformers' own cache lets them."""
    first = make(name, 0, "eager").generate(IDS, **{**ASKED, **ENDLESS, "max_new_tokens": 1}).sequences[1, -1]
    asked: dict[str, Any] = {**ASKED, "eos_token_id": int(first), "pad_token_id": 0}  # the second row ends at once
    outputs = [
        make(name, 0, "eager").generate(IDS, **asked),
        unspool.generate(make_again(name, 0, "eager"), IDS, **asked, **drafts),
    ]
    assert outputs[0].sequences[1, -1] == 0
    texts = [torch.cat((output.sequences, torch.tensor([[21, 22], [23, 24]])), dim=1) for output in outputs]
    mask = torch.cat((MASK, torch.ones(2, texts[0].shape[1] - MASK.shape[1], dtype=torch.long)), dim=1)
    again = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False, **ENDLESS}
    theirs = make(name, 0, "eager").generate(texts[0], past_key_values=outputs[0].past_key_values, **again)
    ours = unspool.generate(make_again(name, 0, "eager"), texts[1], past_key_values=outputs[1].past_key_values, **again)
    assert torch.equal(theirs, ours)

"""The cache that a beam search leaves: its rows are the last beams, so it is not taken for the sequences' own."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from tests.conformance.cases import load_model
from tests.models.adapters.tiny import make_once

import unspool
from unspool.errors import SettingError

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
NEW: dict[str, Any] = {"max_new_tokens": 5, "eos_token_id": None}
IDS = torch.tensor([[5, 6, 7, 8], [9, 8, 7, 6]])
METHODS: dict[str, dict[str, Any]] = {
    "ended": {"max_new_tokens": 5, "eos_token_id": list(range(10, 97)), "min_new_tokens": 2},
    "drawn": {**NEW, "do_sample": True, "seed": 1},
    "groups": {**NEW, "num_beam_groups": 3, "diversity_penalty": 1.0},
}
MODELS = ["llama", "bloom", "mamba", "t5", "object", "object of a pair"]


@cache
def find_model(name: str) -> Any:
    objects = {"object": "llama", "object of a pair": "t5"}
    return make_once(objects[name]) if name in objects else load_model(name).model


def search(name: str, num_returned: int, settings: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The output of a beam search, and the inputs of a call that goes on behind what it returned."""
    beams = {"num_beams": 3, "num_return_sequences": num_returned, "return_dict_in_generate": True}
    output = unspool.generate(find_model(name), IDS, **settings, **beams)
    longer = torch.cat((output.sequences, torch.full((len(output.sequences), 2), 7)), dim=1)
    if name not in ("t5", "object of a pair"):
        return output, {"input_ids": longer, "attention_mask": torch.ones_like(longer)}
    source = IDS.repeat_interleave(num_returned, dim=0)
    return output, {"input_ids": source, "decoder_input_ids": longer}


@pytest.mark.parametrize("num_returned", [1, 3])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", MODELS)
def test_other_rows_than_the_sequences_are_refused(name: str, method: str, num_returned: int) -> None:
    output, longer = search(name, num_returned, METHODS[method])
    with pytest.raises(SettingError, match="what a beam search left" if num_returned == 3 else "left|hold 6 rows"):
        unspool.generate(find_model(name), **longer, **NEW, past_key_values=output.past_key_values)


@pytest.mark.parametrize("name", MODELS)
def test_beams_that_were_cut_at_their_length_go_on(name: str) -> None:
    output, longer = search(name, 3, NEW)
    found = unspool.generate(find_model(name), **longer, **NEW, past_key_values=output.past_key_values)
    assert torch.equal(found, unspool.generate(find_model(name), **longer, **NEW))


@pytest.mark.parametrize("name", ["llama", "bloom", "object"])
def test_the_prompts_that_all_beams_began_with_go_on(name: str) -> None:
    output, _ = search(name, 1, METHODS["drawn"])
    held = output.past_key_values
    held.crop(IDS.shape[1] - held.get_seq_length())
    longer = torch.cat((IDS.repeat_interleave(3, dim=0), torch.full((6, 2), 7)), dim=1)
    found = unspool.generate(find_model(name), longer, **NEW, past_key_values=held)
    assert torch.equal(found, unspool.generate(find_model(name), longer, **NEW))


@pytest.mark.parametrize("name", ["llama", "t5", "object", "object of a pair"])
def test_a_cache_of_other_rows_is_refused_before_the_first_pass(name: str) -> None:
    output = unspool.generate(find_model(name), IDS, **NEW, return_dict_in_generate=True)
    named = "decoder_input_ids" if name in ("t5", "object of a pair") else "input_ids"
    given = {"input_ids": IDS[:1], named: output.sequences[:1]}
    with pytest.raises(SettingError, match="hold 2 rows and the prompt has 1"):
        unspool.generate(find_model(name), **given, **NEW, past_key_values=output.past_key_values)

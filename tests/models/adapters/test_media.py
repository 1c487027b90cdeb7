"""Pictures of several rows and several a row: however rows are repeated, each reads its own."""

from __future__ import annotations

from functools import wraps
from typing import Any

import pytest
import torch
from tests.models.adapters.unlike import IMAGE, make_unlike

import unspool

WAYS: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "sequences": {"do_sample": True, "num_return_sequences": 3, "top_k": 1},
}
NEW = {"max_new_tokens": 6, "eos_token_id": None, "return_dict_in_generate": True}


def make_inputs(name: str) -> dict[str, torch.Tensor]:
    """Two rows; the first has two pictures and the second one."""
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(3, 50, (2, 14), generator=generator)
    start, end = (57, 58) if name == "qwen2_vl" else (11, 12)
    for row, first in ((0, 1), (0, 7), (1, 7)):
        ids[row, first], ids[row, first + 1 : first + 5], ids[row, first + 5] = start, IMAGE, end
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    given = {"input_ids": ids, "attention_mask": mask}
    if name == "llava":
        return {**given, "pixel_values": torch.randn(3, 3, 8, 8, generator=generator)}
    patches = torch.randn(12, 48, generator=generator)  # of all pictures, one after the other
    sizes = torch.tensor([[1, 2, 2]] * 3)
    return {**given, "pixel_values": patches, "image_grid_thw": sizes, "mm_token_type_ids": (ids == IMAGE).long()}


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["llava", "qwen2_vl"])
def test_repeated_rows_read_their_own_pictures(name: str, way: str, use_cache: bool) -> None:
    """Without a cache every step reads the pictures of all rows."""
    model, inputs = make_unlike(name), make_inputs(name)
    told = {**NEW, **WAYS[way], "use_cache": use_cache, "output_hidden_states": True}
    theirs, ours = model.generate(**inputs, **told), unspool.generate(model, **inputs, **told)
    assert torch.equal(ours.sequences, theirs.sequences)
    seen = inputs["attention_mask"].bool().repeat_interleave(3, dim=0)
    for found, expected in zip(ours.hidden_states[0], theirs.hidden_states[0], strict=True):
        torch.testing.assert_close(found[seen], expected[seen], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["llava", "qwen2_vl"])
def test_pictures_stand_among_embeddings_as_among_tokens(name: str, way: str) -> None:
    model, inputs = make_unlike(name), make_inputs(name)
    told = {**NEW, **WAYS[way], "output_scores": True}
    expected = unspool.generate(model, **inputs, **told)
    embeds = model.get_input_embeddings()(inputs.pop("input_ids"))
    found = unspool.generate(model, inputs_embeds=embeds, **inputs, **told)
    theirs = model.generate(inputs_embeds=embeds, **inputs, **told)
    assert torch.equal(found.sequences, theirs.sequences)
    if name == "llava":  # the other's positions are others without tokens, there as here
        assert torch.equal(found.sequences, expected.sequences[:, -6:])


@pytest.mark.parametrize("name", ["llava", "qwen2_vl"])
def test_pictures_are_encoded_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = make_unlike(name), make_inputs(name)
    own, calls = model.model.get_image_features, []

    @wraps(own)  # transformers looks at its parameters
    def count(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return own(*args, **kwargs)

    monkeypatch.setattr(model.model, "get_image_features", count)
    unspool.generate(model, **inputs, **NEW, **WAYS["beams"], use_cache=False)
    assert len(calls) == 1

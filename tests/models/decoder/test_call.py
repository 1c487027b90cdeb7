"""Calling a model as the reference is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from unspool.cache import DynamicCache, StaticCache
from unspool.errors import InputError, UnsupportedError

TOKENS = torch.randint(3, 97, (2, 10), generator=torch.Generator().manual_seed(0))
PADDED = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1, 1], [1] * 10])


@pytest.fixture
def pair(pair_of: Callable[[str], Any]) -> Any:
    return pair_of("mistral")  # its window makes a slip with positions visible


def gap(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    assert ours.shape == theirs.shape
    return float((ours - theirs).abs().max())


def test_the_answer_can_be_read_in_three_ways(pair: Any) -> None:
    output = pair.native(TOKENS)
    assert output.logits is output["logits"] is output[0]
    assert output.past_key_values.get_seq_length() == 10
    assert set(output) == {"logits", "past_key_values"}
    as_tuple = pair.native(TOKENS, return_dict=False)
    assert isinstance(as_tuple, tuple) and torch.equal(as_tuple[0], output.logits)
    assert pair.native(TOKENS, use_cache=False).past_key_values is None


def test_with_a_cache_the_mask_covers_past_and_new(pair: Any) -> None:
    whole = pair.native(TOKENS, PADDED).logits
    first = pair.native(TOKENS[:, :6], PADDED[:, :6])
    assert first.past_key_values.lengths == [3, 6]
    cache = first.past_key_values
    parts = [first.logits]
    parts.append(pair.native(TOKENS[:, 6:9], PADDED[:, :9], past_key_values=cache).logits)
    parts.append(pair.native(TOKENS[:, 9:], past_key_values=cache).logits)  # all new tokens are real
    is_real = PADDED.bool()
    assert gap(torch.cat(parts, 1)[is_real], whole[is_real]) < 1e-4
    assert cache.lengths == [7, 10]


@torch.no_grad()
def test_a_cache_of_the_callers(pair: Any) -> None:
    whole = pair.native(TOKENS).logits
    for cache in (DynamicCache(), StaticCache(pair.native.config, 2, 12)):
        first = pair.native(TOKENS[:, :4], past_key_values=cache, use_cache=True)
        assert first.past_key_values is cache
        rest = pair.native(TOKENS[:, 4:], past_key_values=cache, position_ids=torch.arange(4, 10)[None])
        assert gap(torch.cat((first.logits, rest.logits), 1), whole) < 1e-4


@torch.no_grad()
def test_right_padding_and_empty_rows_are_read_too(pair: Any) -> None:
    mask = torch.ones(2, 10, dtype=torch.bool)
    mask[0, 6:] = False
    output = pair.native(TOKENS, mask)
    assert gap(output.logits[0, :6], pair.native(TOKENS[:1, :6]).logits[0]) < 1e-5
    assert not output.logits[0, 6:].any()
    mask[1] = False
    assert pair.native(TOKENS, mask).past_key_values.lengths == [6, 0]


def test_only_the_logits_asked_for(pair: Any) -> None:
    whole = pair.native(TOKENS, PADDED).logits
    assert torch.equal(pair.native(TOKENS, PADDED, logits_to_keep=0).logits, whole)
    assert gap(pair.native(TOKENS, PADDED, logits_to_keep=3).logits, whole[:, -3:]) < 1e-5
    assert gap(pair.native(TOKENS, PADDED, logits_to_keep=torch.tensor([4, 7])).logits, whole[:, [4, 7]]) < 1e-5


@torch.no_grad()
def test_hidden_states_and_attentions_lie_in_the_callers_columns(pair: Any) -> None:
    wanted = {"output_hidden_states": True, "output_attentions": True}
    positions = (PADDED.cumsum(1) - 1).clamp(min=0)
    ours = pair.native(TOKENS, PADDED, **wanted)
    theirs = pair.reference(TOKENS, attention_mask=PADDED, position_ids=positions, **wanted)
    is_real = PADDED.bool()
    for mine, other in zip(ours.hidden_states, theirs.hidden_states, strict=True):
        assert gap(mine[is_real], other[is_real]) < 1e-4
    for mine, other in zip(ours.attentions, theirs.attentions, strict=True):
        by_query = is_real[:, None, :, None].expand_as(mine)
        assert gap(mine[by_query], other[by_query]) < 1e-4
        assert not mine[~by_query].any()
    step = pair.native(TOKENS[:, :1], past_key_values=ours.past_key_values, **wanted)
    assert step.attentions[0].shape == (2, 4, 1, 11)


def test_the_head_and_the_embeddings_can_be_had(pair: Any) -> None:
    output = pair.native(TOKENS, output_hidden_states=True)
    head = pair.native.get_output_embeddings()
    assert gap(head(output.hidden_states[-1]), output.logits) < 1e-5
    assert torch.equal(pair.native.get_input_embeddings().weight, pair.weights["model.embed_tokens.weight"])
    assert pair.native.eval() is pair.native


@pytest.mark.parametrize(
    ("inputs", "error", "words"),
    [
        ({}, InputError, "one of them"),
        ({"input_ids": TOKENS, "inputs_embeds": torch.zeros(2, 3, 32)}, InputError, "one of them"),
        ({"input_ids": TOKENS[:, :0]}, InputError, "shape"),
        ({"input_ids": TOKENS.float()}, InputError, "whole numbers"),
        ({"input_ids": TOKENS + 90}, InputError, "vocabulary has 97"),
        ({"input_ids": -TOKENS}, InputError, "vocabulary has 97"),
        ({"inputs_embeds": torch.zeros(2, 3, 31)}, InputError, "32"),
        ({"input_ids": TOKENS, "attention_mask": PADDED[:, :9]}, InputError, "9 columns"),
        ({"input_ids": TOKENS[:, :4], "attention_mask": PADDED}, InputError, "10 columns"),
        ({"input_ids": TOKENS, "attention_mask": PADDED[:1]}, UnsupportedError, "2 rows"),
        ({"input_ids": TOKENS, "attention_mask": torch.ones(2, 1, 10, 10)}, UnsupportedError, "shape"),
        ({"input_ids": TOKENS, "position_ids": torch.arange(1, 11)[None]}, UnsupportedError, "position_ids"),
    ],
)
def test_what_it_refuses(pair: Any, inputs: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        pair.native(**inputs)


def test_a_mask_with_a_hole_is_refused(pair: Any) -> None:
    mask = torch.ones(2, 10, dtype=torch.int64)
    mask[1, 4] = 0
    with pytest.raises(InputError, match=r"row 1.*hole"):
        pair.native(TOKENS, mask)
    cache = pair.native(TOKENS[:, :5]).past_key_values
    with pytest.raises(InputError, match="cache holds 5"):
        pair.native(TOKENS[:, 5:], mask, past_key_values=cache)
    gapped = torch.ones(2, 10, dtype=torch.int64)
    gapped[0, 5] = 0
    with pytest.raises(InputError, match="hole"):
        pair.native(TOKENS[:, 5:], gapped, past_key_values=cache)


def test_learned_positions_end(pair_of: Callable[[str], Any]) -> None:
    model = pair_of("opt").native
    long = torch.randint(3, 97, (2, 64), generator=torch.Generator().manual_seed(0))
    cache = model.new_cache(rows=2)
    model.forward(long, cache, counts=[60, 64])
    with pytest.raises(InputError, match="64"):
        model.forward(long[:, :1], cache)


def test_caches_it_does_not_have(pair: Any) -> None:
    with pytest.raises(UnsupportedError, match="quantised"):
        pair.native.new_cache("quantised")
    with pytest.raises(UnsupportedError, match="no encoder"):
        pair.native.encode(TOKENS)

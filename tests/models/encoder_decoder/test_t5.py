"""T5 against transformers: both feed-forwards, both heads, ragged sources and ragged decoding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from unspool.cache import DynamicCache, EncoderDecoderCache
from unspool.errors import InputError, UnsupportedError
from unspool.models.registry import build_model
from unspool.models.weights import MemorySource
from unspool.protocols import Want

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "d_model": 32,
    "d_kv": 12,
    "d_ff": 40,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 16,
    "decoder_start_token_id": 0,
    "eos_token_id": 2,
    "initializer_factor": 1.0,
}
KINDS = {
    "first": {"feed_forward_proj": "relu"},
    "gated": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "silu": {"feed_forward_proj": "gated-silu"},
}


@pytest.fixture(params=list(KINDS))
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, pair_cache: dict[str, Any], load_pair: Any
) -> Any:
    if request.param not in pair_cache:

        def make() -> Any:
            config = transformers.T5Config(**SIZES, **KINDS[request.param])
            return transformers.T5ForConditionalGeneration._from_config(config, attn_implementation="eager")

        pair_cache[request.param] = load_pair(make, tmp_path_factory.mktemp("t5"))
    return pair_cache[request.param]


@pytest.fixture(scope="module")
def pair_cache() -> dict[str, Any]:
    return {}


def make_tokens(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 97, (rows, length), generator=torch.Generator().manual_seed(seed))


def gap(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    assert ours.shape == theirs.shape
    return float((ours - theirs).abs().max())


@torch.no_grad()
def test_everything_it_returns_equals_the_reference(pair: Any) -> None:
    source, target = make_tokens(2, 21), make_tokens(2, 19, seed=1)
    wanted = {"output_hidden_states": True, "output_attentions": True}
    ours = pair.native(source, decoder_input_ids=target, **wanted)
    theirs = pair.reference(source, decoder_input_ids=target, **wanted)
    assert gap(ours.logits, theirs.logits) < 1e-4
    assert gap(ours.encoder_last_hidden_state, theirs.encoder_last_hidden_state) < 1e-4
    for name in (
        "decoder_hidden_states",
        "decoder_attentions",
        "cross_attentions",
        "encoder_hidden_states",
        "encoder_attentions",
    ):
        for mine, other in zip(ours[name], theirs[name], strict=True):
            assert gap(mine, other) < 1e-4, name


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_sources_equal_the_reference(pair: Any, side: str) -> None:
    source, target = make_tokens(3, 12), make_tokens(3, 5, seed=1)
    mask = torch.ones(3, 12, dtype=torch.int64)
    mask[1, 7:] = 0
    mask[2, 3:] = 0
    mask = mask.flip(1) if side == "left" else mask
    ours = pair.native(source, mask, target, output_hidden_states=True)
    theirs = pair.reference(source, attention_mask=mask, decoder_input_ids=target)
    assert gap(ours.logits, theirs.logits) < 1e-4
    is_real = mask.bool()
    assert gap(ours.encoder_last_hidden_state[is_real], theirs.encoder_last_hidden_state[is_real]) < 1e-4
    assert not ours.encoder_last_hidden_state[~is_real].any()


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_decoding_step_by_step_equals_one_pass(pair: Any, kind: str) -> None:
    source, target = make_tokens(2, 9), make_tokens(2, 20, seed=1)
    encoded = pair.native.encode(source, [9, 4])
    whole = pair.native.forward(target, pair.native.new_cache("dynamic", 2, encoded=encoded), want=Want("all")).logits
    cache = pair.native.new_cache(kind, rows=2, capacity=24, encoded=encoded)
    assert cache.source_lengths == [9, 4]
    steps = torch.stack([pair.native.forward(target[:, i : i + 1], cache).logits for i in range(20)], 1)
    assert gap(steps, whole) < 1e-4


def test_row_alone_equals_row_in_a_ragged_batch(pair: Any) -> None:
    source, target, following = make_tokens(3, 9), make_tokens(3, 7, seed=1), make_tokens(3, 3, seed=2)
    lengths, counts = [9, 4, 6], [2, 7, 5]
    batch = pair.native.new_cache("dynamic", 3, encoded=pair.native.encode(source, lengths))
    first = pair.native.forward(target, batch, counts=counts).logits
    later = [pair.native.forward(following[:, i : i + 1], batch).logits for i in range(3)]
    for row in range(3):
        mine = slice(row, row + 1)
        encoded = pair.native.encode(source[mine, : lengths[row]])
        alone = pair.native.new_cache("dynamic", 1, encoded=encoded)
        assert gap(pair.native.forward(target[mine, : counts[row]], alone).logits, first[mine]) < 1e-4
        for i in range(3):
            assert gap(pair.native.forward(following[mine, i : i + 1], alone).logits, later[i][mine]) < 1e-4


def test_rows_can_be_repeated_and_reordered(pair: Any) -> None:
    source, target = make_tokens(2, 8), make_tokens(2, 4, seed=1)
    cache = pair.native.new_cache("dynamic", 2, encoded=pair.native.encode(source, [5, 8]))
    pair.native.forward(target[:, :3], cache)
    cache.select_rows([1, 1, 0])
    chosen = pair.native.forward(target[[1, 1, 0], 3:], cache).logits
    plain = pair.native.new_cache("dynamic", 2, encoded=pair.native.encode(source, [5, 8]))
    expected = pair.native.forward(target, plain).logits
    assert gap(chosen, expected[[1, 1, 0]]) < 1e-4


@torch.no_grad()
def test_called_with_a_cache_and_with_encoder_outputs(pair: Any) -> None:
    source, target = make_tokens(2, 8), make_tokens(2, 6, seed=1)
    whole = pair.native(source, decoder_input_ids=target)
    first = pair.native(source, decoder_input_ids=target[:, :4])
    rest = pair.native(decoder_input_ids=target[:, 4:], past_key_values=first.past_key_values)
    assert gap(rest.logits, whole.logits[:, 4:]) < 1e-4
    given = pair.native(
        encoder_outputs=(whole.encoder_last_hidden_state,),
        decoder_input_ids=target,
        past_key_values=EncoderDecoderCache(DynamicCache(), DynamicCache()),
    )
    assert gap(given.logits, whole.logits) < 1e-4
    assert given[0] is given.logits and given["logits"] is given.logits
    assert isinstance(pair.native(source, decoder_input_ids=target, return_dict=False), tuple)


@torch.no_grad()
def test_embeddings_in_place_of_tokens(pair: Any) -> None:
    source, target = make_tokens(2, 8), make_tokens(2, 6, seed=1)
    embed = pair.native.get_input_embeddings()
    ours = pair.native(inputs_embeds=embed(source), decoder_inputs_embeds=embed(target))
    assert gap(ours.logits, pair.native(source, decoder_input_ids=target).logits) < 1e-4


def test_says_what_it_is(pair: Any) -> None:
    info = pair.native.info
    assert info.is_encoder_decoder and info.num_layers == 3 and info.decoder_start_token_id == 0
    assert pair.native.num_parameters() == pair.reference.num_parameters()


def test_what_it_refuses(pair: Any) -> None:
    with pytest.raises(InputError, match="encoded"):
        pair.native.new_cache()
    with pytest.raises(UnsupportedError, match="DynamicCache"):
        pair.native.forward(make_tokens(1, 2), DynamicCache())
    with pytest.raises(UnsupportedError, match="feed_forward_proj"):
        build_model({**pair.config, "feed_forward_proj": "half-gated-gelu"}, MemorySource(pair.weights))
    with pytest.raises(UnsupportedError, match="mish"):
        build_model({**pair.config, "feed_forward_proj": "gated-mish"}, MemorySource(pair.weights))


def test_the_golden_model_with_its_older_config(golden_pair: Callable[[str], Any]) -> None:
    pair = golden_pair("t5")
    source, target = make_tokens(2, 20), make_tokens(2, 7, seed=1)
    with torch.no_grad():
        theirs = pair.reference(source, decoder_input_ids=target).logits
    assert gap(pair.native(source, decoder_input_ids=target).logits, theirs) < 1e-4 * float(theirs.abs().max())

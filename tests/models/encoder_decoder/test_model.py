"""Every family with an encoder against transformers: norms, positions, heads, ragged sources and ragged decoding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
import transformers

import unspool
from unspool.cache import DynamicCache, EncoderDecoderCache
from unspool.errors import InputError, SettingError, UnsupportedError
from unspool.models.encoder_decoder.model import EncoderDecoder
from unspool.models.registry import build_model
from unspool.models.weights import Embedding, Linear, MemorySource, PackedEmbedding, PackedLinear
from unspool.protocols import Want

T5: dict[str, Any] = {
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
BART: dict[str, Any] = {
    "vocab_size": 97,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 48,
    "init_std": 0.3,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
}
APART = {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 97, "vocab_size": 103}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("T5", {**T5, "feed_forward_proj": "relu"}),
    "t5-gated": ("T5", {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "t5-silu": ("T5", {**T5, "feed_forward_proj": "gated-silu"}),
    "mt5": ("MT5", T5),
    "umt5": ("UMT5", T5),
    "bart": ("Bart", BART),
    "bart-scaled-untied": ("Bart", {**BART, "scale_embedding": True, "tie_word_embeddings": False}),
    "mbart": ("MBart", {**BART, "scale_embedding": True, "activation_function": "relu"}),
    "pegasus": ("Pegasus", {**BART, "scale_embedding": True}),
    "marian": ("Marian", {**BART, "activation_function": "swish"}),
    "marian-apart": ("Marian", {**BART, **APART, "scale_embedding": True}),
    "m2m_100": ("M2M100", BART),
    "m2m_100-unscaled": ("M2M100", {**BART, "scale_embedding": False, "d_model": 36, "pad_token_id": 3}),
    "blenderbot": ("Blenderbot", BART),
}
MODELS = {"Marian": "MarianMTModel"}


@pytest.fixture(params=list(KINDS))
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, pair_cache: dict[str, Any], load_pair: Any
) -> Any:
    return find_pair(request.param, tmp_path_factory, pair_cache, load_pair)


def find_pair(name: str, folders: pytest.TempPathFactory, known: dict[str, Any], load_pair: Any) -> Any:
    if name not in known:
        kind, settings = KINDS[name]

        def make() -> Any:
            config = getattr(transformers, f"{kind}Config")(**settings)
            model = getattr(transformers, MODELS.get(kind, f"{kind}ForConditionalGeneration"))
            made = model._from_config(config, attn_implementation="eager")
            if hasattr(made, "final_logits_bias"):
                made.final_logits_bias.normal_(generator=torch.Generator().manual_seed(4))
            return made

        known[name] = load_pair(make, folders.mktemp(name))
    return known[name]


@pytest.fixture(scope="module")
def pair_cache() -> dict[str, Any]:
    return {}


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory, pair_cache: dict[str, Any], load_pair: Any) -> Any:
    return find_pair("t5", tmp_path_factory, pair_cache, load_pair)


def make_tokens(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(4, 97, (rows, length), generator=torch.Generator().manual_seed(seed))


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
    if side == "left" and pair.native.spec.relative is None:
        pytest.skip("the reference counts padding before a source as positions, or looks for pad tokens")
    ours = pair.native(source, mask, target, output_hidden_states=True)
    theirs = pair.reference(source, attention_mask=mask, decoder_input_ids=target)
    assert gap(ours.logits, theirs.logits) < 1e-4
    is_real = mask.bool()
    assert gap(ours.encoder_last_hidden_state[is_real], theirs.encoder_last_hidden_state[is_real]) < 1e-4
    assert not ours.encoder_last_hidden_state[~is_real].any()


@torch.no_grad()
@pytest.mark.parametrize("name", ["m2m_100", "m2m_100-unscaled"])
def test_tokens_without_a_position_equal_the_reference(
    name: str, tmp_path_factory: pytest.TempPathFactory, pair_cache: dict[str, Any], load_pair: Any
) -> None:
    """M2M-100 makes positions of the tokens: padding has none, in sources and in texts, wherever it stands."""
    pair = find_pair(name, tmp_path_factory, pair_cache, load_pair)
    pad = pair.native.info.pad_token_id
    for seed in range(4):
        source, target = make_tokens(3, 11, seed), make_tokens(3, 8, seed=seed + 9)
        places = torch.Generator().manual_seed(seed)
        source[torch.rand(3, 11, generator=places) < 0.3] = pad
        target[torch.rand(3, 8, generator=places) < 0.3] = pad
        mask = torch.ones_like(source)
        mask[1, 7:] = 0
        wanted = {"decoder_input_ids": target, "output_hidden_states": True}
        ours = pair.native(source, mask, **wanted)
        theirs = pair.reference(source, attention_mask=mask, **wanted)
        assert gap(ours.logits, theirs.logits) < 1e-4
        is_real = mask.bool()
        assert gap(ours.encoder_last_hidden_state[is_real], theirs.encoder_last_hidden_state[is_real]) < 1e-4
        target[:, 0] = pair.native.info.decoder_start_token_id
        asked = {"decoder_input_ids": target, "attention_mask": mask, "max_new_tokens": 6}
        asked |= {"eos_token_id": 96, "pad_token_id": pad}
        found = unspool.generate(pair.native, source, **asked)
        assert found.tolist() == pair.reference.generate(source, **asked, do_sample=False).tolist()
    asked |= {"return_dict_in_generate": True}
    held = unspool.generate(pair.native, source, **asked)
    for more, name in ((held.past_key_values, "past_key_values"), (3, "prefill_chunk_size")):
        with pytest.raises(UnsupportedError, match=f"gives no position .* leave `{name}` out"):
            unspool.generate(pair.native, source, **{**asked, "decoder_input_ids": held.sequences, name: more})


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
    from_text = pair.native.weights.decoder.embedding
    ours = pair.native(inputs_embeds=embed(source), decoder_inputs_embeds=from_text(target))
    assert gap(ours.logits, pair.native(source, decoder_input_ids=target).logits) < 1e-4


def test_says_what_it_is(pair: Any) -> None:
    info, spec = pair.native.info, pair.native.spec
    assert info.is_encoder_decoder and info.num_layers == 3 and info.decoder_start_token_id == 0
    assert info.vocab_size == 97 and info.source_vocab_size == spec.encoder.vocab_size
    is_bounded = spec.relative is None and spec.family != "m2m_100"
    assert (info.max_context, info.longest_source) == ((48, 48) if is_bounded else (None, None))
    theirs = {name: one for name, one in pair.reference.named_parameters() if one.requires_grad}
    if not spec.is_embedding_shared:
        theirs.pop("model.shared.weight", None)  # which nobody reads
    ours = pair.native.num_parameters()
    if spec.encoder.positions is not None and spec.encoder.positions.kind == "sinusoidal":  # Pegasus's files have them
        tables = (pair.native.weights.encoder.positions, pair.native.weights.decoder.positions)
        ours -= sum(table.numel() for table in tables if table is not None)
    ours -= pair.native.weights.head.bias.numel() if spec.has_head_bias else 0  # a buffer of the reference
    assert ours == sum(one.numel() for one in theirs.values())


def test_what_it_refuses(t5: Any) -> None:
    with pytest.raises(InputError, match="encoded"):
        t5.native.new_cache()
    with pytest.raises(UnsupportedError, match="DynamicCache"):
        t5.native.forward(make_tokens(1, 2), DynamicCache())
    with pytest.raises(UnsupportedError, match="feed_forward_proj"):
        build_model({**t5.config, "feed_forward_proj": "half-gated-gelu"}, MemorySource(t5.weights))
    with pytest.raises(UnsupportedError, match="mish"):
        build_model({**t5.config, "feed_forward_proj": "gated-mish"}, MemorySource(t5.weights))


@pytest.mark.parametrize("name", ["t5", "bart", "marian", "pegasus"])
def test_the_golden_model_with_its_older_config(golden_pair: Callable[[str], Any], name: str) -> None:
    pair = golden_pair(name)
    source, target = make_tokens(2, 20), make_tokens(2, 7, seed=1)
    with torch.no_grad():
        theirs = pair.reference(source, decoder_input_ids=target).logits
    assert gap(pair.native(source, decoder_input_ids=target).logits, theirs) < 1e-4 * float(theirs.abs().max())


def unpack(holder: Any) -> Any:
    """Weights with plain matrices in place of quantised ones."""
    if isinstance(holder, PackedLinear):
        return Linear(holder.weight, holder.bias)
    if isinstance(holder, PackedEmbedding):
        return Embedding(holder.weight, holder.scale)
    if isinstance(holder, list):
        return [unpack(item) for item in holder]
    if hasattr(holder, "__dataclass_fields__"):
        return replace(holder, **{item.name: unpack(getattr(holder, item.name)) for item in fields(holder)})
    return holder


@pytest.mark.parametrize("packing", ["int8", "int4"])
@pytest.mark.parametrize("name", ["t5", "bart", "whisper"])
def test_quantised_weights_compute_what_their_numbers_do(
    golden_pair: Callable[[str], Any], name: str, packing: Any
) -> None:
    pair = golden_pair(name)
    packed = build_model(pair.config, MemorySource(pair.weights), packing=packing)
    assert packed.is_quantised and packed.weights_bytes < 0.5 * pair.native.weights_bytes
    plain = EncoderDecoder(packed.spec, unpack(packed.weights), pair.config, packed.device, packed.dtype)
    target = make_tokens(2, 7, seed=1)
    if name == "whisper":
        given = {"input_features": torch.randn(2, 16, 60, generator=torch.Generator().manual_seed(0))}
    else:
        given = {"input_ids": make_tokens(2, 12)}
    exact, near = (model(**given, decoder_input_ids=target).logits for model in (plain, packed))
    # The products round their inputs to 8 bits, and weights this large make much of it.
    assert float(torch.nn.functional.cosine_similarity(exact, near, dim=-1).median()) > 0.95


@pytest.mark.parametrize("name", ["bart", "marian", "pegasus"])
def test_sources_longer_than_the_model_are_refused(golden_pair: Callable[[str], Any], name: str) -> None:
    model = golden_pair(name).native
    with pytest.raises(InputError, match=r"row 1 has 129 tokens to read.*at most 128; shorten the source"):
        ids, mask = make_tokens(2, 129), torch.ones(2, 129, dtype=torch.int64)
        mask[0, 50:] = 0
        unspool.generate(model, ids, attention_mask=mask, max_new_tokens=2, decoder_start_token_id=2)
    with pytest.raises(SettingError, match="no decoder_start_token_id"):
        unspool.generate(model, make_tokens(1, 5), max_new_tokens=2)
    with pytest.raises(SettingError, match="context ends at 128"):
        unspool.generate(model, make_tokens(1, 5), max_new_tokens=200, decoder_start_token_id=2)

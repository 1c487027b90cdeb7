"""Mamba-2 and Falcon-Mamba against transformers: logits, states and tokens; every way to decode, trials, and files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import unspool
from unspool.cache import Cache, MambaCache
from unspool.errors import LoadError, SettingError
from unspool.kernels.head_scan import scan_heads
from unspool.models.registry import build_model
from unspool.models.weights import MemorySource
from unspool.protocols import Want

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "state_size": 5,
    "num_hidden_layers": 3,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
HEADS: dict[str, Any] = {**SIZES, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 16}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("Mamba2", HEADS),
    "groups": (
        "Mamba2",
        {**HEADS, "n_groups": 2, "use_bias": True, "use_conv_bias": False, "conv_kernel": 3, "residual_in_fp32": False},
    ),
    "tied": ("Mamba2", {**HEADS, "tie_word_embeddings": True, "num_heads": 4, "head_dim": 16, "n_groups": 4}),
    "falcon": ("FalconMamba", {**SIZES, "time_step_rank": 3}),
}
TOKENS = torch.randint(3, 97, (3, 90), generator=torch.Generator().manual_seed(0))  # longer than a chunk of the scan
MASK = torch.ones(3, 9, dtype=torch.int64)
MASK[0, :3] = MASK[1, :6] = 0
IDS = TOKENS[:, :9] * MASK


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory, load_pair: Any) -> dict[str, Any]:
    def build(kind: str) -> Callable[[], Any]:
        name, settings = KINDS[kind]
        config = getattr(transformers, f"{name}Config")(**settings)
        return lambda: getattr(transformers, f"{name}ForCausalLM")(config)

    return {kind: load_pair(build(kind), tmp_path_factory.mktemp("mamba2")) for kind in KINDS}


@pytest.fixture(params=list(KINDS))
def pair(request: pytest.FixtureRequest, pairs: dict[str, Any]) -> Any:
    return pairs[request.param]


@pytest.fixture
def groups(pairs: dict[str, Any]) -> Any:
    return pairs["groups"]


def gap(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours.float() - theirs.float()).abs().max() / theirs.abs().max().clamp(min=1))


@torch.no_grad()
def test_logits_and_states_equal_the_references(pair: Any) -> None:
    theirs = pair.reference(TOKENS, output_hidden_states=True, use_cache=True)
    ours = pair.native(TOKENS, output_hidden_states=True)
    assert gap(ours.logits, theirs.logits) < 1e-4
    for mine, other in zip(ours.hidden_states, theirs.hidden_states, strict=True):
        assert gap(mine, other) < 1e-4
    for layer in range(3):
        kept = theirs.cache_params.layers[layer].recurrent_states[0]  # (rows, heads, size, state) in Mamba-2
        assert gap(ours.cache_params.ssm_states[layer], kept.reshape(3, -1, kept.shape[-1])) < 1e-4
    assert pair.native.num_parameters() == pair.reference.num_parameters()


def test_greedy_tokens_equal_the_references(pair: Any) -> None:
    told = {"eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 12}
    expected = pair.reference.generate(TOKENS[:, :12], do_sample=False, **told)
    assert unspool.generate(pair.native, TOKENS[:, :12], **told).tolist() == expected.tolist()


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"do_sample": True, "seed": 7, "num_return_sequences": 2},
    "beams": {"num_beams": 3},
    "groups": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.7},
    "words": {"num_beams": 4, "force_words_ids": [[33, 45]]},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 4},
    "ends": {"eos_token_id": list(range(60, 97))},
}


def generate(model: Any, ids: torch.Tensor = IDS, mask: Any = MASK, **settings: Any) -> Any:
    return unspool.generate(model, ids, attention_mask=mask, **{"pad_token_id": 0, "max_new_tokens": 8, **settings})


@pytest.mark.parametrize("way", WAYS)
def test_states_agree_with_reading_everything_again(groups: Any, way: str) -> None:
    expected = generate(groups.native, **WAYS[way])
    assert torch.equal(generate(groups.native, **WAYS[way], prefill_chunk_size=2), expected)
    if way != "contrastive":  # which keeps what it has read
        assert torch.equal(generate(groups.native, **WAYS[way], use_cache=False), expected)


def test_a_row_alone_is_the_row_in_the_batch(pair: Any) -> None:
    together = generate(pair.native, eos_token_id=None)
    for row in range(3):
        alone = generate(pair.native, IDS[row : row + 1, MASK[row].bool()], None, eos_token_id=None)
        assert torch.equal(alone[0, -8:], together[row, -8:])


@pytest.mark.parametrize("kept", [[0, 0, 0], [5, 0, 2], [5, 5, 5]])
def test_what_a_trial_takes_back_was_never_read(groups: Any, kept: list[int]) -> None:
    model, counts, drafts = groups.native, [4, 9, 6], TOKENS[:, 20:26]
    cache, clean = model.new_cache(rows=3), model.new_cache(rows=3)
    for one in (cache, clean):
        model.forward(TOKENS[:, :9], one, counts=counts)
    cache.begin_trial()
    for first, last in ((0, 2), (2, 5)):
        model.forward(drafts[:, first:last], cache, want=Want("all"))
    cache.truncate([count + keep for count, keep in zip(counts, kept, strict=True)])
    if any(kept):
        model.forward(drafts[:, : max(kept)], clean, counts=kept)
    torch.testing.assert_close(cache.ssm_states, clean.ssm_states, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(cache.conv_states, clean.conv_states, rtol=1e-5, atol=1e-6)
    after = [model.forward(drafts[:, 5:], one).logits for one in (cache, clean)]
    torch.testing.assert_close(after[0], after[1], rtol=1e-4, atol=1e-4)


def test_drafts_change_nothing(pair: Any) -> None:
    repeated = torch.tensor([[7, 8, 9, 30] * 4, [40, 41] * 8])
    plain = generate(pair.native, repeated, None, max_new_tokens=16)
    told = {"prompt_lookup_num_tokens": 4, "max_matching_ngram_size": 2, "return_dict_in_generate": True}
    output = generate(pair.native, repeated, None, max_new_tokens=16, **told)
    assert torch.equal(output.sequences, plain) and sum(output.stats.speculation.drafted) > 0


def test_states_go_to_files_and_back(groups: Any, tmp_path: Path) -> None:
    first = generate(groups.native, IDS[2:], None, return_dict_in_generate=True, eos_token_id=None)
    cache = first.past_key_values
    assert isinstance(cache, MambaCache)
    assert cache.conv_states.shape == (3, 1, 64 + 2 * 2 * 5, 3) and cache.ssm_states.shape == (3, 1, 64, 5)
    cache.save(tmp_path / "states")
    more = torch.cat((first.sequences, TOKENS[2:, 30:33]), dim=1)
    expected = generate(groups.native, more, None, past_key_values=cache, eos_token_id=None)
    loaded = Cache.load(tmp_path / "states")
    assert torch.equal(generate(groups.native, more, None, past_key_values=loaded, eos_token_id=None), expected)
    assert torch.equal(generate(groups.native, more, None, eos_token_id=None), expected)


def test_a_cache_of_the_reference_form(groups: Any, pairs: dict[str, Any]) -> None:
    cache = MambaCache(groups.native.config, 3, dtype=torch.float32)
    assert torch.equal(groups.native(TOKENS, cache_params=cache).logits, groups.native(TOKENS).logits)
    with pytest.raises(SettingError, match="channels of a convolution"):
        groups.native(TOKENS, cache_params=pairs["tied"].native.new_cache(rows=3))


def test_narrow_weights_stay_near(groups: Any) -> None:
    narrow = build_model(groups.config, MemorySource(groups.weights), dtype=torch.bfloat16)
    output = narrow(TOKENS[:, :40])
    assert output.cache_params.ssm_states.dtype == torch.float32
    assert narrow.weights.layers[0].space.decay.dtype == torch.float32
    assert 1e-5 < gap(output.logits, groups.native(TOKENS[:, :40]).logits) < 0.15


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_heads": 7}, "7 heads of 8"),
        ({"n_groups": 3}, "in 3 groups"),
        ({"time_step_limit": [1.0, 0.5]}, "time_step_limit"),
        ({"time_step_limit": "all"}, "time_step_limit"),
        ({"n_groups": 0}, "n_groups"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_by_name(groups: Any, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(LoadError, match=words):
        build_model({**groups.config, **changes}, MemorySource(groups.weights))


@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_chunks_of_the_scan_are_its_definition(chunk: int) -> None:
    generator = torch.Generator().manual_seed(1)
    rows, new, heads, size, num_groups, width = 2, 13, 6, 3, 2, 4
    dt = torch.rand(rows, new, heads, generator=generator)
    dt[1, 9:] = 0  # past a row's end
    a = -torch.rand(heads, generator=generator)
    u = torch.randn(rows, new, heads * size, generator=generator)
    b, c = (torch.randn(rows, new, num_groups, width, generator=generator) for _ in "bc")
    state = torch.randn(rows, width, heads * size, generator=generator)
    y, last = scan_heads(state, dt, a, u, b, c, chunk=chunk)
    expected, held = [], state.view(rows, width, heads, size)
    each = heads // num_groups
    for place in range(new):
        fading = torch.exp2(dt[:, place] * a)
        fed = (u[:, place].view(rows, heads, size) * dt[:, place, :, None])[:, None]
        keys, queries = (part[:, place].repeat_interleave(each, dim=1).transpose(1, 2)[..., None] for part in (b, c))
        held = held * fading[:, None, :, None] + fed * keys
        expected.append((held * queries).sum(dim=1).reshape(rows, -1))
    torch.testing.assert_close(y, torch.stack(expected, dim=1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(last, held.reshape(rows, width, -1), rtol=1e-4, atol=1e-5)

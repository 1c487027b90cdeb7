"""Decoding with a Mamba model: every strategy on states, and a state that is continued."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conformance.cases import load_model

import unspool
from unspool.api.prefix import make_conversation
from unspool.cache import Cache, MambaCache
from unspool.errors import InputError, SettingError, UnsupportedError
from unspool.models.native import NativeModel
from unspool.protocols import Want

MASK = torch.ones(3, 9, dtype=torch.int64)
MASK[0, :3] = MASK[1, :6] = 0
IDS = torch.randint(3, 160, (3, 9), generator=torch.Generator().manual_seed(4)) * MASK
MANY_ENDS = list(range(100, 160))  # rows end early, and at different steps


@pytest.fixture
def model() -> NativeModel:
    return load_model("mamba").model


def generate(model: Any, ids: torch.Tensor = IDS, mask: Any = MASK, **settings: Any) -> Any:
    settings.setdefault("max_new_tokens", 12)
    return unspool.generate(model, ids, attention_mask=mask, pad_token_id=0, **settings)


# --- ways of reading ----------------------------------------------------------------------------------------

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "penalised": {"repetition_penalty": 1.4},
    "drawn": {"do_sample": True, "seed": 7, "top_k": 20},
    "several": {"do_sample": True, "seed": 7, "num_return_sequences": 3},
    "beams": {"num_beams": 3},
    "drawn beams": {"num_beams": 3, "do_sample": True, "seed": 5},
    "groups": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.7},
    "words": {"num_beams": 4, "force_words_ids": [[33, 45]]},
    "ends": {"eos_token_id": MANY_ENDS},
    "layers": {"dola_layers": [0, 1]},
}


@pytest.mark.parametrize("way", WAYS)
def test_states_agree_with_reading_everything_again(model: NativeModel, way: str) -> None:
    """Without a cache there is no state that could be carried wrongly from row to row or from step to step."""
    assert torch.equal(generate(model, **WAYS[way]), generate(model, **WAYS[way], use_cache=False))


@pytest.mark.parametrize("way", WAYS)
def test_prompts_in_pieces_are_prompts(model: NativeModel, way: str) -> None:
    assert torch.equal(generate(model, **WAYS[way]), generate(model, **WAYS[way], prefill_chunk_size=2))


def test_embeddings_are_prompts(model: NativeModel) -> None:
    embeds = model.get_input_embeddings()(IDS)
    new = unspool.generate(model, inputs_embeds=embeds, attention_mask=MASK, max_new_tokens=12, pad_token_id=0)
    assert torch.equal(new, generate(model)[:, 9:])


def test_prompt_logprobs_are_the_models(model: NativeModel) -> None:
    output = generate(model, prompt_logprobs=1, return_dict_in_generate=True)
    for row in range(3):
        real = IDS[row][MASK[row].bool()][None]
        expected = model.forward(real, model.new_cache(), want=Want("all")).logits[0].log_softmax(-1)
        told = [one.logprob for one in output.prompt_logprobs[row][1:]]
        assert told == pytest.approx([float(expected[i, real[0, i + 1]]) for i in range(real.shape[1] - 1)], abs=1e-4)
    assert torch.equal(output.sequences, generate(model))


def test_the_stream_is_what_is_collected(model: NativeModel) -> None:
    rows: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for emitted in unspool.stream(model, IDS, attention_mask=MASK, max_new_tokens=12, pad_token_id=0):
        for row, tokens in emitted.tokens.items():
            rows[row] += tokens
    assert list(rows.values()) == generate(model)[:, 9:].tolist()


def test_hidden_states_are_returned(model: NativeModel) -> None:
    output = generate(model, output_hidden_states=True, return_dict_in_generate=True)
    assert len(output.hidden_states) == 12 and len(output.hidden_states[0]) == 4
    assert output.hidden_states[0][0].shape == (3, 9, 32) and output.hidden_states[5][0].shape == (3, 1, 32)


# --- a state that is continued ------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"eos_token_id": MANY_ENDS}, {"num_return_sequences": 2, "do_sample": True}])
def test_what_was_generated_can_be_continued(model: NativeModel, settings: dict[str, Any]) -> None:
    """Also where rows ended early and went on as padding: their states are those of their own last tokens."""
    first = generate(model, seed=3, return_dict_in_generate=True, **{**settings, "do_sample": "do_sample" in settings})
    cache = first.past_key_values
    assert isinstance(cache, MambaCache)
    ends = settings.get("eos_token_id", [])
    prompts = []
    for row, held in enumerate(cache.lengths):
        tokens = first.sequences[row, 9:].tolist()
        count = next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))
        source = row // settings.get("num_return_sequences", 1)
        own = IDS[source][MASK[source].bool()].tolist() + tokens[:count]
        assert held == len(own) - 1
        prompts.append([*own, 50, 60])
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    fresh = generate(model, ids, mask)
    assert torch.equal(generate(model, ids, mask, past_key_values=cache), fresh)


def test_a_cache_of_the_callers_is_filled(model: NativeModel) -> None:
    cache = MambaCache(model.config, 3, dtype=model.dtype, device=model.device)
    assert torch.equal(generate(model, past_key_values=cache), generate(model))
    assert cache.lengths == [6 + 11, 3 + 11, 9 + 11]
    cache.reset()
    assert torch.equal(generate(model, past_key_values=cache), generate(model))


def test_a_saved_state_is_continued(model: NativeModel, tmp_path: Path) -> None:
    first = generate(model, return_dict_in_generate=True)
    first.past_key_values.save(tmp_path / "states", model=model)
    ids = torch.cat((first.sequences, torch.full((3, 1), 44)), dim=1)
    mask = torch.cat((MASK, torch.ones(3, 13, dtype=torch.int64)), dim=1)
    loaded = Cache.load(tmp_path / "states", model=model)
    assert torch.equal(generate(model, ids, mask, past_key_values=loaded), generate(model, ids, mask))
    with pytest.raises(SettingError, match="keys mean nothing to another model"):
        Cache.load(tmp_path / "states", model=load_model("llama").model)


def test_a_shared_beginning_is_read_once() -> None:
    lm = load_model("mamba")
    prefix = lm.prefix(IDS[2].tolist())
    together = prefix.generate([[20, 21, 22], [30]], max_new_tokens=6)
    for row, rest in enumerate(([20, 21, 22], [30])):
        alone = lm.generate([IDS[2].tolist() + rest], max_new_tokens=6)
        assert together.token_ids[row] == alone.token_ids[0]
    with pytest.raises(UnsupportedError, match="a MambaCache can't roll back"):
        prefix.lend(lm, [[*IDS[2, :5].tolist(), 33, 34]])


def test_a_conversation_that_parts_is_read_again() -> None:
    """A chat's next turn may be tokenised otherwise than what was read: states can't go back, so they start anew."""
    lm = load_model("mamba")
    ids = IDS[2].tolist()
    cache = lm.model.new_cache()
    lm.model.forward(IDS[2:], cache)
    assert make_conversation(lm, ids, cache).lend(lm, [[*ids, 40]]).lengths == [9]
    assert make_conversation(lm, ids, cache).lend(lm, [[*ids[:4], 40]]).lengths == []


def test_the_memory_is_that_of_the_states(model: NativeModel) -> None:
    sizes = [
        generate(model, max_new_tokens=new, return_dict_in_generate=True).past_key_values.nbytes for new in (1, 40)
    ]
    assert sizes[0] == sizes[1] == model.new_cache(rows=3).nbytes


# --- trials: what speculation does --------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [[0, 0, 0], [5, 0, 2], [1, 4, 5], [5, 5, 5]])
@pytest.mark.parametrize("sizes", [[5], [1, 1, 1, 1, 1], [2, 3]])
def test_what_a_trial_takes_back_was_never_read(model: NativeModel, kept: list[int], sizes: list[int]) -> None:
    drafts = torch.randint(3, 160, (3, 6), generator=torch.Generator().manual_seed(8))
    prompts = torch.randint(3, 160, (3, 9), generator=torch.Generator().manual_seed(9))
    counts = [4, 9, 6]
    cache, clean = model.new_cache(rows=3), model.new_cache(rows=3)
    for one in (cache, clean):
        model.forward(prompts, one, counts=counts)
    cache.begin_trial()
    first = 0
    for size in sizes:
        model.forward(drafts[:, first : first + size], cache, want=Want("all"))
        first += size
    cache.truncate([count + keep for count, keep in zip(counts, kept, strict=True)])
    if any(kept):
        model.forward(drafts[:, : max(kept)], clean, counts=kept)
    assert cache.lengths == clean.lengths
    torch.testing.assert_close(cache.ssm_states, clean.ssm_states, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(cache.conv_states, clean.conv_states, rtol=1e-5, atol=1e-6)
    after = [model.forward(drafts[:, 5:], one).logits for one in (cache, clean)]
    torch.testing.assert_close(after[0], after[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "settings", [{}, {"do_sample": True, "seed": 11, "temperature": 0.4}, {"eos_token_id": MANY_ENDS}]
)
@pytest.mark.parametrize("is_whole", [False, True])
def test_drafts_change_nothing(model: NativeModel, settings: dict[str, Any], is_whole: bool) -> None:
    """Prompt lookup on repetitive prompts: drafts are refused and taken, in rows of different fortune."""
    repeated = torch.tensor([[7, 8, 9, 30] * 6, [40, 41] * 12, [7, 8, 9, 10] * 6])
    plain = generate(model, repeated, None, max_new_tokens=30, **settings)
    told = {"return_dict_in_generate": is_whole, "prompt_lookup_num_tokens": 4, "max_matching_ngram_size": 2}
    output = generate(model, repeated, None, max_new_tokens=30, **settings, **told)
    assert torch.equal(output.sequences if is_whole else output, plain)
    if is_whole:
        assert sum(output.stats.speculation.drafted) > 0 and not output.past_key_values._store.is_trying


# --- what can't be ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"output_attentions": True, "return_dict_in_generate": True}, UnsupportedError, "mamba model can't return"),
        ({"cache_implementation": "static"}, UnsupportedError, "'static', set in the call: it holds keys"),
        ({"cache_implementation": "sliding_window"}, UnsupportedError, "a mamba model keeps states; leave it out"),
        ({"return_legacy_cache": True, "return_dict_in_generate": True}, SettingError, "can't hold a mamba cache"),
        ({"max_cache_len": 99}, SettingError, "the cache is mamba"),
        ({"past_key_values": unspool.DynamicCache()}, SettingError, "is a DynamicCache, and a mamba model keeps"),
        ({"past_key_values": ((IDS, IDS),)}, SettingError, "is a tuple, and a mamba model keeps"),
    ],
)
def test_what_states_can_not_do_is_said(
    model: NativeModel, settings: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        generate(model, **settings)


def test_the_kind_may_be_named(model: NativeModel) -> None:
    for kind in ("mamba", "dynamic"):
        output = generate(model, cache_implementation=kind, return_dict_in_generate=True)
        assert isinstance(output.past_key_values, MambaCache) and torch.equal(output.sequences, generate(model))


def test_states_are_for_mamba_alone(model: NativeModel) -> None:
    llama = load_model("llama").model
    with pytest.raises(UnsupportedError, match="holds the states of Mamba models, and llama is none"):
        generate(llama, cache_implementation="mamba")
    with pytest.raises(SettingError, match="is a MambaCache, which holds states, and a llama model"):
        generate(llama, past_key_values=model.new_cache(rows=3))
    with pytest.raises(InputError, match="holds states and no keys"):
        llama(IDS, past_key_values=model.new_cache(rows=3))


def test_a_cache_of_another_batch_or_dtype_is_refused_and_left_alone(model: NativeModel) -> None:
    cache = model.new_cache(rows=3)
    generate(model, past_key_values=cache)
    held = cache.lengths, cache.ssm_states.clone()
    with pytest.raises(SettingError, match="hold 3 rows and the prompt has 1"):
        generate(model, IDS[:1], MASK[:1], past_key_values=cache)
    with pytest.raises(SettingError, match="its prompt has 6 tokens"):
        generate(model, past_key_values=cache)
    assert cache.lengths == held[0] and torch.equal(cache.ssm_states, held[1])
    with pytest.raises(SettingError, match=r"dtype=model\.dtype"):
        generate(model, past_key_values=MambaCache(model.config, 3))
    with pytest.raises(SettingError, match="3 rows do not fit"):
        generate(model, past_key_values=model.new_cache(rows=2))

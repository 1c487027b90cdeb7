"""The adapter beside a native model with the same weights, and what it says, keeps, refuses and gives back."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from tests.conformance.cases import Case, load_adapted, load_model, read_cases, run_case
from tests.models.adapters.tiny import SIZES, make, make_inputs, make_once

import unspool
from unspool.api.core import as_model
from unspool.cache import KINDS, DynamicCache, SinkCache
from unspool.errors import InputError, SettingError, UnsupportedError
from unspool.models.adapters.decoder import AdaptedDecoder
from unspool.protocols import Want

DECODERS = ("bloom", "gemma2", "gpt2", "gpt_neox", "llama", "mistral", "opt", "phi", "qwen2", "qwen3")
NEW = {"max_new_tokens": 12, "eos_token_id": None}


def draw_inputs(vocab_size: int = 160, width: int = 22) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, vocab_size, (3, width), generator=torch.Generator().manual_seed(4))
    mask = torch.ones_like(ids)
    mask[0, :9], mask[1, : width - 3] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


# --- beside the native model ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DECODERS)
def test_a_pass_returns_what_the_native_one_does(name: str) -> None:
    """Prompts of different lengths and a ragged pass after them: logits, all layers' states, early logits, weights."""
    native, adapted = load_model(name).model, as_model(load_adapted(name))
    info = adapted.info
    assert (info.vocab_size, info.num_layers, info.num_heads) == (
        native.info.vocab_size,
        native.info.num_layers,
        native.info.num_heads,
    )
    assert (info.window, set(info.layer_kinds)) == (native.info.window, set(native.info.layer_kinds or ("full",)))
    assert info.max_context == native.info.max_context
    ids = draw_inputs(info.vocab_size)["input_ids"]
    everything = Want("all", hidden_states=True, attentions=True, last_states=True)
    caches = [native.new_cache(rows=3), adapted.new_cache(rows=3)]
    for new, counts in ((ids[:, :11], [11, 4, 9]), (ids[:, 11:14], [3, 2, 0])):
        theirs, ours = (
            model.forward(new, kept, counts=counts, want=everything)
            for model, kept in zip((native, adapted), caches, strict=True)
        )
        for row, count in enumerate(counts):
            assert_close(ours.logits[row, :count], theirs.logits[row, :count])
            assert_close(ours.last_states[row, :count], theirs.last_states[row, :count])
            stop = caches[0].lengths[row]
            for mine, other in zip(ours.attentions, theirs.attentions, strict=True):
                assert_close(mine[row, :, :count, :stop], other[row, :, :count, :stop])
            for mine, other in zip(ours.hidden_states, theirs.hidden_states, strict=True):
                assert_close(mine[row, :count], other[row, :count])
    early = Want(early=(0, 1))
    theirs, ours = (m.forward(ids[:, :1], c, want=early) for m, c in zip((native, adapted), caches, strict=True))
    for mine, other in zip((ours.logits, *ours.early_logits), (theirs.logits, *theirs.early_logits), strict=True):
        assert_close(mine, other)


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-3)


SAMPLE = {
    "llama": (
        *("greedy_min_new", "greedy_bias", "greedy_decay", "greedy_multi_eos", "beam4_rep_norepeat", "beam4_eos"),
        *("diverse6", "force_mixed_ret", "contrastive_rep", "cfg_negative", "lookup", "dola_list", "sample_all"),
    ),
    "bloom": ("greedy_rep", "beam4_ret3", "diverse_eos", "contrastive", "cfg_1.5"),
    "gemma2": ("beam4_never", "dola_high"),
    "gpt2": ("greedy_forced_eos", "force_two", "lookup"),
    "t5": ("greedy", "beam3", "diverse6"),
    "bart": ("greedy_forced_eos", "beam4_eos", "force_mixed_ret", "contrastive", "forced_bos"),
    "marian": ("greedy_multi_eos", "beam4_lp2_early", "force_two"),
    "pegasus": ("encoder_norepeat", "diverse4_ret4", "contrastive"),
    "whisper": (
        *("greedy", "greedy_decay", "greedy_begin_suppress", "beam4_lpneg", "beam4_eos", "diverse_eos"),
        *("force_mixed_ret", "forced_bos"),
    ),
}
SAMPLED = [case for case in read_cases() if case.name in SAMPLE.get(case.model, ())]


@pytest.mark.parametrize("case", SAMPLED, ids=str)
def test_goldens_hold(case: Case) -> None:
    output = run_case(case, load_adapted(case.model))
    if "sequences" in case.expected:
        assert output.sequences.tolist() == case.sequences
    if "sequences_scores" in case.expected:
        assert_close(output.sequences_scores, torch.tensor(case.expected["sequences_scores"]))


def test_the_sample_is_there() -> None:
    assert len(SAMPLED) == sum(map(len, SAMPLE.values()))


TOLD: dict[str, dict[str, Any]] = {
    **{kind: {"nbits": 4, "q_group_size": 4, "residual_length": 4} for kind in KINDS if "quantized" in kind},
    "sink": {"window_length": 12, "num_sink_tokens": 3},
}
WAYS: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 3},
    "drafts": {"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 1},
    "chunks": {"prefill_chunk_size": 5, "do_sample": True, "seed": 11, "num_return_sequences": 2},
}


EVERY = [*(("llama", kind) for kind in KINDS if kind not in ("mamba", "sliding_window")), ("mistral", "sliding_window")]
TURNS = [(name, kind, list(WAYS)[turn % len(WAYS)]) for turn, (name, kind) in enumerate(EVERY)]
TURNS += [("mistral", "quantized_hybrid", "drafts"), ("mistral", "sink", "beams"), ("llama", "sink", "drafts")]


@pytest.mark.parametrize(("name", "kind", "way"), TURNS)
def test_every_kind_decodes_as_under_the_native_model(name: str, kind: str, way: str) -> None:
    """Token for token, packed keys and sinks included: what a kind loses, it loses for both alike."""
    common = {**draw_inputs(), **NEW, **WAYS[way], "cache_implementation": kind, "cache_config": TOLD.get(kind)}
    expected = unspool.generate(load_model(name).model, **common)
    assert torch.equal(unspool.generate(load_adapted(name), **common), expected)


def test_sinks_go_on_past_the_context() -> None:
    model, inputs = load_adapted("llama"), draw_inputs()
    settings = {"max_new_tokens": 120, "eos_token_id": None, "cache_implementation": "sink"}
    settings["cache_config"] = {"window_length": 24, "num_sink_tokens": 4}
    found = unspool.generate(model, **inputs, **settings)
    assert found.shape == (3, 142) and as_model(model).info.max_context == 128
    assert torch.equal(found, unspool.generate(load_model("llama").model, **inputs, **settings))


@pytest.mark.parametrize("name", ["gpt2", "bloom"])
def test_sinks_need_a_rotation_that_is_known(name: str) -> None:
    model = load_adapted(name)
    for told in ({"cache_implementation": "sink"}, {"past_key_values": SinkCache(8, 2)}):
        with pytest.raises(UnsupportedError, match="learned one by one"):
            unspool.generate(model, [[5, 6]], max_new_tokens=4, **told)
    with pytest.raises(UnsupportedError, match="is not known, or they are learned one by one"):
        as_model(model).forward(torch.tensor([[5, 6]]), SinkCache(8, 2))


@pytest.mark.parametrize("kind", ["dynamic", "sliding_window", "hybrid", "quantized_hybrid", "quantized"])
@pytest.mark.parametrize("name", ["mistral", "gemma2"])
def test_rows_that_end_together_read_windows(name: str, kind: str) -> None:
    """Any model takes rows that end in one column; over rings and packed windows too."""
    if (name, kind) == ("gemma2", "sliding_window"):
        return
    model = load_adapted(name)
    placed = as_model(model)
    assert isinstance(placed, AdaptedDecoder)
    aligned = AdaptedDecoder(model, replace(placed.description, why_aligned="a test says so"))
    ids, told = draw_inputs()["input_ids"], {"nbits": 8, "q_group_size": 4, "residual_length": 4}
    config = told if "quantized" in kind else None
    caches = [each.new_cache(kind, 3, 40, config=config) for each in (placed, aligned)]
    passes = ((ids[:, :12], [12, 3, 9]), (ids[:, 12:13], None), (ids[:, 13:17], [4, 1, 0]), (ids[:, 17:18], None))
    for new, counts in passes:
        expected, found = (
            each.forward(new, kept, counts=counts, want=Want("all")).logits
            for each, kept in zip((placed, aligned), caches, strict=True)
        )
        for row, count in enumerate(counts or [new.shape[1]] * 3):
            assert_close(found[row, :count], expected[row, :count])


# --- the model that was given ---------------------------------------------------------------------------------


def test_weights_are_read_as_they_are_now() -> None:
    model, inputs = make("stablelm"), make_inputs()
    before = unspool.generate(model, **inputs, **NEW)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight.roll(1, 0))
    after = unspool.generate(model, **inputs, **NEW)
    assert not torch.equal(before, after)
    assert torch.equal(after, model.generate(**inputs, **NEW, do_sample=False))


def test_an_adapter_lives_and_dies_with_its_model() -> None:
    model = make("llama")
    adapter = as_model(model)
    assert as_model(model) is adapter
    inner = weakref.ref(model)
    del model, adapter
    gc.collect()
    assert inner() is None


def test_a_model_can_be_its_own_assistant() -> None:
    model = make_once("llama")
    output = unspool.generate(model, [[5, 6]], assistant_model=model, **NEW, return_dict_in_generate=True)
    assert torch.equal(output.sequences, unspool.generate(model, [[5, 6]], **NEW))
    assert output.stats.speculation.acceptance == 1.0


def test_drafting_with_models_of_both_sides() -> None:
    model, inputs = load_adapted("llama"), draw_inputs()
    expected = unspool.generate(load_model("llama").model, **inputs, **NEW)
    for told in (
        {"assistant_model": load_model("llama").model},
        {"assistant_early_exit": 1},
    ):
        output = unspool.generate(model, **inputs, **NEW, **told, return_dict_in_generate=True)
        assert torch.equal(output.sequences, expected)
        assert sum(output.stats.speculation.drafted) > 0
    assert torch.equal(unspool.generate(load_model("llama").model, **inputs, **NEW, assistant_model=model), expected)
    assert model.config.num_hidden_layers == as_model(model).info.num_layers


def test_early_layers_alone_answer_as_the_native_ones() -> None:
    native, adapted = load_model("qwen3").model, as_model(load_adapted("qwen3"))
    ids, found = draw_inputs()["input_ids"], []
    for model in (native, adapted):
        kept = model.new_cache(rows=3)
        model.forward(ids[:, :9], kept)
        kept.begin_trial()
        found.append(model.forward(ids[:, 9:10], kept, want=Want(exit_layer=1)).logits)
        kept.truncate([9] * 3)
        found.append(model.forward(ids[:, 9:10], kept).logits)
    assert_close(found[2], found[0])
    assert_close(found[3], found[1])
    assert not torch.allclose(found[0], found[1], atol=1e-2)


def test_embeddings_are_read_as_their_tokens() -> None:
    model, inputs = make_once("phi3"), make_inputs()
    embeds = model.get_input_embeddings()(inputs["input_ids"]).detach()
    found = unspool.generate(model, inputs_embeds=embeds, attention_mask=inputs["attention_mask"], **NEW)
    assert torch.equal(found, unspool.generate(model, **inputs, **NEW)[:, 12:])


@pytest.mark.parametrize("native", [True, False])
def test_embeddings_may_be_narrower_than_hidden_states(native: bool) -> None:
    sizes = {
        "hidden_size": 32,
        "word_embed_proj_dim": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "ffn_dim": 40,
    }
    config = transformers.OPTConfig(vocab_size=160, max_position_embeddings=64, do_layer_norm_before=False, **sizes)
    torch.manual_seed(5)
    model, inputs = transformers.OPTForCausalLM(config).eval(), draw_inputs()
    mask = inputs["attention_mask"]
    embeds = model.get_input_embeddings()(inputs["input_ids"]).detach()
    found = unspool.generate(model, inputs_embeds=embeds, attention_mask=mask, native=native, **NEW)
    assert torch.equal(found, unspool.generate(model, **inputs, native=native, **NEW)[:, 22:])
    assert torch.equal(found, model.generate(inputs_embeds=embeds, attention_mask=mask, do_sample=False, **NEW))
    with pytest.raises(InputError, match="the model's width is 16"):
        unspool.generate(model, inputs_embeds=torch.zeros(1, 3, 32), native=native, **NEW)


def test_attention_weights_of_a_model_that_tells_none() -> None:
    """sdpa returns no weights, so a pass that must tell them attends plainly; the model is left as it was."""
    inputs, answers = make_inputs(), []
    for attention in ("eager", "sdpa"):
        model = make("stablelm", attention)
        settings = {**NEW, "output_attentions": True, "output_hidden_states": True, "return_dict_in_generate": True}
        answers.append(unspool.generate(model, **inputs, **settings))
        assert model.config._attn_implementation == attention
    first, second = answers
    assert torch.equal(first.sequences, second.sequences)
    for mine, other in zip(first.attentions[3], second.attentions[3], strict=True):
        assert_close(mine, other)
    expected = make_once("stablelm").generate(
        **inputs, **NEW, output_hidden_states=True, return_dict_in_generate=True, do_sample=False
    )
    for row, pad in enumerate((5, 9, 0)):
        for mine, other in zip(first.hidden_states[0], expected.hidden_states[0], strict=True):
            assert_close(mine[row, pad:], other[row, pad:])


def test_attention_that_is_changed_is_followed() -> None:
    model, inputs = make("olmo2", "sdpa"), make_inputs()
    before, expected = as_model(model), unspool.generate(model, **inputs, **NEW)
    model.set_attn_implementation("eager")
    assert as_model(model) is not before
    assert torch.equal(unspool.generate(model, **inputs, **NEW), expected)


def test_a_given_cache_is_gone_on_with() -> None:
    model, ids = make_once("cohere2"), make_inputs()["input_ids"][2:]
    first = unspool.generate(model, ids, **NEW)
    expected = unspool.generate(model, first, **NEW)
    adapter = as_model(model)
    for kept in (DynamicCache(), adapter.new_cache("hybrid", 1, 60), adapter.new_cache("static", 1, 60)):
        assert torch.equal(unspool.generate(model, ids, **NEW, past_key_values=kept), first)
        assert kept.lengths == [23]
        assert torch.equal(unspool.generate(model, first, **NEW, past_key_values=kept), expected)
    with pytest.raises(SettingError, match="of another model than this stablelm"):
        unspool.generate(make_once("stablelm"), first, **NEW, past_key_values=DynamicCache(kept_keys()))


def kept_keys() -> Any:
    return ((torch.zeros(1, 1, 2, 3), torch.zeros(1, 1, 2, 3)),)


# --- settings -------------------------------------------------------------------------------------------------


def test_the_models_own_settings_are_its_defaults() -> None:
    model, inputs = make("granite"), make_inputs()
    model.generation_config = transformers.GenerationConfig(max_new_tokens=5, num_beams=2, eos_token_id=96)
    assert torch.equal(unspool.generate(model, **inputs), model.generate(**inputs))
    model.generation_config.max_new_tokens = 3
    assert unspool.generate(model, **inputs).shape[1] <= 15
    assert unspool.generate(model, **inputs, use_model_defaults=False, max_new_tokens=7, eos_token_id=None).shape == (
        3,
        19,
    )


def test_settings_of_transformers_are_taken() -> None:
    model, inputs = make_once("granite"), make_inputs()
    theirs = transformers.GenerationConfig(max_new_tokens=6, repetition_penalty=1.4, num_beams=2, eos_token_id=96)
    found = unspool.generate(model, **inputs, generation_config=theirs)
    assert torch.equal(found, model.generate(**inputs, generation_config=theirs))
    assert next(iter(unspool.stream(model, **inputs, generation_config=theirs, num_beams=1))).tokens.keys() == {0, 1, 2}
    with pytest.raises(SettingError, match="must be a GenerationConfig, not a dict"):
        unspool.generate(model, **inputs, generation_config={"max_new_tokens": 3})


def test_a_config_of_transformers_may_hold_what_has_no_effect() -> None:
    model, inputs = make_once("llama"), make_inputs()
    theirs = transformers.GenerationConfig(
        max_new_tokens=6, do_sample=False, top_k=10, num_assistant_tokens=20, begin_suppress_tokens=[7, 5000]
    )
    found = unspool.generate(model, **inputs, generation_config=theirs, eos_token_id=None)
    expected = unspool.generate(model, **inputs, **NEW | {"max_new_tokens": 6, "begin_suppress_tokens": [7]})
    assert torch.equal(found, expected)


def test_a_length_of_20_is_one_that_was_set() -> None:
    """transformers' default has the same number, and counts new tokens."""
    model, inputs = make_once("llama"), make_inputs()
    theirs = transformers.GenerationConfig(max_length=20, eos_token_id=96)
    assert unspool.generate(model, **inputs, generation_config=theirs).shape[1] == 20
    theirs = transformers.GenerationConfig(eos_token_id=96)
    assert unspool.generate(model, **inputs, generation_config=theirs).shape[1] == inputs["input_ids"].shape[1] + 20
    theirs = transformers.GenerationConfig(eos_token_id=96, max_length=13, max_new_tokens=4)
    assert unspool.generate(model, **inputs, generation_config=theirs).shape[1] == inputs["input_ids"].shape[1] + 4


@pytest.mark.parametrize("more", [{}, {"cache_implementation": "static"}])
def test_weights_of_an_attention_that_asks_its_config_are_those_of_the_text_before(more: dict[str, Any]) -> None:
    sizes = {**SIZES, "new_decoder_architecture": True, "num_kv_heads": 2}
    torch.manual_seed(3)
    model, eager = (
        transformers.FalconForCausalLM._from_config(
            transformers.FalconConfig(**sizes, initializer_range=0.4), attn_implementation=attention
        ).eval()
        for attention in ("sdpa", "eager")
    )
    eager.load_state_dict(model.state_dict())
    told = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True, "output_attentions": True, **more}
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
    expected = eager.generate(ids, **told)
    output = unspool.generate(model, ids, **told, native=False)
    assert torch.equal(output.sequences, expected.sequences)
    for mine, theirs in zip(output.attentions, expected.attentions, strict=True):
        for found, wanted in zip(mine, theirs, strict=True):
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
    assert model.config._attn_implementation == "sdpa"

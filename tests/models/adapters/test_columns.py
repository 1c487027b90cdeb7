"""Models of transformers over transformers' own caches, in the columns that its generate() uses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from tests.fuzz.beside import models as fuzzed
from tests.models.adapters.tiny import LLAMA, SIZES, make, make_inputs, make_once

import unspool
from unspool.errors import UnsupportedError

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")

NEW = {"max_new_tokens": 8, "eos_token_id": None}
IDS = torch.tensor([[5, 6, 7, 8, 9], [9, 8, 7, 6, 5]])
MINIMAX = {**LLAMA, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1, "block_size": 4}
LLAVA_VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(3)


def shake(model: Any) -> Any:
    """The model with weights that let its answers depend on what it reads."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.25)
    return model.eval()


class Marked(transformers.LlamaForCausalLM):
    """A model with an input that grows by one column when its rule for new tokens is applied."""

    def prepare_inputs_for_generation(self, input_ids: Any, marks: Any = None, **kwargs: Any) -> Any:
        return {**super().prepare_inputs_for_generation(input_ids, **kwargs), "marks": marks}

    def _update_model_kwargs_for_generation(self, outputs: Any, model_kwargs: Any, **kwargs: Any) -> Any:
        made = super()._update_model_kwargs_for_generation(outputs, model_kwargs, **kwargs)
        return {**made, "marks": torch.cat((made["marks"], made["marks"][:, -1:]), dim=1)}

    def forward(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        position_ids: Any = None,
        marks: Any = None,
        **kwargs: Any,
    ) -> Any:
        assert marks.shape == attention_mask.shape
        return super().forward(input_ids, attention_mask, position_ids, **kwargs)


def test_inputs_follow_every_new_column() -> None:
    model = shake(Marked(transformers.LlamaConfig(**LLAMA)))
    inputs = make_inputs()
    plain = unspool.generate(model, **inputs, marks=inputs["attention_mask"], **NEW)
    found = unspool.generate(model, **inputs, marks=inputs["attention_mask"], **NEW, use_cache=False)
    assert torch.equal(found, plain)
    expected = model.generate(**inputs, marks=inputs["attention_mask"], **NEW, do_sample=False)
    assert torch.equal(plain, expected)


def test_drafts_that_a_window_cannot_take_back() -> None:
    """Refused tokens leave a cache whose layers drop what is outside of their windows."""
    model, draft = make_once("gemma2"), make("gemma2")
    with torch.no_grad():
        draft.lm_head.weight.copy_(draft.lm_head.weight.roll(3, dims=0))
    ids = make_inputs()["input_ids"][2:]
    plain = unspool.generate(model, ids, **NEW)
    past = transformers.DynamicCache(config=model.config)
    found = unspool.generate(
        model, ids, past_key_values=past, assistant_model=draft, **NEW, return_dict_in_generate=True
    )
    assert "DynamicCache" in found.stats.path_reason
    assert torch.equal(found.sequences, plain)
    assert sum(found.speculation.drafted) > sum(found.speculation.accepted)


def test_a_cache_of_a_models_own_class_follows_the_beams() -> None:
    types = ["linear_attention", "full_attention", "linear_attention"]
    model = shake(transformers.MiniMaxForCausalLM(transformers.MiniMaxConfig(**MINIMAX, layer_types=types)))
    ids = make_inputs()["input_ids"][2:]
    settings = {**NEW, "num_beams": 3, "num_return_sequences": 3}
    anew = unspool.generate(model, ids, **settings, use_cache=False)
    assert torch.equal(unspool.generate(model, ids, **settings), anew)
    assert len(set(map(tuple, anew[:, -8:].tolist()))) == 3


def test_models_with_parts_beside_their_decoder() -> None:
    config = transformers.VipLlavaConfig(
        text_config={**LLAMA, "model_type": "llama"},
        vision_config={**LLAVA_VISION, "model_type": "clip_vision_model", "image_size": 8, "patch_size": 4},
        image_token_index=96,
    )
    model = shake(transformers.VipLlavaForConditionalGeneration(config))
    inputs = make_inputs()
    expected = model.generate(**inputs, **NEW, do_sample=False)
    found = unspool.generate(model, **inputs, **NEW, return_dict_in_generate=True)
    assert torch.equal(found.sequences, expected)
    assert "parts beside its text decoder" in found.stats.path_reason


def test_a_decoder_with_layers_for_pictures_reads_text_alone() -> None:
    """Its code looks into the cache for the pictures' keys."""
    config = transformers.models.mllama.configuration_mllama.MllamaTextConfig(
        **LLAMA, cross_attention_layers=[1], rope_parameters={"rope_type": "default", "rope_theta": 10000.0}
    )
    model = shake(transformers.MllamaForCausalLM(config))
    inputs = make_inputs()
    for more in ({}, {"num_beams": 3}, {"cache_implementation": "static"}):
        expected = model.generate(**inputs, **NEW, do_sample=False, **more)
        assert torch.equal(unspool.generate(model, **inputs, **NEW, **more), expected)


def test_labels_change_nothing() -> None:
    inputs = make_inputs()
    for name in ("mixtral", "bart"):
        plain = unspool.generate(make_once(name), **inputs, **NEW)
        assert torch.equal(unspool.generate(make_once(name), **inputs, labels=inputs["input_ids"], **NEW), plain)


def test_a_filler_past_the_vocabulary() -> None:
    model, inputs = make("llama"), make_inputs()
    model.generation_config.pad_token_id = 500
    ends = unspool.generate(make_once("llama"), **inputs, **NEW)[0, 14:15].tolist()
    found = unspool.generate(model, **inputs, max_new_tokens=8, eos_token_id=ends)
    assert found[0, 15:].tolist() == [500] * (found.shape[1] - 15)


def test_embeddings_are_read_once() -> None:
    """As in transformers, where use_cache=False has no effect on what follows embeddings."""
    model, ids = make_once("mixtral"), make_inputs()["input_ids"][2:]
    settings = {**NEW, "use_cache": False, "return_dict_in_generate": True, "output_hidden_states": True}
    embeds = model.get_input_embeddings()(ids).detach()
    found, expected = (
        run(inputs_embeds=embeds, **settings)
        for run in (lambda **given: unspool.generate(model, **given), model.generate)
    )
    assert torch.equal(found.sequences, expected.sequences)
    assert [step[0].shape for step in found.hidden_states] == [step[0].shape for step in expected.hidden_states]
    assert type(found.past_key_values) is type(expected.past_key_values)


def test_keys_and_values_of_different_widths_are_returned_so() -> None:
    model, ids = make_once("deepseek_v3"), make_inputs()["input_ids"][2:]
    settings = {**NEW, "return_dict_in_generate": True}
    found = unspool.generate(model, ids, **settings)
    expected = model.generate(ids, **settings, do_sample=False)
    for ours, theirs in zip(found.past_key_values.layers, expected.past_key_values.layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(ours.values, theirs.values, atol=1e-5, rtol=1e-5)
    more = unspool.generate(model, found.sequences, past_key_values=found.past_key_values, max_new_tokens=3)
    assert torch.equal(more, unspool.generate(model, ids, max_new_tokens=11, eos_token_id=None)[:, : more.shape[1]])


def test_a_step_is_compiled_if_the_first_token_is_the_last() -> None:
    model, ids = make("llama"), make_inputs()["input_ids"][2:]
    compiling = transformers.CompileConfig(backend="eager", fullgraph=False)
    unspool.generate(model, ids, max_new_tokens=1, compile_config=compiling, cache_implementation="static")
    assert hasattr(model, "_compiled_call")


@pytest.mark.parametrize("asked", [{}, {"max_cache_len": 20}, {"max_cache_len": 40}])
def test_a_static_cache_has_the_room_that_was_asked_for(asked: dict[str, int]) -> None:
    model, ids = make("llama"), make_inputs()["input_ids"][2:]
    settings = {**NEW, "cache_implementation": "static", "return_dict_in_generate": True}
    found = unspool.generate(model, ids, **settings, **asked).past_key_values
    needed = ids.shape[1] + NEW["max_new_tokens"] - 1
    assert found.get_max_length() == found.layers[0].keys.shape[2] == max(needed, asked.get("max_cache_len", 0))


def test_layers_that_hold_more_than_keys() -> None:
    config = transformers.Lfm2Config(**LLAMA, layer_types=["conv", "full_attention", "conv"], block_multiple_of=8)
    model = shake(transformers.Lfm2ForCausalLM(config))
    ids = make_inputs()["input_ids"][2:]
    expected = model.generate(ids, **NEW, do_sample=False)
    assert torch.equal(unspool.generate(model, ids, **NEW), expected)
    beams = {**NEW, "num_beams": 3}
    assert torch.equal(unspool.generate(model, ids, **beams), model.generate(ids, **beams, do_sample=False))


def test_a_row_without_ones_is_given_as_it_is() -> None:
    inputs = make_inputs(is_left=False)
    inputs["attention_mask"][1] = 0
    model = make_once("bart")
    expected = model.generate(**inputs, **NEW, do_sample=False)
    assert torch.equal(unspool.generate(model, **inputs, **NEW), expected)


def test_a_suggestion_about_tokens_gives_way_to_embeddings() -> None:
    model = make("llama")
    model.generation_config.encoder_no_repeat_ngram_size = 2
    embeds = model.get_input_embeddings()(make_inputs()["input_ids"]).detach()
    assert unspool.generate(model, inputs_embeds=embeds, **NEW).shape == (3, 8)
    with pytest.raises(unspool.SettingError, match="pass input_ids"):
        unspool.generate(model, inputs_embeds=embeds, **NEW, encoder_no_repeat_ngram_size=2)


def test_attention_code_of_a_models_own_reads_keys_as_it_likes() -> None:
    sizes = {name: value for name, value in SIZES.items() if name != "max_position_embeddings"}
    config = transformers.GPTNeoXJapaneseConfig(**sizes, intermediate_multiple_size=2)
    model = shake(transformers.GPTNeoXJapaneseForCausalLM(config))
    inputs = make_inputs()
    expected = model.generate(**inputs, **NEW, num_beams=2, do_sample=False)
    assert torch.equal(unspool.generate(model, **inputs, **NEW, num_beams=2), expected)


def test_end_tokens_that_a_model_does_not_have() -> None:
    model, inputs = make("llama"), make_inputs()
    model.generation_config.eos_token_id = [500, 501]
    found = unspool.generate(model, **inputs, max_new_tokens=8)
    assert torch.equal(found, unspool.generate(make_once("llama"), **inputs, **NEW))


def test_a_decoding_loop_of_a_models_own() -> None:
    class Looping(transformers.LlamaForCausalLM):
        def _sample(self, input_ids: Any, *_: Any, **__: Any) -> Any:
            return input_ids + 1

    model, ids = Looping(transformers.LlamaConfig(**LLAMA)).eval(), torch.tensor([[5, 6]])
    assert unspool.generate(model, ids, max_new_tokens=1).tolist() == [[6, 7]]
    with pytest.raises(unspool.UnsupportedError, match=r"_sample\(\) that is not transformers' own"):
        unspool.stream(model, ids)
    assert unspool.attach(model).generate(ids, max_new_tokens=1).tolist() == [[6, 7]]


def test_refused_drafts_of_rows_whose_columns_are_positions() -> None:
    """A masked column would move what follows it: one row at a time has none."""
    model, inputs = make_once("bart"), make_inputs(is_left=False)
    settings = {**NEW, "output_hidden_states": True, "return_dict_in_generate": True}
    plain = unspool.generate(model, input_ids=inputs["input_ids"][2:], **settings)
    drafted = {"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 1}
    found = unspool.generate(model, input_ids=inputs["input_ids"][2:], **settings, **drafted)
    assert torch.equal(found.sequences, plain.sequences)
    start = torch.ones(3, 1).long()
    with pytest.raises(unspool.SettingError, match="one prompt at a time"):
        unspool.generate(model, **inputs, decoder_attention_mask=start, **NEW, **drafted)


STREAMED = {
    **SIZES,
    "num_hidden_layers": 2,
    "num_key_value_heads": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "head_dim": 16,
    "partial_rotary_factor": 0.5,
    "q_lora_rank": 16,
    "o_groups": 2,
    "o_lora_rank": 8,
    "n_routed_experts": 4,
    "mlp_layer_types": ["moe", "moe"],
    "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"],
    "sliding_window": 8,
    "hc_mult": 2,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 2,
    "num_nextn_predict_layers": 0,
}


@pytest.mark.skipif(not hasattr(transformers, "DeepseekV4Config"), reason="this release has no DeepSeek V4")
@pytest.mark.parametrize("num_beams", [1, 2])
def test_hidden_states_with_streams_follow_rows(num_beams: int) -> None:
    model = shake(transformers.DeepseekV4ForCausalLM(transformers.DeepseekV4Config(**STREAMED)))
    ids = make_inputs()["input_ids"][1:]
    settings = {
        **NEW,
        "num_beams": num_beams,
        "num_return_sequences": 2,
        "do_sample": num_beams == 1,
        "return_dict_in_generate": True,
        "output_hidden_states": True,
    }
    found = unspool.generate(model, ids, **settings).hidden_states
    expected = model.generate(ids, **settings).hidden_states
    assert found[0][0].dim() == 4
    shapes = [[tuple(state.shape) for state in step] for step in expected]
    assert [[tuple(state.shape) for state in step] for step in found] == shapes
    for ours, theirs in zip(found[0], expected[0], strict=True):  # the prompt's: nothing was drawn before them
        torch.testing.assert_close(ours, theirs)


DOLA, CONTRASTIVE = {"dola_layers": [0, 1]}, {"penalty_alpha": 0.5, "top_k": 3}
ENDS = [4, 9, 17, 18, 19, 24, 25, 35, 37, 39, 42, 51, 54, 64, 65, 68, 71, 74, 77, 81, 82, 86, 90, 94, 96]


@pytest.mark.parametrize(
    ("name", "method"), [("gemma3n", DOLA), ("gemma3n", CONTRASTIVE), ("hy_v4", DOLA), ("qwen4_exp", DOLA)]
)
def test_methods_that_read_a_state_of_each_token_are_refused_where_it_has_several(name: str, method: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"one state per token|earlier layers|one for each token"):
        unspool.generate(fuzzed.make_again(name, 0, "sdpa"), IDS, **NEW, **method)


@pytest.mark.parametrize("name", ["mamba", "jamba", "zamba2"])
def test_states_of_rows_that_ended_have_read_padding(name: str) -> None:
    """A contrastive search reads what it takes; of rows that stay although they have ended that is padding."""
    model = fuzzed.make_again(name, 0, "eager")
    ids = torch.tensor([[83, 84, 51, 85, 54], [53, 93, 80, 93, 80], [47, 47, 32, 32, 96]])
    asked: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "native": False}
    first = unspool.generate(
        model, ids, **asked, **CONTRASTIVE, max_new_tokens=6, eos_token_id=ENDS, return_dict_in_generate=True
    )
    assert 1 <= int((first.sequences[:, -2] == 0).sum()) < 3
    text = torch.cat((first.sequences, torch.tensor([[16, 95]] * 3)), dim=1)
    told = {**asked, "attention_mask": torch.ones_like(text), "max_new_tokens": 5, "eos_token_id": None}
    found = unspool.generate(model, text, **told, past_key_values=first.past_key_values)
    assert torch.equal(found, unspool.generate(model, text, **told))


@pytest.mark.parametrize("kind", ["static", "offloaded", "offloaded_static", "hybrid"])
@pytest.mark.parametrize("name", ["gemma4", "mimo_v2_flash"])
def test_layers_with_keys_of_different_shapes_have_transformers_own_caches(name: str, kind: str) -> None:
    model = fuzzed.make_again(name, 0, "sdpa")
    plain = unspool.generate(model, IDS, **NEW)
    assert torch.equal(unspool.generate(model, IDS, **NEW, cache_implementation=kind), plain)
    assert torch.equal(model.generate(IDS, **NEW, do_sample=False), plain)
    with pytest.raises(UnsupportedError, match="keys of different shapes"):
        unspool.generate(model, IDS, **NEW, cache_implementation="paged")


def test_weights_over_a_static_cache_are_those_of_the_same_pass() -> None:
    """The mask over a static cache is made before the pass, and must be the one that eager attention adds."""
    model, inputs = shake(transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))), make_inputs()
    plain = {**inputs, **NEW, "native": False, "return_dict_in_generate": True, "output_logits": True}
    expected = unspool.generate(model, **plain)
    found = unspool.generate(model, **plain, cache_implementation="static", output_attentions=True)
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits), atol=1e-4, rtol=1e-4)


def test_padding_of_a_source_is_found_without_a_mask() -> None:
    pair = {"d_model": 16, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "encoder_layers": 2, "decoder_layers": 2}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "vocab_size": 97, "pad_token_id": 0}
    model = shake(transformers.BartForConditionalGeneration(transformers.BartConfig(**pair, **heads)))
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 0, 0]])
    asked = {**NEW, "native": False, "return_dict_in_generate": True, "output_logits": True, "output_attentions": True}
    found = unspool.generate(model, input_ids=ids, **asked)
    expected = unspool.generate(model, input_ids=ids, attention_mask=(ids != 0).long(), **asked)
    assert torch.equal(found.logits[0], expected.logits[0])
    assert [weights.shape for weights in found.encoder_attentions] == [(2, 2, 4, 4)] * 2
    assert float(found.encoder_attentions[0][1, :, :, 2:].max()) == 0


def make_states(kind: str) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": 0}
    if kind == "Mamba2":
        sizes |= {"num_heads": 8, "head_dim": 8, "n_groups": 2, "state_size": 16, "chunk_size": 16}
    return shake(getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**sizes)))


STATIC = {"cache_implementation": "static", "return_dict_in_generate": True}


@pytest.mark.parametrize("kind", ["Mamba", "Mamba2", "static"])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_prompt_that_is_to_be_read_in_pieces_is_read_whole(kind: str, size: int) -> None:
    model, told = (make("gpt2"), STATIC) if kind == "static" else (make_states(kind), {"return_dict_in_generate": True})
    inputs = make_inputs()
    expected = unspool.generate(model, **inputs, **NEW, **told)
    output = unspool.generate(model, **inputs, **NEW, **told, prefill_chunk_size=size)
    assert "own cache" in output.stats.path_reason
    assert torch.equal(output.sequences, expected.sequences)


def test_many_long_prompts_are_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = make_states("Mamba"), make_inputs()
    expected = unspool.generate(model, **inputs, **NEW, native=False)
    monkeypatch.setattr("unspool.decoding.reader.MOST_TOKENS_OF_A_PASS", 8)
    assert torch.equal(unspool.generate(model, **inputs, **NEW, native=False), expected)


def test_probabilities_of_a_prompt_that_is_read_whole_are_refused() -> None:
    with pytest.raises(unspool.UnsupportedError, match="after whole prompts alone"):
        unspool.generate(make("gpt2"), **make_inputs(), **NEW, **STATIC, prompt_logprobs=0)


@pytest.mark.parametrize("name", ["Mamba", "Mamba2", "gpt2", "llama", "gemma2", "mpt"])
@pytest.mark.parametrize("more", [{}, {"num_beams": 3, "num_return_sequences": 2}])
@pytest.mark.parametrize("has_negative", [False, True])
def test_guidance_over_transformers_caches(name: str, more: dict[str, Any], has_negative: bool) -> None:
    is_state = name.startswith("Mamba")
    model, told = (make_states(name), {"return_dict_in_generate": True}) if is_state else (make(name), STATIC)
    inputs = make_inputs()
    told = {**told, **NEW, **more, "guidance_scale": 2.0}
    if has_negative:
        ids = torch.tensor([[3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16], [9, 8, *[0] * 12], [7, 7, 7, *[0] * 11]])
        told |= {"negative_prompt_ids": ids, "negative_prompt_attention_mask": ids.ne(0).long()}
    output = unspool.generate(model, **inputs, **told, native=False)
    assert "own cache" in output.stats.path_reason
    free = {**told, "use_cache": False} if is_state else {**told, "cache_implementation": None}
    expected = unspool.generate(model, **inputs, **free, native=False)
    assert torch.equal(output.sequences, expected.sequences)


@pytest.mark.parametrize(("name", "drafter"), [("gpt2", "lookup"), ("llama", "gpt2"), ("opt", "gpt2")])
def test_drafts_that_a_static_cache_refuses_give_their_room_back(name: str, drafter: str) -> None:
    model = make_opt() if name == "opt" else make(name)
    told: dict[str, Any] = (
        {"prompt_lookup_num_tokens": 5} if drafter == "lookup" else {"assistant_model": make(drafter)}
    )
    ids = torch.tensor([[5, 6, 7, 5, 6, 7, 5, 6]])
    expected = unspool.generate(model, ids, **NEW, native=False)
    output = unspool.generate(model, ids, **NEW, **STATIC, **told, native=False)
    assert torch.equal(output.sequences, expected)
    assert output.speculation.accepted[0] < output.speculation.drafted[0]  # so something was refused


def make_opt() -> Any:
    config = transformers.OPTConfig(**SIZES, ffn_dim=48, word_embed_proj_dim=32)
    return shake(transformers.OPTForCausalLM(config))


def test_drafts_of_several_rows_over_a_static_cache_are_refused_before_the_first_pass() -> None:
    with pytest.raises(unspool.SettingError, match="has room for the answer's columns alone"):
        unspool.generate(make("gpt2"), **make_inputs(), **NEW, **STATIC, prompt_lookup_num_tokens=3)


def test_attention_weights_of_a_model_of_states_are_refused() -> None:
    with pytest.raises(unspool.UnsupportedError, match="can't return them"):
        unspool.generate(make_states("Mamba"), **make_inputs(), output_attentions=True, return_dict_in_generate=True)


def test_states_beside_a_negative_prompt_that_is_longer_are_refused() -> None:
    told = {**NEW, **STATIC, "guidance_scale": 2.0, "output_hidden_states": True}
    ids = torch.full((1, 13), 5)
    with pytest.raises(unspool.UnsupportedError, match="would shift the columns"):
        unspool.generate(make("gpt2"), **make_inputs(), **told, negative_prompt_ids=ids)
    output = unspool.generate(make("gpt2"), **make_inputs(), **told, negative_prompt_ids=ids[:, :12])
    assert output.hidden_states[0][0].shape[:2] == (3, 12)


STATES = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "pad_token_id": 0}
MAKERS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)),
    "mamba": lambda: transformers.MambaForCausalLM(transformers.MambaConfig(**STATES)),
    "mamba2": lambda: transformers.Mamba2ForCausalLM(
        transformers.Mamba2Config(**STATES, num_heads=8, head_dim=8, n_groups=1)
    ),
    "biogpt": lambda: transformers.BioGptForCausalLM(transformers.BioGptConfig(**SIZES, intermediate_size=48)),
}


@pytest.mark.parametrize("column", [0, 2, 5])
@pytest.mark.parametrize("name", MAKERS)
def test_pad_tokens_of_a_prompt_are_masked_as_a_mask_does_it(name: str, column: int) -> None:
    """A call that leaves the mask out and one that gives it run alike, with tokens and with their embeddings."""
    model = shake(MAKERS[name]())
    ids = torch.tensor([[5, 6, 7, 8, 9, 10], [11, 12, 13, 14, 15, 16]])
    ids[1, column] = 0
    expected = unspool.generate(model, ids, attention_mask=ids.ne(0).long(), **NEW)
    embeds = model.get_input_embeddings()(ids).detach()
    assert torch.equal(unspool.generate(model, ids, **NEW), expected)
    assert torch.equal(unspool.generate(model, ids, inputs_embeds=embeds, **NEW), expected)


@pytest.mark.parametrize("name", ["llama", "gemma2", "t5"])
def test_a_static_cache_with_too_little_room_is_refused_before_the_first_pass(name: str) -> None:
    model = make(name)
    config, ids = model.config.get_text_config(decoder=True), make_inputs()["input_ids"][2:]
    is_pair, width = name == "t5", ids.shape[1]
    own, source = (transformers.StaticCache(config=config, max_cache_len=room) for room in (width, width))
    past = transformers.EncoderDecoderCache(own, source) if is_pair else own
    text = {"input_ids": ids, "decoder_input_ids": torch.cat((torch.zeros_like(ids[:, :1]), ids[:, 1:]), dim=1)}
    with pytest.raises(unspool.SettingError, match=f"have room for {width} positions, and a prompt of {width} tokens"):
        unspool.generate(model, **(text if is_pair else {"input_ids": ids}), **NEW, past_key_values=past)

"""transformers objects that run natively on their own parameters, and objects with our generate."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from tests.copies import copy_by_pickle
from tests.fuzz.beside import models as fuzzed
from tests.models.adapters.tiny import LLAMA, PAIR, make

import unspool
from unspool import CompileConfig
from unspool.api.starting import start
from unspool.errors import SettingError
from unspool.models.adapters import ColumnModel, set_native, twin
from unspool.models.adapters.kept import find_kept
from unspool.models.registry import build_model
from unspool.models.sharing import SharedSource
from unspool.models.weights import MemorySource
from unspool.protocols import Want

transformers = pytest.importorskip("transformers")

IDS = torch.tensor([[5, 6, 7, 8], [1, 9, 8, 7]])
CALL: dict[str, Any] = {"max_new_tokens": 6, "eos_token_id": None, "do_sample": False}
HALVED: dict[str, dict[str, Any]] = {
    "LlamaConfig": {},
    "Qwen2Config": {},  # biases
    "Qwen3Config": {"head_dim": 32},  # norms of heads
    "Olmo2Config": {},  # norms over all heads
    "PhiConfig": {"num_key_value_heads": 4, "partial_rotary_factor": 0.5},
    "Phi3Config": {},  # a fused matrix
    "SmolLM3Config": {"no_rope_layers": [1, 0, 1]},
    "Gemma3TextConfig": {"head_dim": 16, "sliding_window": 5},
}


def generate(model: Any, **told: Any) -> Any:
    return unspool.generate(model, IDS, **CALL, **told, return_dict_in_generate=True)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "bloom"])
def test_an_object_runs_natively_and_stays_what_it_is(name: str) -> None:
    model = make(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    expected = generate(model, native=False)
    output = generate(model, native=True)
    assert torch.equal(output.sequences, expected.sequences)
    assert "own forward" not in output.stats.path_reason
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.equal(generate(model, native=False).sequences, expected.sequences)  # its forward reads the views
    for own, theirs in zip(output.past_key_values.layers, expected.past_key_values.layers, strict=True):
        torch.testing.assert_close(own.keys, theirs.keys, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(own.values, theirs.values, atol=1e-4, rtol=1e-4)


def make_whisper() -> Any:
    torch.manual_seed(0)
    named = {name: value for name, value in PAIR.items() if name != "max_position_embeddings"}
    sizes = {"num_mel_bins": 8, "max_source_positions": 50, "max_target_positions": 64}
    config = transformers.WhisperConfig(**named, **sizes, suppress_tokens=None, begin_suppress_tokens=None)
    return transformers.WhisperForConditionalGeneration(config).eval()


@pytest.mark.parametrize("name", ["bart", "t5", "marian", "whisper"])
def test_an_encoder_decoder_runs_natively_and_stays_what_it_is(name: str) -> None:
    model = make_whisper() if name == "whisper" else make(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    inputs = {"input_features": torch.randn(2, 8, 100)} if name == "whisper" else {"input_ids": IDS}
    expected, output = (
        unspool.generate(model, **inputs, **CALL, return_dict_in_generate=True, native=native)
        for native in (False, True)
    )
    assert torch.equal(output.sequences, expected.sequences)
    assert "own forward" in expected.stats.path_reason and "own forward" not in output.stats.path_reason
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    ours, theirs = ([*one.past_key_values.self_attention_cache.layers] for one in (output, expected))
    for own, other in zip(ours, theirs, strict=True) if name != "whisper" else ():
        torch.testing.assert_close(own.keys, other.keys, atol=1e-4, rtol=1e-4)
    with torch.no_grad():
        next(model.parameters()).mul_(1.5)
    changed = unspool.generate(model, **inputs, **CALL, native=False)
    assert torch.equal(unspool.generate(model, **inputs, **CALL, native=True), changed)


def test_a_bias_of_the_head_that_is_no_parameter_counts() -> None:
    model = make("bart")
    model.final_logits_bias[0, 11] = 100.0
    output = generate(model, native=True)
    assert "own forward" not in output.stats.path_reason and (output.sequences[:, 1:] == 11).all()


@pytest.mark.parametrize("name", ["glm4_moe", "dots1"])
def test_a_bias_of_experts_that_is_no_parameter_counts(name: str) -> None:
    model = copy.deepcopy(fuzzed.make(name, 0))
    biases = [buffer for key, buffer in model.named_buffers() if key.endswith("e_score_correction_bias")]
    answers = []
    for bias in (0.0, 100.0):
        for one in biases:
            one[2:] = bias  # the last two experts are chosen, or those that were
        output = generate(model, native=True)
        assert "own forward" not in output.stats.path_reason
        assert torch.equal(output.sequences, generate(model, native=False).sequences)
        answers.append(output.sequences.tolist())
    assert biases and answers[0] != answers[1]


@pytest.mark.parametrize("kind", ["Mamba", "Mamba2"])
def test_a_model_of_states_runs_natively_where_nobody_sees_them(kind: str) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "initializer_range": 0.3, "pad_token_id": 0}
    if kind == "Mamba2":
        sizes |= {"num_heads": 8, "head_dim": 8, "n_groups": 2, "state_size": 16, "chunk_size": 16}
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**sizes)).eval()
    run = start(model, IDS, **CALL)
    for _ in run:
        pass
    assert "own forward" not in run.stats.path_reason
    output = generate(model)  # with transformers' states
    assert "own forward" in output.stats.path_reason and isinstance(output.past_key_values, transformers.DynamicCache)
    assert torch.equal(run.sequences(), output.sequences)
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    padded = start(model, IDS, attention_mask=mask, **CALL)
    assert isinstance(padded.parts.model, ColumnModel)


def make_deep(kind: str) -> Any:
    """A model of many blocks of random weights in bfloat16: what one rounds, the next ones enlarge."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 48, "state_size": 16, "initializer_range": 0.7}
    if kind == "Mamba2":
        sizes |= {"num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 16}
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**sizes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("out_proj.weight"):
                parameter.mul_(8.0)
    return model.to(torch.bfloat16).eval()


@pytest.mark.parametrize("kind", ["Mamba", "Mamba2"])
def test_rounding_that_blocks_enlarge_is_no_other_model(kind: str) -> None:
    model = make_deep(kind)
    native, reason = twin.find_twin(model)
    assert native is not None, reason
    tokens = torch.arange(1, 7)[None]
    with torch.no_grad():
        own = model(tokens, use_cache=False).logits.float()
        found = native.forward(tokens, native.new_cache(), want=Want("all")).logits.float()
    assert (found - own).abs().amax() > 0.25 * own.abs().amax()  # so logits would say that it is another


@pytest.mark.parametrize("kind", ["Mamba", "Mamba2"])
@pytest.mark.parametrize("change", ["an activation", "a norm", "the last norm"])
def test_a_block_that_was_changed_by_hand_is_noticed(kind: str, change: str) -> None:
    model = make_deep(kind)
    block = model.backbone.layers[20]
    if change == "an activation":
        block.mixer.activation, block.mixer.act = "relu", torch.nn.ReLU()
    else:
        (block.norm if change == "a norm" else model.backbone.norm_f).variance_epsilon = 1e12
    native, reason = twin.find_twin(model)
    assert native is None and ", and made as" in reason


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "bart"])
def test_the_object_s_memory_is_left_alone(name: str) -> None:
    model = make(name)
    held = list(model.parameters())
    at = [(one.data_ptr(), one.stride(), one.untyped_storage().data_ptr(), one._version) for one in held]
    generate(model, native=True)
    assert all(one is other for one, other in zip(held, model.parameters(), strict=True))
    assert at == [(one.data_ptr(), one.stride(), one.untyped_storage().data_ptr(), one._version) for one in held]


def test_matrices_that_are_used_as_they_are_stay_where_they_are() -> None:
    model = make("llama")
    native, _ = twin.find_twin(model)
    layer, own = native.weights.layers[0], model.model.layers[0]
    for one, other in ((layer.out, own.self_attn.o_proj), (layer.down, own.mlp.down_proj)):
        assert one.weight.data_ptr() == other.weight.data_ptr()
    assert native.weights.embedding.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def test_copies_that_there_is_no_room_for_leave_the_object_s_own_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("llama")
    monkeypatch.setattr(twin, "find_room", lambda _device: 1000)
    output = generate(model, native=True)
    assert "copies of its stacked matrices take more than" in output.stats.path_reason
    assert torch.equal(output.sequences, generate(model, native=False).sequences)


# Compiling takes seconds, and the rest of its step is the plain one's: one kind, which turns a part of each head.
@pytest.mark.parametrize(("kind", "path"), [*product(HALVED, ("library", "plain")), ("PhiConfig", "compiled")])
def test_pairs_in_halves_are_rotated_as_neighbours_are(kind: str, path: str) -> None:
    """Queries and keys in the object's order, by every path, beside a model that has them in its own."""
    settings = {"compile_config": CompileConfig(backend="eager")} if path == "compiled" else {}
    torch.manual_seed(0)
    sizes = {**LLAMA, "initializer_range": 0.3, "num_attention_heads": 4, "hidden_size": 64}
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**(sizes | HALVED[kind]))).eval()
    held = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    config = model.config.to_dict() | {"architectures": [type(model).__name__]}
    own = build_model(config, MemorySource(held), device=torch.device("cpu"), dtype=torch.float32)
    with torch.no_grad():
        source = SharedSource(dict(model.named_parameters()))
        shared = build_model(config, source, device=torch.device("cpu"), dtype=torch.float32)
    assert any(layer.is_halved for layer in shared.weights.layers)
    assert not any(layer.is_halved for layer in own.weights.layers)
    outputs = []
    for native in (own, shared):
        native.paths = [] if path == "plain" else native.paths
        output = unspool.generate(native, IDS, **CALL, **settings, return_dict_in_generate=True, output_logits=True)
        outputs.append(output)
    torch.testing.assert_close(outputs[0].logits, outputs[1].logits)
    for layer in range(len(outputs[0].past_key_values)):  # both caches have keys in one order
        for one, other in zip(outputs[0].past_key_values[layer], outputs[1].past_key_values[layer], strict=True):
            torch.testing.assert_close(one, other)


def test_weights_that_change_are_noticed() -> None:
    model = make("llama")
    first = generate(model, native=True).sequences
    assert find_kept(model)["native"] is not None
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5).add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)) * 0.2)
    expected = generate(model, native=False).sequences
    assert not torch.equal(first, expected)
    assert torch.equal(generate(model, native=True).sequences, expected)


def test_what_is_written_past_torch_is_noticed_where_there_are_copies() -> None:
    """Writes through `.data` have no version; on a CPU matrices that are exact have copies in bfloat16."""
    model = make("llama")
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    first = generate(model, native=True).sequences
    for parameter in model.parameters():
        parameter.data.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)) * 0.2)
    expected = generate(model, native=False).sequences
    assert not torch.equal(first, expected)
    assert torch.equal(generate(model, native=True).sequences, expected)


def test_what_changes_a_forward_runs_through_the_adapter() -> None:
    model = make("llama")
    handle = model.model.layers[0].mlp.register_forward_hook(lambda *_: None)
    assert "model.layers.0.mlp has hooks" in generate(model, native=True).stats.path_reason
    handle.remove()
    assert "own forward" not in generate(model, native=True).stats.path_reason
    assert "has no native model" in generate(make("deepseek_v3"), native=True).stats.path_reason


def test_an_object_runs_natively_unless_told_otherwise() -> None:
    model = make("llama")
    set_native(model, None)
    output = unspool.generate(model, IDS, **CALL, return_dict_in_generate=True)
    assert "own forward" not in output.stats.path_reason
    assert isinstance(output, transformers.generation.GenerateDecoderOnlyOutput)
    assert isinstance(output.past_key_values, transformers.DynamicCache)
    own = unspool.generate(model, IDS, **CALL, return_dict_in_generate=True, native=False)
    assert "own forward" in own.stats.path_reason and torch.equal(own.sequences, output.sequences)
    model.__dict__["peft_config"] = {"default": object()}
    kept = unspool.generate(model, IDS, **CALL, return_dict_in_generate=True)
    assert "adapters (PEFT)" in kept.stats.path_reason


def test_why_it_can_not_be_is_found_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("llama")
    model.model.norm.variance_epsilon = 1e12
    generate(model, native=True)
    monkeypatch.setattr(twin, "build_model", lambda *_, **__: pytest.fail("built again"))
    assert "variance_epsilon" in generate(model, native=True).stats.path_reason


def test_a_setting_changed_by_hand_is_noticed_when_the_native_model_is_built() -> None:
    model = make("llama")
    model.model.norm.variance_epsilon = 1e12
    assert "variance_epsilon is 1000000000000.0, and made as 1e-06" in generate(model, native=True).stats.path_reason


def test_a_native_model_goes_with_its_object() -> None:
    model = make("llama")
    generate(model, native=True)
    native = weakref.ref(find_kept(model)["native"])
    del model
    gc.collect()
    assert native() is None


@pytest.mark.parametrize("native", [True, False])
def test_an_object_is_pickled_and_copied_without_what_was_made_for_it(native: bool) -> None:
    model = make("llama")
    expected = generate(model, native=native).sequences
    assert b"unspool." not in pickle.dumps(model)  # it is read where there is no unspool
    for other in (copy_by_pickle(model), copy.deepcopy(model)):
        assert not find_kept(other)
        assert torch.equal(generate(other, native=native).sequences, expected)
        with torch.no_grad():
            other.lm_head.weight.neg_()
        assert not torch.equal(generate(other, native=native).sequences, expected)
    attached = copy_by_pickle(unspool.attach(model, native=native))
    assert torch.equal(attached.generate(IDS, **CALL), expected)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("make_copy", [copy.copy, copy.deepcopy, copy_by_pickle, lambda one: copy.copy(copy.copy(one))])
def test_a_copy_of_an_attached_object_answers_for_itself(make_copy: Any, native: bool) -> None:
    """Its settings, its modules and whether it is attached are its own, and nothing of them reaches the object."""
    model = unspool.attach(make("llama"), native=native)
    expected = model.generate(IDS, **CALL)
    other = make_copy(model)
    assert torch.equal(other.generate(IDS, **CALL), expected)
    other.generation_config = transformers.GenerationConfig(max_new_tokens=2, pad_token_id=0)
    assert other.generate(IDS).shape[1] == IDS.shape[1] + 2 < model.generate(IDS).shape[1]
    other._modules = dict(other._modules)  # which copy.copy's shares
    other.lm_head = torch.nn.Linear(model.config.hidden_size, model.config.vocab_size, bias=False)
    found = other.generate(IDS, **CALL)
    assert not torch.equal(found, expected)
    assert torch.equal(model.generate(IDS, **CALL), expected)
    unspool.detach(other)
    assert torch.equal(other.generate(IDS, **CALL), found)  # transformers' own
    assert hasattr(model.generate(IDS, **CALL, return_dict_in_generate=True), "stats")


def test_a_copy_with_the_same_parameters_has_the_same_native_model() -> None:
    model = unspool.attach(make("llama"))
    expected = generate(model).sequences
    other = copy.copy(model)
    for one in (other, model, other):
        assert torch.equal(generate(one).sequences, expected)
    assert find_kept(other)["native"] is find_kept(model)["native"] and find_kept(other) is not find_kept(model)


def test_an_object_can_be_trained_after_a_call_in_inference_mode() -> None:
    model = make("llama")
    with torch.inference_mode():
        assert "own forward" not in generate(model, native=True).stats.path_reason
    model(IDS, labels=IDS).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_an_object_made_in_inference_mode() -> None:
    with torch.inference_mode():
        model = make("llama")
    expected = model.generate(IDS, **CALL)
    assert torch.equal(generate(model, native=True).sequences, expected)


@pytest.mark.parametrize("change", ["number", "buffer", "config"])
def test_what_is_changed_by_hand_between_calls_is_noticed(change: str) -> None:
    model = make("gemma2" if change == "config" else "llama")
    assert generate(model, native=True).stats.path_reason == ""
    if change == "number":
        model.model.norm.variance_epsilon = 5.0
    elif change == "buffer":
        model.model.rotary_emb.inv_freq.mul_(3.0)
    else:
        model.config.final_logit_softcapping = 0.01
    found = generate(model, native=True, output_logits=True)
    expected = model.generate(IDS, **CALL, return_dict_in_generate=True, output_logits=True)
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits), atol=1e-4, rtol=1e-4)


def put_layers(model: Any, places: Sequence[int]) -> None:
    """Let a model's (decoder's) layers be those of other places."""
    stack = model.get_decoder() if model.config.is_encoder_decoder else model.base_model
    name = next(name for name in ("layers", "h", "block") if hasattr(stack, name))
    layers = getattr(stack, name)
    setattr(stack, name, torch.nn.ModuleList(layers[place] for place in places))


ORDERS = [(name, places) for name in ("llama", "gpt2", "gemma2") for places in [(2, 1, 0), (0, 2), (0, 1)]]
ORDERS += [("llama", (1, 2)), ("llama", (1, 0, 2)), ("llama", (2, 0, 1)), ("bart", (1, 0)), ("t5", (1, 0))]


@pytest.mark.parametrize(("name", "places"), ORDERS)
@pytest.mark.parametrize("native", [True, False])
def test_layers_that_were_moved_or_taken_out(name: str, places: tuple[int, ...], native: bool) -> None:
    """Where a layer's keys are kept follows from its number, so a returned cache is transformers' own."""
    model = make(name)
    generate(model, native=native)  # what was made for the object before must not serve it after
    put_layers(model, places)
    asked: dict[str, Any] = {**CALL, "return_dict_in_generate": True}
    expected, output = model.generate(IDS, **asked), generate(model, native=native)
    assert torch.equal(output.sequences, expected.sequences)
    if places == tuple(range(len(places))) or model.config.is_encoder_decoder:
        return
    for own, theirs in zip(output.past_key_values.layers, expected.past_key_values.layers, strict=True):
        assert own.is_initialized == theirs.is_initialized
        if own.is_initialized:
            torch.testing.assert_close(own.keys, theirs.keys, atol=1e-4, rtol=1e-4)
    if name == "gemma2":  # whose masks transformers takes from layers that are no longer there
        return
    more = torch.cat([expected.sequences, IDS], dim=1)
    expected = model.generate(more, **asked, past_key_values=expected.past_key_values)
    output = unspool.generate(model, more, **asked, past_key_values=output.past_key_values, native=native)
    assert torch.equal(output.sequences, expected.sequences)


@pytest.mark.parametrize("places", [(0, 0, 1), (0, 1, 1), (0, 0, 2), (0, 1, 2, 2)])
def test_a_layer_that_stands_twice_is_never_read_from_a_native_model_made_before(places: tuple[int, ...]) -> None:
    model = make("llama")
    generate(model, native=True)
    put_layers(model, places)
    assert torch.equal(generate(model, native=True).sequences, model.generate(IDS, **CALL))


def test_a_wrapper_s_model_is_what_is_attached() -> None:
    model = make("llama")
    compiled = torch.compile(model, backend="eager")
    with pytest.raises(SettingError, match="attach the model that it wraps"):
        unspool.attach(compiled)
    unspool.attach(model)
    assert hasattr(compiled.generate(IDS, **CALL, return_dict_in_generate=True), "stats")  # ours


def test_attach_and_detach() -> None:
    model = make("llama")
    expected = model.generate(IDS, **CALL)
    assert unspool.attach(model) is model
    output = model.generate(IDS, **CALL, return_dict_in_generate=True)
    assert torch.equal(output.sequences, expected)
    assert isinstance(output, transformers.generation.GenerateDecoderOnlyOutput)
    assert "own forward" not in output.stats.path_reason
    unspool.detach(model)
    assert not hasattr(model.generate(IDS, **CALL, return_dict_in_generate=True), "stats")
    with pytest.raises(SettingError, match="takes a transformers model"):
        unspool.attach(3)


def test_attach_all_of_transformers() -> None:
    model = make("llama")
    expected = model.generate(IDS, **CALL)
    try:
        unspool.attach()
        unspool.attach()
        output = model.generate(IDS, **CALL, return_dict_in_generate=True)
    finally:
        unspool.detach()
    assert torch.equal(output.sequences, expected)
    assert output.stats.forward_passes == CALL["max_new_tokens"]
    assert not hasattr(model.generate(IDS, **CALL, return_dict_in_generate=True), "stats")

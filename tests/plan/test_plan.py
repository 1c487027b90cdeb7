"""From settings to a plan: who wins, who set what, and everything that is refused before the first pass."""

from __future__ import annotations

from typing import Any

import pytest
from tests.fakes import FakeLayers, FakeModel, make_tokenizer

import unspool
from unspool import (
    CompileConfig,
    GenerationConfig,
    WatermarkingConfig,
    generate,
)
from unspool.api.answer import FRIENDLY_DEFAULTS
from unspool.api.calls import start
from unspool.config import PARAMETERS
from unspool.config.structures import STRUCTURES
from unspool.decoding.run import Run
from unspool.errors import InputError, SettingError, UnspoolError, UnsupportedError
from unspool.logits.order import PROCESSORS
from unspool.plan import Plan, PromptShape, as_token_ids, merge, settle
from unspool.plan.refusals import OFF
from unspool.protocols import ModelInfo
from unspool.registry import resolve

INFO = ModelInfo("fake", 23, 4, 1, 1)
SHAPE = PromptShape(num_rows=2, width=5, longest=5)
SPOKEN = {
    "call": "in the call",
    "config": "in the generation_config given",
    "model": "by the model's generation_config.json",
}


def assign(**settings: Any) -> GenerationConfig:
    """A config with these settings, whatever they are together: what a model's file may hold."""
    config = GenerationConfig()
    for name, value in settings.items():
        setattr(config, name, value)
    return config


def plan_for(origin: str = "call", shape: PromptShape = SHAPE, info: ModelInfo = INFO, **settings: Any) -> Plan:
    """The plan of settings that all come from one origin."""
    layers = {"model": None, "config": None, "call": {}}
    layers[origin] = settings if origin == "call" else assign(**settings)
    return settle(*merge(layers["model"], layers["config"], layers["call"]), info, shape)


# --- who wins -----------------------------------------------------------------------------------------------


def test_the_later_layer_wins_and_is_known() -> None:
    of_model = assign(temperature=0.1, top_k=1, top_p=0.1)
    config = assign(temperature=0.2, top_k=2)
    settings, origins = merge(of_model, config, {"temperature": 0.3}, {"seed": 4})
    assert (settings.temperature, settings.top_k, settings.top_p, settings.seed) == (0.3, 2, 0.1, 4)
    assert [origins[name] for name in ("temperature", "top_k", "top_p", "seed")] == [
        "call",
        "config",
        "model",
        "default",
    ]
    assert {origins[name] for name in PARAMETERS if name not in ("temperature", "top_k", "top_p")} == {"default"}
    assert set(origins) == set(PARAMETERS)


def test_setting_a_default_is_setting_it() -> None:
    """A config that names a default overrides the model's file; one that does not leaves it alone."""
    of_model = assign(top_k=7, max_length=9)
    settings, origins = merge(of_model, GenerationConfig(top_k=50), {})
    assert (settings.top_k, origins["top_k"]) == (50, "config")
    assert (settings.max_length, origins["max_length"]) == (9, "model")
    settings, origins = merge(of_model, None, {"top_k": None})
    assert (settings.top_k, origins["top_k"]) == (None, "call")


def test_merging_changes_no_layer() -> None:
    of_model, config = assign(top_k=7), assign(top_k=8)
    merge(of_model, config, {"top_k": 9})
    assert (of_model.top_k, config.top_k) == (7, 8)


def test_the_plan_is_settled() -> None:
    plan = plan_for(do_sample=True, seed=[1, 2], eos_token_id=[3, 4], max_new_tokens=7, num_return_sequences=3)
    assert (plan.do_sample, plan.seeds, plan.eos_token_ids, plan.pad_token_id) == (True, (1, 2), (3, 4), 3)
    assert (plan.max_length, plan.max_new_tokens, plan.num_return_sequences) == (12, 7, 3)
    assert plan.cache_kind == "dynamic"
    assert plan.asked == {"do_sample", "seed", "eos_token_id", "max_new_tokens", "num_return_sequences"}
    assert plan_for("model", max_length=9).asked == frozenset()
    with pytest.raises(AttributeError):
        plan.max_length = 5


@pytest.mark.parametrize(
    ("settings", "pad"),
    [
        ({"pad_token_id": 5}, 5),
        ({"pad_token_id": 5, "eos_token_id": 6}, 5),
        ({"eos_token_id": [6, 7]}, 6),
        ({"eos_token_id": [-1, 7]}, 7),
        ({}, 0),
    ],
)
def test_padding_is_decided(settings: dict[str, Any], pad: int) -> None:
    assert plan_for(**settings).pad_token_id == pad


def test_token_ids_of_any_form() -> None:
    import numpy
    import torch

    for value in (5, [5], (5,), torch.tensor([5]), torch.tensor(5), numpy.int64(5)):
        assert as_token_ids(value, "eos_token_id", INFO) == (5,)
    assert as_token_ids(None, "eos_token_id", INFO) == ()
    with pytest.raises(SettingError, match="`eos_token_id`=23 is outside the model's vocabulary of 23"):
        as_token_ids([1, 23], "eos_token_id", INFO)


# --- length and context -------------------------------------------------------------------------------------


def test_friendly_defaults_replace_a_files_max_length_only() -> None:
    """The short way writes up to 256 tokens: a length that the model's file was saved with is no request."""

    def length(of_model: dict[str, Any], **call: Any) -> int:
        layers = merge(assign(**of_model), None, call, FRIENDLY_DEFAULTS)
        return settle(*layers, INFO, SHAPE).max_new_tokens

    assert length({}) == 256
    assert length({"max_length": 20}) == 256
    assert length({"max_new_tokens": 9}) == 9
    assert length({"max_length": 20}, max_length=12) == 7
    assert length({"max_length": 20}, max_new_tokens=3) == 3


@pytest.mark.parametrize("origin", ["call", "config", "model"])
def test_a_limit_below_the_prompt_is_refused(origin: str) -> None:
    with pytest.raises(SettingError) as error:
        plan_for(origin, max_length=5)
    assert "the prompt has 5 tokens and `max_length` is 5" in str(error.value)
    assert SPOKEN[origin] in str(error.value) and "max_new_tokens" in str(error.value)


def test_a_generation_needs_an_end() -> None:
    with pytest.raises(SettingError, match="needs an end"):
        plan_for(max_length=None)


SMALL = ModelInfo("fake", 23, 4, 1, 1, max_context=12)


@pytest.mark.parametrize("origin", ["call", "config"])
@pytest.mark.parametrize(("name", "value", "new"), [("max_new_tokens", 8, 8), ("max_length", 13, 8)])
def test_more_than_the_context_is_refused_when_asked_for(origin: str, name: str, value: int, new: int) -> None:
    with pytest.raises(
        SettingError, match=f"`{name}` asks for {new} new tokens after a prompt of 5.*max_new_tokens=7 fit"
    ):
        plan_for(origin, info=SMALL, **{name: value})
    assert plan_for(origin, info=SMALL, **{name: value - 1}).max_new_tokens == 7


def test_a_default_is_cut_at_the_context() -> None:
    assert plan_for(info=SMALL).max_new_tokens == 7
    assert plan_for("model", info=SMALL, max_length=500).max_new_tokens == 7
    assert plan_for(info=SMALL, max_new_tokens=None).max_new_tokens == 7  # None asks for nothing
    assert settle(*merge(None, None, {}, FRIENDLY_DEFAULTS), SMALL, SHAPE).max_new_tokens == 7


def test_padding_takes_no_context() -> None:
    padded = PromptShape(num_rows=2, width=40, longest=5)
    assert plan_for(info=SMALL, shape=padded, max_new_tokens=7).max_length == 47


def test_a_prompt_as_long_as_the_context() -> None:
    with pytest.raises(InputError, match="the prompt has 12 tokens and the model's context ends at 12"):
        plan_for(info=SMALL, shape=PromptShape(1, 12, 12), max_new_tokens=1)


# --- per row ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name, one in PARAMETERS.items() if one.may_be_per_row])
def test_a_value_a_row_needs_as_many_as_there_are_prompts(name: str) -> None:
    values = {"seed": 1, "top_k": 3, "min_length": 1, "min_new_tokens": 1, "watermarking_config": WatermarkingConfig()}
    value = values.get(name, EXAMPLES[name] if name in STRUCTURES else 0.5)
    extra = {"do_sample": True, "num_return_sequences": 2} | COMPANIONS.get(name, {})
    for num in (1, 3, 4):  # not the number of sequences either
        with pytest.raises(SettingError, match=f"`{name}` has {num} values for 2 prompts"):
            plan_for(**extra, **{name: [value] * num})
    assert getattr(plan_for(**extra, **{name: [value] * 2}).settings, name) == [value] * 2


def test_rows_are_bounded() -> None:
    with pytest.raises(SettingError, match="`num_return_sequences`=40000 for 2 prompts makes 80000 rows"):
        plan_for(do_sample=True, num_return_sequences=40_000)
    with pytest.raises(SettingError, match="`num_beams`=40000 for 2 prompts makes 80000 rows"):
        plan_for(num_beams=40_000)


# --- what is not built, and what has no effect --------------------------------------------------------------

COMPANIONS: dict[str, dict[str, Any]] = {
    "xtc_threshold": {"xtc_probability": 0.5},
    "mirostat_eta": {"mirostat_tau": 3.0},
    "dynatemp_exponent": {"dynatemp_range": 0.5},
    "dry_base": {"dry_multiplier": 0.8},
    "dry_allowed_length": {"dry_multiplier": 0.8},
    "dry_sequence_breakers": {"dry_multiplier": 0.8},
    "repetition_penalty_ignores_prompt": {"repetition_penalty": 1.2},
    "cache_config": {"cache_implementation": "static"},
    "max_cache_len": {"cache_implementation": "static"},
    "return_legacy_cache": {"return_dict_in_generate": True},
    "output_scores": {"return_dict_in_generate": True},
    "output_logits": {"return_dict_in_generate": True},
    "output_attentions": {"return_dict_in_generate": True},
    "output_hidden_states": {"return_dict_in_generate": True},
    "logprobs": {"return_dict_in_generate": True},
    "prompt_logprobs": {"return_dict_in_generate": True},
    "num_return_sequences": {"do_sample": True},
    "keep_stop_strings": {"stop_strings": "x"},
    "min_length": {"eos_token_id": 3},
    "min_new_tokens": {"eos_token_id": 3},
    "exponential_decay_length_penalty": {"eos_token_id": 3},
    "early_stopping": {"num_beams": 2},
    "length_penalty": {"num_beams": 2},
    "num_beam_groups": {"num_beams": 2, "diversity_penalty": 0.5},
    "diversity_penalty": {"num_beams": 2, "num_beam_groups": 2},
    "constraints": {"num_beams": 2},
    "force_words_ids": {"num_beams": 2},
    "return_beam_trace": {"num_beams": 2, "return_dict_in_generate": True},
    "low_memory": {"num_beams": 2},
    "strict_constraints": {"num_beams": 2, "force_words_ids": [[1, 2]]},
    "max_matching_ngram_size": {"prompt_lookup_num_tokens": 3},
    "num_assistant_tokens": {"assistant_model": FakeModel(160)},
    "num_assistant_tokens_schedule": {"assistant_model": FakeModel(160)},
    "assistant_confidence_threshold": {"assistant_model": FakeModel(160)},
    "drafter": {"regex": "abc", "eos_token_id": 2},
    **{name: {"eos_token_id": 2} for name in STRUCTURES},
}

# A value that is not the neutral one, for every setting there is: a new one must be thought of here.
EXAMPLES: dict[str, Any] = {
    "max_length": 9,
    "max_new_tokens": 3,
    "min_length": 4,
    "min_new_tokens": 2,
    "early_stopping": True,
    "max_time": 5.0,
    "stop_strings": "x",
    "do_sample": True,
    "num_beams": 2,
    "num_beam_groups": 2,
    "penalty_alpha": 0.6,
    "dola_layers": "low",
    "use_cache": False,
    "cache_implementation": "static",
    "cache_config": {"max_cache_len": 8},
    "return_legacy_cache": True,
    "prefill_chunk_size": 2,
    "temperature": 0.5,
    "top_k": 3,
    "top_p": 0.5,
    "min_p": 0.2,
    "typical_p": 0.5,
    "epsilon_cutoff": 0.1,
    "eta_cutoff": 0.1,
    "diversity_penalty": 0.5,
    "repetition_penalty": 1.2,
    "encoder_repetition_penalty": 1.2,
    "length_penalty": 2.0,
    "no_repeat_ngram_size": 2,
    "bad_words_ids": [[1, 2]],
    "force_words_ids": [[1, 2]],
    "renormalize_logits": True,
    "constraints": ["a constraint"],
    "forced_bos_token_id": 4,
    "forced_eos_token_id": 4,
    "remove_invalid_values": True,
    "exponential_decay_length_penalty": (2, 1.5),
    "suppress_tokens": [4],
    "begin_suppress_tokens": [4],
    "forced_decoder_ids": [[1, 4]],
    "sequence_bias": [[[4], 1.0]],
    "token_healing": True,
    "guidance_scale": 2.0,
    "low_memory": True,
    "watermarking_config": WatermarkingConfig(),
    "num_return_sequences": 2,
    "output_attentions": True,
    "output_hidden_states": True,
    "output_scores": True,
    "output_logits": True,
    "return_dict_in_generate": True,
    "pad_token_id": 4,
    "bos_token_id": 4,
    "eos_token_id": 4,
    "encoder_no_repeat_ngram_size": 2,
    "decoder_start_token_id": 4,
    "num_assistant_tokens": 4,
    "num_assistant_tokens_schedule": "heuristic",
    "assistant_confidence_threshold": 0.5,
    "prompt_lookup_num_tokens": 3,
    "max_matching_ngram_size": 3,
    "assistant_early_exit": 1,
    "assistant_lookbehind": 3,
    "target_lookbehind": 3,
    "compile_config": CompileConfig(),
    "disable_compile": True,
    "generation_kwargs": {"some": "thing"},
    "seed": 7,
    "logprobs": 1,
    "prompt_logprobs": 1,
    "return_beam_trace": True,
    "keep_stop_strings": True,
    "max_cache_len": 40,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty_ignores_prompt": True,
    "logit_bias": {4: 1.0},
    "dry_multiplier": 0.8,
    "dry_base": 1.5,
    "dry_allowed_length": 3,
    "dry_sequence_breakers": [4],
    "top_h": 0.5,
    "top_n_sigma": 1.0,
    "top_a": 0.5,
    "xtc_probability": 0.5,
    "xtc_threshold": 0.2,
    "mirostat_tau": 3.0,
    "mirostat_eta": 0.3,
    "dynatemp_range": 0.5,
    "dynatemp_exponent": 2.0,
    "strict_constraints": True,
    "speculate": "auto",
    "compile": True,
    "json_schema": {"type": "boolean"},
    "json_object": True,
    "regex": "a+",
    "choice": ["yes", "no"],
    "grammar": 'start: "a" | "b"',
    "structural_tag": {"triggers": ["<"], "structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}]},
    "drafter": "grammar",
}

# What the flow itself applies (each has its own tests), and what asks for the way things are.
APPLIED = {
    "max_length",
    "max_new_tokens",
    "max_time",
    "stop_strings",
    "keep_stop_strings",
    "do_sample",
    "seed",
    "num_return_sequences",
    "use_cache",
    "cache_implementation",
    "max_cache_len",
    "return_legacy_cache",
    "prefill_chunk_size",
    "return_dict_in_generate",
    "output_attentions",
    "output_hidden_states",
    "output_scores",
    "output_logits",
    "logprobs",
    "prompt_logprobs",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "decoder_start_token_id",
    "token_healing",
    "num_beams",
    "early_stopping",
    "length_penalty",
    "num_beam_groups",
    "diversity_penalty",
    "constraints",
    "force_words_ids",
    "return_beam_trace",
    "low_memory",
    "strict_constraints",
    "dola_layers",
    "guidance_scale",
    "prompt_lookup_num_tokens",
    "max_matching_ngram_size",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "assistant_confidence_threshold",
    "speculate",
    "drafter",
    "penalty_alpha",
}
NEUTRAL = {"disable_compile"}
BY_PROCESSORS = {name for entry in PROCESSORS.values() for name in (entry.setting, *entry.reads) if name in PARAMETERS}
SAMPLING = {entry.setting for entry in PROCESSORS.values() if entry.stage == "sampling"}


def test_every_setting_has_an_example_that_is_not_the_default() -> None:
    assert set(EXAMPLES) == set(PARAMETERS)
    for name, value in EXAMPLES.items():
        default = PARAMETERS[name].default
        assert type(value) is not type(default) or value != default, name


def prepare(name: str, model: FakeModel, prompt: list[list[int]]) -> Run:
    extra = dict(COMPANIONS.get(name, {}))
    if name in SAMPLING | {"xtc_threshold", "mirostat_eta", "dynatemp_exponent"}:
        extra["do_sample"] = True
    return start(model, prompt, tokenizer=make_tokenizer(), **extra, **{name: EXAMPLES[name]})


@pytest.mark.parametrize("name", PARAMETERS)
def test_no_setting_passes_silently(name: str) -> None:
    """What a call asks for is applied, or the call fails naming it; only what changes nothing may go by."""
    model = FakeLayers(160)
    prompt = [[70]] if name == "forced_bos_token_id" else [[70, 71]]
    try:
        run = prepare(name, model, prompt)
    except UnspoolError as error:
        assert name not in NEUTRAL and name in str(error)
        assert model.num_passes == 0
        return
    assert name in APPLIED | NEUTRAL | BY_PROCESSORS
    if name in PROCESSORS:
        kinds = [type(processor) for processor in run._processors]
        assert any(issubclass(kind, resolve(PROCESSORS[name].processor)) for kind in kinds)


@pytest.mark.parametrize("origin", ["call", "config", "model"])
@pytest.mark.parametrize("name", OFF)
def test_what_is_not_built_is_refused_with_its_value_and_origin(name: str, origin: str) -> None:
    value = EXAMPLES[name]
    extra = {"cache_implementation": "static"} if name == "cache_config" else {}
    with pytest.raises(UnsupportedError) as error:
        plan_for(origin, **extra, **{name: value})
    off, feature = OFF[name]
    for part in (f"`{name}`={value!r}", SPOKEN[origin], feature, f"pass {name}={off!r}"):
        assert part in str(error.value)
    for neutral in (off, None):  # the way out that the message names
        assert plan_for(origin, **extra, **{name: neutral}).max_new_tokens == 20


@pytest.mark.parametrize(
    ("name", "value"), [("guidance_scale", 1), ("penalty_alpha", 0), ("low_memory", False), ("num_beams", 1)]
)
def test_other_ways_to_say_off(name: str, value: Any) -> None:
    assert plan_for(**{name: value}).max_new_tokens == 20


def test_the_call_can_switch_off_what_a_models_file_asks_for() -> None:
    model = FakeModel()
    name, (off, _) = next(iter(OFF.items()))
    model.generation_config = assign(**{name: EXAMPLES[name]}, max_length=8)
    with pytest.raises(UnsupportedError, match=rf"`{name}`=.*, set by the model's generation_config\.json"):
        generate(model, [[1, 2]])
    assert model.num_passes == 0
    assert generate(model, [[1, 2]], **{name: off}).shape == (1, 8)


@pytest.mark.parametrize("name", sorted(SAMPLING))
def test_sampling_settings_without_sampling(name: str) -> None:
    """Asked for, they are a mistake; in a model's file they are advice for those who sample."""
    for origin in ("call", "config"):
        with pytest.raises(SettingError) as error:
            plan_for(origin, **{name: EXAMPLES[name]})
        assert f"`{name}` was set {SPOKEN[origin]}" in str(error.value)
        assert "do_sample=True" in str(error.value)
    assert plan_for("model", **{name: EXAMPLES[name]}).do_sample is False


BEAMS = {
    "early_stopping",
    "length_penalty",
    "num_beam_groups",
    "diversity_penalty",
    "constraints",
    "force_words_ids",
    "return_beam_trace",
    "low_memory",
}


@pytest.mark.parametrize("name", sorted(BEAMS))
def test_beam_settings_without_beams(name: str) -> None:
    for origin in ("call", "config"):
        with pytest.raises(UnspoolError, match=f"`{name}`"):
            plan_for(origin, **{name: EXAMPLES[name]})
    if name in ("early_stopping", "length_penalty", "low_memory"):  # advice for those who search with beams
        assert plan_for("model", **{name: EXAMPLES[name]}).max_new_tokens == 20


# What steers a drafter, and the drafter that must be there.
STEERING = {
    "num_assistant_tokens": "assistant_model",
    "num_assistant_tokens_schedule": "assistant_model",
    "assistant_confidence_threshold": "assistant_model",
    "max_matching_ngram_size": "prompt_lookup_num_tokens",
    "assistant_lookbehind": "assistant_model",
    "target_lookbehind": "assistant_model",
}


@pytest.mark.parametrize("name", STEERING)
def test_drafting_settings_without_a_drafter(name: str) -> None:
    """Asked for, they are a mistake; in a model's file they are advice for those who draft."""
    for origin in ("call", "config"):
        with pytest.raises(SettingError, match=rf"`{name}`=.* steers .*{STEERING[name]}"):
            plan_for(origin, **{name: EXAMPLES[name]})
    assert plan_for("model", **{name: EXAMPLES[name]}).drafting is None
    assert plan_for(**{name: None}).drafting is None


@pytest.mark.parametrize("name", ["output_scores", "output_logits", "output_attentions", "output_hidden_states"])
def test_outputs_need_an_output_object(name: str) -> None:
    with pytest.raises(SettingError, match="return_dict_in_generate=True"):
        plan_for(**{name: True})


@pytest.mark.parametrize(
    ("asked", "near"),
    [("temprature", "temperature"), ("max_tokens", "max_new_tokens"), ("num_beam", "num_beams"), ("topk", "top_k")],
)
def test_an_unknown_setting_names_the_near_one(asked: str, near: str) -> None:
    with pytest.raises(SettingError, match=f"no setting {asked!r}; did you mean {near!r}"):
        generate(FakeModel(), [[1, 2]], **{asked: 1})


@pytest.mark.parametrize("name", ["pixel_values", "images"])
def test_a_picture_where_none_is_taken(name: str) -> None:
    with pytest.raises(SettingError, match=f"no setting '{name}': this model takes no pictures"):
        merge(None, None, {name: [0]})


def test_an_unknown_setting_with_nothing_near() -> None:
    with pytest.raises(SettingError, match=r"no setting 'qqqq'$"):
        merge(None, None, {"qqqq": 1})


# --- caches -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["hybrid_chunked", "offloaded_hybrid_chunked"])
def test_kinds_of_cache_that_are_not_there(kind: str) -> None:
    with pytest.raises(UnsupportedError, match=f"`cache_implementation`='{kind}', set in the call, is a kind"):
        plan_for(cache_implementation=kind)


@pytest.mark.parametrize(
    ("kind", "reason"), [("sliding_window", "has no sliding window"), ("sink", "learned one by one")]
)
def test_kinds_that_a_model_has_no_use_for(kind: str, reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        plan_for(cache_implementation=kind)


def test_what_a_cache_is_told() -> None:
    static = {"cache_implementation": "static"}
    assert plan_for(**static, cache_config={"max_cache_len": 64}).cache_config == {"max_cache_len": 64}
    assert plan_for(**static, cache_config=unspool.StaticCacheConfig(2, 64)).cache_config["batch_size"] == 2
    with pytest.raises(SettingError, match=r"'max_cache_length', and a 'static' cache takes .* did you mean"):
        plan_for(**static, cache_config={"max_cache_length": 64})
    with pytest.raises(SettingError, match="is for a 'quantized' cache and `cache_implementation` is 'static'"):
        plan_for(**static, cache_config={"cache_implementation": "quantized"})
    with pytest.raises(SettingError, match="whole number above 0, not 'many'"):
        plan_for(**static, cache_config={"max_cache_len": "many"})
    with pytest.raises(SettingError, match=r"max_cache_len'\]`=11 is too little .* at least 12 are needed, 1 more"):
        plan_for(**static, cache_config={"max_cache_len": 11}, max_new_tokens=7)
    with pytest.raises(SettingError, match="is no folder"):
        plan_for(cache_implementation="offloaded", cache_config={"folder": "/no/such/place"})
    with pytest.raises(SettingError, match="lets positions go"):
        plan_for(cache_implementation="hybrid", output_attentions=True, return_dict_in_generate=True)


@pytest.mark.parametrize("kind", ["hybrid", "sliding_window"])
def test_a_models_file_may_ask_to_save_memory(kind: str) -> None:
    assert plan_for("model", cache_implementation=kind).cache_kind == "dynamic"


def test_static_caches_have_room() -> None:
    assert plan_for(cache_implementation="static", max_cache_len=12, max_new_tokens=7).cache_kind == "static"
    with pytest.raises(SettingError, match="`max_cache_len`=11 is too little for a prompt of 5 tokens and 7 new"):
        plan_for(cache_implementation="static", max_cache_len=11, max_new_tokens=7)
    with pytest.raises(SettingError, match="the cache is dynamic"):
        plan_for(max_cache_len=40)


def test_without_a_cache_its_kind_is_no_question() -> None:
    with pytest.raises(SettingError, match="`use_cache` is `False`"):
        plan_for(use_cache=False, cache_implementation="static")
    with pytest.raises(SettingError, match="which can't hold a static cache"):
        plan_for(cache_implementation="static", return_legacy_cache=True, return_dict_in_generate=True)

"""Every setting is applied or refused: what can not be followed, and what has no effect beside the others."""

from __future__ import annotations

from typing import Any

import pytest
from tests.fakes import FakeLayers, FakeModel, make_tokenizer
from tests.plan.examples import COMPANIONS, EXAMPLES
from tests.plan.plans import SPOKEN, assign, plan_for

from unspool import generate
from unspool.api.starting import start
from unspool.config import PARAMETERS, GenerationConfig
from unspool.config.hosted import FOREIGN
from unspool.decoding.run import Run
from unspool.errors import SettingError, UnspoolError, UnsupportedError
from unspool.logits.order import PROCESSORS
from unspool.plan import merge
from unspool.plan.refusals import OFF
from unspool.registry import resolve

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
        kinds = [type(processor) for processor in run.parts.processors]
        assert any(issubclass(kind, resolve(PROCESSORS[name].processor)) for kind in kinds)


@pytest.mark.parametrize("origin", ["call", "config", "model"])
@pytest.mark.parametrize("name", OFF)
def test_what_is_not_followed_is_refused_with_its_value_and_origin(name: str, origin: str) -> None:
    value = EXAMPLES[name]
    extra = {"cache_implementation": "static"} if name == "cache_config" else {}
    with pytest.raises(UnsupportedError) as error:
        plan_for(origin, **extra, **{name: value})
    off, reason = OFF[name]
    for part in (f"`{name}`={value!r}", SPOKEN[origin], reason, f"pass `{name}={off!r}`"):
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
    with pytest.raises(SettingError, match="`return_dict_in_generate=True`"):
        plan_for(**{name: True})


@pytest.mark.parametrize(
    ("asked", "near"),
    [
        *(
            ("temprature", "temperature"),
            ("max_tokens", "max_new_tokens"),
            ("num_beam", "num_beams"),
            ("topk", "top_k"),
        ),
        *(("stop", "stop_strings"), ("logit_processor", "logits_processor"), ("attention_msk", "attention_mask")),
        *(("assistant_modle", "assistant_model"), ("streamr", "streamer"), ("tool", "tools")),
    ],
)
def test_an_unknown_setting_names_the_near_one(asked: str, near: str) -> None:
    with pytest.raises(SettingError, match=f"no setting {asked!r}; did you mean {near!r}"):
        generate(FakeModel(), [[1, 2]], **{asked: 1})


@pytest.mark.parametrize("name", ["language", "return_timestamps"])
def test_what_is_for_speech_is_said_to_be(name: str) -> None:
    with pytest.raises(SettingError, match=f"no setting {name!r}: it is for models of speech"):
        generate(FakeModel(), [[1, 2]], **{name: 1})


@pytest.mark.parametrize("name", ["pixel_values", "images"])
def test_a_picture_where_none_is_taken(name: str) -> None:
    with pytest.raises(SettingError, match=f"no setting '{name}': this model takes no pictures"):
        merge(None, None, {name: [0]})


def test_an_unknown_setting_with_nothing_near() -> None:
    with pytest.raises(SettingError, match=r"no setting 'qqqq'$"):
        merge(None, None, {"qqqq": 1})


@pytest.mark.parametrize("name", FOREIGN)
def test_settings_of_transformers_that_unspool_has_not_are_refused_by_name(name: str) -> None:
    model = FakeModel()
    for value in (None, False):  # which ask for nothing
        assert generate(model, [[1, 2]], max_new_tokens=2, **{name: value}).shape == (1, 4)
        assert generate(model, [[1, 2]], GenerationConfig(max_new_tokens=2, **{name: value})).shape == (1, 4)
    passes = model.num_passes
    for given in ({name: 0.5}, {"generation_config": GenerationConfig(max_new_tokens=2, **{name: 0.5})}):
        with pytest.raises(SettingError, match=rf"`{name}`.* setting of transformers'.*: {FOREIGN[name][:30]}"):
            generate(model, [[1, 2]], **given)
    assert model.num_passes == passes

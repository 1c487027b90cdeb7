"""The settings that switch processors on: their order and their errors."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from tests.fakes import FakeModel, pad_left

import unspool
from unspool import (
    ClassifierFreeGuidanceLogitsProcessor,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    NoTokenLeftError,
    SettingError,
    TemperatureLogitsWarper,
    generate,
)
from unspool.config.parameters import PARAMETERS
from unspool.config.structures import STRUCTURES
from unspool.logits.building import Context
from unspool.logits.order import PROCESSORS
from unspool.logits.pipeline import build_processors
from unspool.registry import find_name

VOCAB, EOS = 23, 2
ROWS = [[1, 2, 3], [4, 5, 6, 7, 8], [9]]
SAMPLED = {"do_sample": True, "top_k": 0}
CONTROL = {
    "sequence_bias": [[[3], 1.0]],
    "encoder_repetition_penalty": 1.2,
    "repetition_penalty": 1.2,
    "no_repeat_ngram_size": 2,
    "encoder_no_repeat_ngram_size": 2,
    "bad_words_ids": [[3]],
    "min_length": 3,
    "min_new_tokens": 3,
    "forced_bos_token_id": 1,
    "forced_eos_token_id": 2,
    "remove_invalid_values": True,
    "exponential_decay_length_penalty": (3, 1.2),
    "suppress_tokens": [4],
    "begin_suppress_tokens": [5],
}
SAMPLING = {
    "temperature": 0.5,
    "top_h": 0.5,
    "top_k": 5,
    "top_p": 0.5,
    "min_p": 0.1,
    "typical_p": 0.5,
    "epsilon_cutoff": 0.1,
    "eta_cutoff": 0.1,
}


class AddsOne(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + 1


def build(settings: dict[str, Any], **context: Any) -> list[str]:
    known = {
        "num_rows": 2,
        "vocab_size": VOCAB,
        "prompt_width": 3,
        "max_length": 20,
        "eos_token_ids": (EOS,),
        "encoder_input_ids": torch.zeros(2, 3, dtype=torch.long),
    }
    processors = build_processors(GenerationConfig(**settings), Context(**known | context))
    return [type(processor).__name__ for processor in processors]


@pytest.mark.parametrize("given", [{"min_length": 8}, {"min_length": 8, "min_new_tokens": 0}, {"min_new_tokens": 4}])
@pytest.mark.parametrize("reads", ["input_ids", "inputs_embeds"])
def test_least_lengths_are_the_references(given: dict[str, int], reads: str) -> None:
    """A `min_new_tokens` of 0 overrides `min_length` too, and that counts the positions of embeddings."""
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=VOCAB, n_embd=8, n_layer=1, n_head=1))
    ids = torch.tensor([[1, 2, 3]])
    first = int(model.eval()(ids).logits[0, -1].argmax())
    prompt = {"input_ids": ids} if reads == "input_ids" else {"inputs_embeds": model.transformer.wte(ids)}
    call = {**prompt, **given, "max_new_tokens": 9, "eos_token_id": first, "pad_token_id": 0, "do_sample": False}
    assert generate(model, **call).tolist() == model.generate(**call).tolist()


@pytest.mark.parametrize("left_out", ["min_length", "min_new_tokens"])  # the second overrides the first
def test_order_is_the_references(left_out: str) -> None:
    settings = CONTROL | SAMPLING | {"do_sample": True, "renormalize_logits": True}
    del settings[left_out]
    config = transformers.GenerationConfig(**settings)
    config._eos_token_tensor = torch.tensor([EOS])
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=VOCAB, n_embd=8, n_layer=1, n_head=1))
    theirs = model._get_logits_processor(
        config,
        input_ids_seq_length=3,
        encoder_input_ids=torch.zeros(2, 3, dtype=torch.long),
        prefix_allowed_tokens_fn=lambda row, ids: [1],
        logits_processor=transformers.LogitsProcessorList([AddsOne()]),
        device="cpu",
    )
    mine = build(settings, custom=(AddsOne(),), prefix_allowed_tokens_fn=lambda row, ids: [1])
    ours = {"SuppressTokensBehindForcedOnes": "SuppressTokensAtBeginLogitsProcessor"}  # beside forced_bos_token_id
    assert [ours.get(name, name) for name in mine] == [type(processor).__name__ for processor in theirs]


def test_each_setting_switches_its_processor_on_and_its_neutral_value_off() -> None:
    given = (
        CONTROL
        | SAMPLING
        | {
            "renormalize_logits": True,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.5,
            "logit_bias": {"3": 1.0},
            "dry_multiplier": 0.5,
            "top_n_sigma": 1.0,
            "top_a": 0.1,
            "xtc_probability": 0.5,
            "mirostat_tau": 3.0,
            "dynatemp_range": 0.2,
        }
    )
    # Beams; an argument of generate(); one processor for each kind of mark (tests/watermark).
    not_here = {"diversity_penalty", "prefix_allowed_tokens_fn", "watermarking_config"}
    not_here |= {"max_thinking_tokens", *STRUCTURES}  # tests/thoughts, tests/grammar
    assert set(given) | not_here == {entry.setting for entry in PROCESSORS.values()}
    for entry in PROCESSORS.values():
        if entry.setting in not_here:
            continue
        plain = SAMPLED if entry.stage == "sampling" else {}
        assert build(plain | {entry.setting: given[entry.setting]}) == [find_name(entry.processor)]
        for neutral in (*entry.off, PARAMETERS[entry.setting].default):
            if entry.setting != "top_k" or neutral == 0:
                assert build(plain | {entry.setting: neutral}) == []
    assert (
        build({"min_length": 3, "min_new_tokens": 3, "exponential_decay_length_penalty": (1, 2.0)}, eos_token_ids=())
        == []
    )


@pytest.mark.parametrize(("forced", "begin"), [(None, 1), (-1, 1), (4, 2)])
def test_a_forced_start_that_is_off_moves_no_begin(forced: int | None, begin: int) -> None:
    config = GenerationConfig(begin_suppress_tokens=[5], forced_bos_token_id=forced)
    *_, suppressing = build_processors(config, Context(2, VOCAB, 1, 20))
    assert suppressing.begin_index == begin


def test_one_value_a_prompt_is_repeated_for_its_sequences() -> None:
    config = GenerationConfig(do_sample=True, temperature=[0.5, 2.0], top_k=0)
    (warper,) = build_processors(config, Context(4, VOCAB, 3, 20))
    assert warper.temperature.tolist() == [0.5, 0.5, 2.0, 2.0]


def test_a_custom_processor_takes_the_place_of_the_models_own() -> None:
    own = unspool.RepetitionPenaltyLogitsProcessor(1.7)
    assert build({"repetition_penalty": 1.2, "no_repeat_ngram_size": 2}, custom=(AddsOne(), own)) == [
        "RepetitionPenaltyLogitsProcessor",
        "NoRepeatNGramLogitsProcessor",
        "AddsOne",
    ]
    with pytest.raises(SettingError, match="`repetition_penalty` and a RepetitionPenaltyLogitsProcessor"):
        build({"repetition_penalty": 1.2}, custom=(own,), asked=frozenset({"repetition_penalty"}))


# --- errors, before the first pass ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"repetition_penalty": 0.0}, "`repetition_penalty`=0.0.*strictly positive"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty"),
        ({"encoder_repetition_penalty": -1.0}, "encoder_repetition_penalty"),
        ({"presence_penalty": 1e9}, "presence_penalty"),
        ({"frequency_penalty": float("inf")}, "frequency_penalty"),
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size"),
        ({"bad_words_ids": []}, "bad_words_ids"),
        ({"bad_words_ids": [[]]}, "bad_words_ids"),
        ({"bad_words_ids": [[VOCAB]]}, "`bad_words_ids` names the token 23, outside"),
        ({"bad_words_ids": [[-1]]}, "`bad_words_ids` names the token -1, outside"),
        ({"sequence_bias": {}}, "sequence_bias"),
        ({"sequence_bias": [[[], 1.0]]}, "sequence_bias"),
        ({"sequence_bias": {(1, 99): 1.0}}, "`sequence_bias` names the token 99, outside"),
        ({"sequence_bias": {(1,): float("nan")}}, "sequence_bias"),
        ({"logit_bias": {}}, "logit_bias"),
        ({"logit_bias": {"99": 1.0}}, "`logit_bias` names the token 99, outside"),
        ({"logit_bias": {"a": 1.0}}, "logit_bias"),
        ({"suppress_tokens": [99]}, "`suppress_tokens` names the token 99"),
        ({"begin_suppress_tokens": [-3]}, "`begin_suppress_tokens` names the token -3"),
        ({"forced_eos_token_id": 99}, "`forced_eos_token_id` names the token 99"),
        ({"exponential_decay_length_penalty": (1, -2.0)}, "factor above 0"),
        ({"min_length": -1}, "min_length"),
        ({"dry_multiplier": -1.0}, "dry_multiplier"),
        ({"dry_multiplier": 1.0, "dry_base": 0.5}, "dry_base"),
        ({"dry_multiplier": 1.0, "dry_sequence_breakers": [99]}, "`dry_sequence_breakers` names the token 99"),
        ({"dry_base": 2.0}, "`dry_base` is set to `2.0`, which is only read together with `dry_multiplier`"),
        ({"xtc_threshold": 0.3, **SAMPLED}, "only read together with `xtc_probability`"),
        ({"min_p": 2.0, **SAMPLED}, r"`min_p` has to be a number in \[0, 1\]"),
        ({"min_p": 0.1}, "`do_sample` is set to `False`"),
        ({"top_h": 0.5}, "`do_sample` is set to `False`"),
        ({"xtc_probability": 0.5}, "`do_sample` is set to `False`"),
        ({"typical_p": 1.5, **SAMPLED}, "typical_p"),
        ({"epsilon_cutoff": -0.1, **SAMPLED}, "epsilon_cutoff"),
        ({"eta_cutoff": 1.0, **SAMPLED}, "eta_cutoff"),
        ({"top_h": 1.5, **SAMPLED}, "top_h"),
        ({"top_n_sigma": -1.0, **SAMPLED}, "top_n_sigma"),
        ({"mirostat_tau": 0.0, **SAMPLED}, "mirostat_tau"),
        ({"dynatemp_range": 1.0, **SAMPLED}, "`dynatemp_range`"),
        ({"typical_p": [0.5, 0.5], **SAMPLED}, "2 values for 3 prompts"),
        ({"repetition_penalty": [1.0, 1.0, -1.0]}, "repetition_penalty"),
        ({"prefix_allowed_tokens_fn": 5}, "prefix_allowed_tokens_fn"),
        ({"token_healing": True}, "pass the model's `tokenizer`"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_before_the_first_pass(settings: dict[str, Any], told: str) -> None:
    model = FakeModel(VOCAB)
    with pytest.raises(SettingError, match=told) as raised:
        generate(model, **pad_left(ROWS), max_new_tokens=5, eos_token_id=EOS, **settings)
    assert model.num_passes == 0
    wording = raised.value.wording  # so that a server's client reads the names of its own fields
    assert wording is not None and {one.name for one in wording.settings} & {*settings, "tokenizer"}


def test_what_a_part_from_outside_says_is_led_in_by_its_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its message may quote the setting's name in passing, and does not say which value can't be."""

    def refuse(kind: Any, build: Any) -> Any:
        raise SettingError("a list beside `min_p` is too long")

    monkeypatch.setitem(PROCESSORS._entries, "min_p", replace(PROCESSORS["min_p"], make=refuse))
    with pytest.raises(SettingError, match=r"^`min_p`=0.25 can't be: a list beside `min_p` is too long$") as raised:
        build({"min_p": 0.25, "do_sample": True})
    assert [one.name for one in raised.value.wording.settings] == ["min_p"]


@pytest.mark.parametrize("given", [3, [lambda ids, scores: scores, "top_p"]])
def test_a_processor_has_to_be_callable(given: Any) -> None:
    model = FakeModel(VOCAB)
    with pytest.raises(SettingError, match=r"`logits_processor` holds a (int|str), which can't be called"):
        generate(model, [[1, 2]], max_new_tokens=5, logits_processor=given)
    assert model.num_passes == 0


def test_decay_needs_an_end_token() -> None:
    with pytest.raises(SettingError, match="set `eos_token_id`"):
        generate(FakeModel(VOCAB), [[1, 2]], max_new_tokens=5, exponential_decay_length_penalty=(1, 1.5))


def test_a_processor_that_asks_for_what_nobody_gives_is_refused() -> None:
    def needy(input_ids: torch.Tensor, scores: torch.Tensor, entropy: float) -> torch.Tensor:
        return scores * entropy

    model = FakeModel(VOCAB)
    with pytest.raises(SettingError, match="needs `entropy` beside the ids and the scores"):
        generate(model, [[1, 2]], max_new_tokens=5, logits_processor=[needy])
    assert model.num_passes == 0


def test_a_models_file_may_ask_for_more_than_a_short_call_gives() -> None:
    model = FakeModel(VOCAB)
    model.generation_config = GenerationConfig(min_length=50, forced_bos_token_id=3, eos_token_id=EOS)
    assert generate(model, [[1, 2]], max_new_tokens=4).shape == (1, 6)


# --- nothing left ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [{}, SAMPLED, {"do_sample": True, "top_k": 5, "top_p": 0.9}], ids=str)
def test_nothing_left_names_the_processors_the_row_and_the_position(sampling: dict[str, Any]) -> None:
    def forbid_the_rest(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] > 6:
            scores[1, 4:] = -math.inf  # in place: the step gives a caller's processor a copy
        return scores

    with pytest.raises(
        NoTokenLeftError,
        match=r"row 1, at position 7: SuppressTokensLogitsProcessor \(4 tokens\) and forbid_the_rest \(19 tokens\)",
    ):
        generate(
            FakeModel(VOCAB),
            **pad_left(ROWS),
            max_new_tokens=5,
            suppress_tokens=[0, 1, 2, 3],
            logits_processor=[forbid_the_rest],
            **sampling,
        )


def test_nan_is_told_apart() -> None:
    def spoil(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores * float("nan")

    with pytest.raises(NoTokenLeftError, match="row 0, at position 2: spoil made scores NaN"):
        generate(FakeModel(VOCAB), [[1, 2]], max_new_tokens=2, logits_processor=[spoil], seed=1, **SAMPLED)
    model = FakeModel(VOCAB)
    model.table[3] = float("nan")
    with pytest.raises(NoTokenLeftError, match="the model's own logits are NaN"):
        generate(model, [[1, 3]], max_new_tokens=2, seed=1, **SAMPLED)
    with pytest.raises(NoTokenLeftError, match="the model's own logits are NaN"):
        generate(model, [[1, 3]], max_new_tokens=2)


# --- through generate -----------------------------------------------------------------------------------------


# --- the distribution -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [{}, {"do_sample": True}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 2}])
@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda scores: None, "returned None"),
        (lambda scores: "scores", "returned 'scores'"),
        (lambda scores: scores[:, :5], rf"returned a tensor of the shape \(\d, 5\).* here \(\d, {VOCAB}\)"),
        (lambda scores: torch.cat([scores, scores]), "a processor returns scores of the shape that it was given"),
    ],
)
def test_what_a_callers_processor_returns_is_looked_at(strategy: dict[str, Any], made: Any, words: str) -> None:
    class Own(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> Any:
            return made(scores)

    with pytest.raises(SettingError, match=words):
        generate(FakeModel(VOCAB), torch.tensor([[1, 2, 3]]), logits_processor=[Own()], max_new_tokens=3, **strategy)


def test_guidance_over_the_batch_makes_one_row_of_two() -> None:
    ids, scores = torch.zeros(2, 3, dtype=torch.int64), torch.randn(4, VOCAB)
    guide = ClassifierFreeGuidanceLogitsProcessor(3.0)
    made = LogitsProcessorList([guide, TemperatureLogitsWarper(2.0)])(ids, scores)
    torch.testing.assert_close(made, guide(ids, scores) / 2.0)

"""The settings that switch processors on: their order, their errors, and what they do through generate()."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import transformers
from tests.fakes import FakeModel, pad_left

import unspool
from unspool import GenerationConfig, LogitsProcessor, NoTokenLeftError, SettingError, generate
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


def test_order_is_the_references() -> None:
    settings = CONTROL | SAMPLING | {"do_sample": True, "renormalize_logits": True}
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
    assert mine == [type(processor).__name__ for processor in theirs]


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
    not_here = {"diversity_penalty", "prefix_allowed_tokens_fn", "watermarking_config", *STRUCTURES}  # tests/grammar
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
        ({"forced_bos_token_id": 1}, "`forced_bos_token_id`=1 forces the second token"),
        ({"exponential_decay_length_penalty": (1, -2.0)}, "factor above 0"),
        ({"min_new_tokens": 6}, "`min_new_tokens`=6 asks for more .* ends at 5 new tokens"),
        ({"min_new_tokens": [1, 9, 2]}, "min_new_tokens"),
        ({"min_length": 11}, "`min_length`=11 asks for more .* ends at 10 tokens"),
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
    with pytest.raises(SettingError, match=told):
        generate(model, **pad_left(ROWS), max_new_tokens=5, eos_token_id=EOS, **settings)
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


CONTROLS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.5},
    {"repetition_penalty": 1.5, "repetition_penalty_ignores_prompt": True},
    {"encoder_repetition_penalty": 2.0},
    {"presence_penalty": 2.0},
    {"frequency_penalty": 1.0},
    {"no_repeat_ngram_size": 1},
    {"no_repeat_ngram_size": 2},
    {"encoder_no_repeat_ngram_size": 1},
    {"encoder_no_repeat_ngram_size": 2},
    {"dry_multiplier": 2.0, "dry_allowed_length": 1},
    {"sequence_bias": [[[4], 3.0], [[4, 5], 9.0]], "bad_words_ids": [[4, 4]]},
    {"logit_bias": {3: 5.0}},
    {"min_new_tokens": 6},
    {"suppress_tokens": [1, 2, 3]},
    {"exponential_decay_length_penalty": (2, 1.5)},
    {"temperature": 1.5, "top_k": 7, "top_p": 0.9, "min_p": 0.05, **SAMPLED, "seed": 3},
    {"xtc_probability": 0.5, "xtc_threshold": 0.05, **SAMPLED, "seed": 3},
    {"mirostat_tau": 1.0, "mirostat_eta": 0.4, **SAMPLED, "seed": 3},
    {"dynatemp_range": 0.5, "top_n_sigma": 2.0, **SAMPLED, "seed": 3},
    {"typical_p": 0.8, "top_a": 0.1, **SAMPLED, "seed": 3},
]


@pytest.mark.parametrize("settings", CONTROLS, ids=str)
def test_rows_alone_are_rows_in_a_batch_whatever_their_lengths(settings: dict[str, Any]) -> None:
    """Padding that unspool makes is told to the processors, so that no row depends on the others' lengths."""
    from unspool.api.starting import start

    def run(rows: list[list[int]], **more: Any) -> list[list[int]]:
        width = max(map(len, rows))
        padded = pad_left(rows, pad=0)
        call = start(
            FakeModel(VOCAB, seed=5), **padded, hides_padding=True, max_new_tokens=10, eos_token_id=EOS, **more
        )
        for _ in call:
            pass
        assert call.parts.prompt_ids.shape[1] == width
        return call.emitted

    seeds = {"seed": [3, 4, 5]} if "seed" in settings else {}
    whole = run(ROWS, **settings | seeds)
    for row, prompt in enumerate(ROWS):
        own = {"seed": seeds["seed"][row]} if seeds else {}
        assert run([prompt], **settings | own) == [whole[row]]


def test_one_value_a_row_is_each_row_with_its_own() -> None:
    model = FakeModel(VOCAB, seed=3)
    per_row: dict[str, list[Any]] = {
        "temperature": [0.3, 1.0, 2.0],
        "top_p": [0.9, 1.0, 0.7],
        "top_k": [3, 0, 10],
        "min_p": [0.0, 0.2, 0.01],
        "repetition_penalty": [1.0, 1.5, 0.8],
        "presence_penalty": [0.0, 0.5, -0.5],
        "min_new_tokens": [0, 4, 8],
        "seed": [1, 2, 3],
    }
    prompts = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    common = {"max_new_tokens": 8, "do_sample": True, "eos_token_id": [EOS, 5, 9], "pad_token_id": 0}
    whole = generate(model, prompts, **common, **per_row)
    for row, prompt in enumerate(prompts):
        alone = generate(model, [prompt], **common, **{name: values[row] for name, values in per_row.items()})
        assert whole[row, : alone.shape[1]].tolist() == alone[0].tolist()
        assert set(whole[row, alone.shape[1] :].tolist()) <= {0}


@pytest.mark.parametrize(
    "settings", [{"top_k": 5}, {"top_k": 9, "top_p": 0.8, "temperature": 1.4, "min_p": 0.02}], ids=str
)
def test_asking_for_scores_changes_no_token(settings: dict[str, Any]) -> None:
    """With them the plain chain runs, without them the fused one."""
    model = FakeModel(VOCAB)
    common = {
        **pad_left(ROWS),
        "max_new_tokens": 12,
        "do_sample": True,
        "seed": 8,
        "repetition_penalty": 1.2,
        **settings,
    }
    plain = generate(model, return_dict_in_generate=True, output_scores=True, **common)
    assert plain.scores[0].shape == (3, VOCAB)
    assert torch.equal(plain.sequences, generate(model, **common))


def test_prefix_function_sees_the_rows_that_are_left_by_their_number() -> None:
    seen: set[int] = set()

    def allow(row: int, ids: torch.Tensor) -> list[int]:
        seen.add(row)
        return [10 + row] if len(ids) < 5 + 2 * row else [EOS]

    found = generate(
        FakeModel(VOCAB),
        [[1, 2, 3]] * 3,
        max_new_tokens=9,
        eos_token_id=EOS,
        pad_token_id=0,
        prefix_allowed_tokens_fn=allow,
    )
    assert seen == {0, 1, 2}
    assert found[:, 3:].tolist() == [
        [10, 10, EOS, 0, 0, 0, 0],
        [11, 11, 11, 11, EOS, 0, 0],
        [12, 12, 12, 12, 12, 12, EOS],
    ]


def test_penalties_count_new_tokens_where_they_say_so() -> None:
    """A bias so large that one token is written for ever, were it not for the penalties."""
    model = FakeModel(VOCAB)
    common = {"max_new_tokens": 3, "logit_bias": {7: 1000.0, 8: 950.0}}
    assert generate(model, [[7, 7]], presence_penalty=100.0, **common)[0, 2:].tolist() == [7, 8, 7]
    assert generate(model, [[7, 7]], frequency_penalty=30.0, **common)[0, 2:].tolist() == [7, 7, 8]
    strong = {"repetition_penalty": 2.0, **common}
    assert generate(model, [[7, 7]], **strong)[0, 2].item() == 8
    assert generate(model, [[7, 7]], repetition_penalty_ignores_prompt=True, **strong)[0, 2].item() == 7


# --- the distribution -----------------------------------------------------------------------------------------


def critical(freedom: int) -> float:
    """The chi-square value exceeded once in ten thousand times (Wilson and Hilferty, 1931)."""
    spread = 2 / (9 * freedom)
    return freedom * (1 - spread + 3.719 * math.sqrt(spread)) ** 3


@pytest.mark.parametrize(
    ("settings", "warp"),
    [
        ({"min_p": 0.2}, unspool.MinPLogitsWarper(0.2)),
        ({"typical_p": 0.8}, unspool.TypicalLogitsWarper(0.8)),
        ({"epsilon_cutoff": 0.05}, unspool.EpsilonLogitsWarper(0.05)),
        ({"eta_cutoff": 0.2}, unspool.EtaLogitsWarper(0.2)),
        ({"top_h": 0.7}, unspool.TopHLogitsWarper(0.7)),
        ({"top_a": 1.0}, unspool.TopALogitsWarper(1.0)),
        ({"top_n_sigma": 1.0}, unspool.TopNSigmaLogitsWarper(1.0)),
        ({"mirostat_tau": 1.7}, unspool.MirostatLogitsWarper(1.7)),
        ({"dynatemp_range": 0.9, "temperature": 1.2}, unspool.DynamicTemperatureLogitsWarper(1.2, 0.9)),
        ({"temperature": 1.3, "top_k": 6, "top_p": 0.95, "min_p": 0.05}, None),
        ({"xtc_probability": 0.4, "xtc_threshold": 0.1}, None),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",  # an address would be another in every process
)
def test_frequencies_follow_the_distribution(settings: dict[str, Any], warp: Any) -> None:
    model = FakeModel(11, seed=4)
    model.table /= 4
    model.places /= 6
    num, ids = 6000, torch.tensor([[1, 2]])
    found = generate(model, ids, max_new_tokens=1, seed=99, num_return_sequences=num, **SAMPLED | settings)
    scores = model.score([1, 2])[None]
    if "xtc_probability" in settings:
        cut = unspool.XTCLogitsWarper(1.0, 0.1)(ids, scores, uniforms=torch.zeros(1)).softmax(-1)
        expected = 0.4 * cut + 0.6 * scores.softmax(-1)
    elif warp is None:
        config = GenerationConfig(do_sample=True, **settings)
        expected = build_processors(config, Context(1, 11, 2, 3))(ids, scores).softmax(-1)
    else:
        expected = warp(ids, scores).softmax(-1)
        assert not torch.allclose(expected, scores.softmax(-1))  # it does something here
    expected = expected[0] * num
    counts = torch.bincount(found[:, 2], minlength=11)
    possible = expected > 0
    assert not counts[~possible].any()
    assert float(expected[possible].min()) > 5, "too rare for the test to hold"
    chi_square = float(((counts - expected)[possible] ** 2 / expected[possible]).sum())
    assert chi_square < critical(int(possible.sum()) - 1)

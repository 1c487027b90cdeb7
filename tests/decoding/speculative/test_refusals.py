"""What a drafter can't go with is told before the first pass."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import tokenizers
import torch

from tests.decoding.speculative.drafting_fakes import Layered, blur
from tests.decoding.speculative.tokenizer_fakes import make_byte_level, make_pair
from tests.fakes import FakeEncoderDecoder, FakeModel, make_tokenizer, pad_left
from unspool import GenerationConfig, TextStreamer, generate
from unspool.cache import ROLL_BACK, DynamicCache
from unspool.errors import SettingError, UnspoolError, UnsupportedError
from unspool.logits.mirostat import MirostatLogitsWarper
from unspool.plan.drafting import read_drafting
from unspool.text import Tokenizer

LOOKUP = {"prompt_lookup_num_tokens": 3}


def refuse(match: str, model: Any = None, inputs: Any = None, **settings: Any) -> None:
    target = Layered(9) if model is None else model
    call = {"input_ids": [[1, 2, 3]]} if inputs is None else inputs
    with pytest.raises(UnspoolError, match=match):
        generate(target, **call, max_new_tokens=5, **settings)
    assert target.num_passes == 0


@pytest.mark.parametrize("name", ["output_hidden_states", "output_attentions"])
def test_states_of_several_rows(name: str) -> None:
    told = {"return_dict_in_generate": True, name: True, **LOOKUP}
    over_theirs = Layered(9)
    over_theirs.info = replace(over_theirs.info, can=over_theirs.info.can | {"whole_prompts"})
    inputs = {"input_ids": [[1, 2], [3, 4]]}
    refuse(f"`{name}` gives one entry per step.*one row at a time", over_theirs, inputs, **told)


@pytest.mark.parametrize(
    ("other", "instead"),
    [
        ({"num_beams": 2}, "num_beams=1"),
        ({"use_cache": False}, "leave `use_cache` on"),
        ({"do_sample": True, "mirostat_tau": 3.0}, "`top_p` or `min_p`"),
    ],
)
@pytest.mark.parametrize("drafter", [LOOKUP, {"assistant_early_exit": 1}, {"assistant_model": 0}])
def test_what_decides_tokens_otherwise(drafter: dict[str, Any], other: dict[str, Any], instead: str) -> None:
    if "assistant_model" in drafter:
        drafter = {"assistant_model": FakeModel(9)}
    name = list(other)[-1]
    refuse(f"`{name}`=.* does not go with a drafter.*{instead}", **drafter, **other)


@pytest.mark.parametrize(
    ("other", "instead"),
    [
        ({"penalty_alpha": 0.6, "top_k": 4}, "leave `penalty_alpha` out"),
        ({"dola_layers": "low"}, "leave `dola_layers` out"),
        ({"guidance_scale": 2.0}, "leave `guidance_scale` out"),
        ({"num_beams": 2, "force_words_ids": [[1]]}, "num_beams"),
    ],
)
def test_other_strategies(other: dict[str, Any], instead: str) -> None:
    config = GenerationConfig(**LOOKUP)
    for name, value in other.items():
        setattr(config, name, value)
    with pytest.raises(SettingError, match=instead):
        read_drafting(config, {*LOOKUP, *other}, has_assistant=False, num_layers=3, can=())


def test_a_models_file_gives_way() -> None:
    """What a file suggests is used where it can be, and is no request where it can't."""
    target = Layered(9)
    target.generation_config = GenerationConfig(prompt_lookup_num_tokens=3)
    plain = generate(Layered(9), [[1, 2, 3, 1, 2]], max_new_tokens=9)
    output = generate(target, [[1, 2, 3, 1, 2]], max_new_tokens=9, return_dict_in_generate=True)
    assert output.sequences.tolist() == plain.tolist() and sum(output.speculation.drafted) > 0
    beams = generate(target, [[1, 2, 3]], max_new_tokens=5, num_beams=2, return_dict_in_generate=True)
    assert beams.speculation is None


def test_two_drafters() -> None:
    refuse("name two drafters", **LOOKUP, assistant_early_exit=1)
    refuse("name two drafters", assistant_model=FakeModel(9), assistant_early_exit=1)


def test_layers_out_of_range() -> None:
    for layer in (3, 40):
        refuse(f"`assistant_early_exit`={layer} .*it has 3, so give 1 to 2", assistant_early_exit=layer)
    refuse("assistant_early_exit", assistant_early_exit=0)
    refuse("can't stop after its first layers", FakeModel(9), assistant_early_exit=1)


@pytest.mark.parametrize("name", ["prompt_lookup_num_tokens", "num_assistant_tokens", "max_matching_ngram_size"])
@pytest.mark.parametrize("value", [-1, 0, 10**6, 1.5, float("nan"), "3", True])
def test_lengths_out_of_bounds(name: str, value: Any) -> None:
    more = {"num_assistant_tokens": {"assistant_model": FakeModel(9)}, "max_matching_ngram_size": LOOKUP}.get(name, {})
    refuse(f"`{name}`", **more, **{name: value})


@pytest.mark.parametrize("value", [-0.1, 1.5, float("nan"), float("inf"), "high"])
def test_thresholds_out_of_bounds(value: Any) -> None:
    refuse("assistant_confidence_threshold", assistant_model=FakeModel(9), assistant_confidence_threshold=value)


def test_schedules_and_policies_that_are_not_known() -> None:
    refuse("num_assistant_tokens_schedule", assistant_model=FakeModel(9), num_assistant_tokens_schedule="sometimes")
    refuse("speculate", speculate="always")
    refuse(
        "chooses the length itself",
        assistant_model=FakeModel(9),
        speculate="auto",
        num_assistant_tokens_schedule="heuristic",
    )


def test_settings_of_another_drafter() -> None:
    refuse("`num_assistant_tokens` is not read beside `prompt_lookup_num_tokens`", **LOOKUP, num_assistant_tokens=4)
    refuse("is not read beside `assistant_model`", assistant_model=FakeModel(9), max_matching_ngram_size=3)


# --- draft models -------------------------------------------------------------------------------------------


def test_draft_models_that_are_none() -> None:
    target = Layered(9)
    refuse("vocabulary of 11 tokens and the model one of 9", assistant_model=FakeModel(11))
    refuse("is not a model that unspool knows", assistant_model=object())
    refuse("`assistant_model` is an encoder-decoder", assistant_model=FakeEncoderDecoder(9))
    embeds = {"inputs_embeds": target.embed(torch.tensor([[1, 2]]))}
    refuse("reads tokens, and inputs_embeds", inputs=embeds, assistant_model=FakeModel(9))
    refuse("context ends at 3", assistant_model=FakeModel(9, max_context=3))


class Speaking:
    """A model with its tokenizer, as a LanguageModel is."""

    def __init__(self, model: FakeModel, tokenizer: Any) -> None:
        self.model, self.tokenizer = model, tokenizer


def test_tokenizers_are_compared_and_not_only_counted() -> None:
    def shifted(shift: int) -> Any:
        vocab = {token: (number + shift) % 160 for token, number in make_tokenizer().get_vocab().items()}
        return type("Dictionary", (), {"get_vocab": lambda _: vocab})()

    target, other = Layered(160), blur(FakeModel(160), 0.1)
    with pytest.raises(SettingError, match="`tokenizer` is a Dictionary without encode, all_special_ids"):
        generate(Speaking(target, shifted(0)), [[1, 2]], assistant_model=Speaking(other, shifted(1)), max_new_tokens=4)
    with pytest.raises(SettingError, match="`assistant_tokenizer` is a str without get_vocab"):
        generate(
            target, [[1]], assistant_model=other, tokenizer=make_tokenizer(), assistant_tokenizer="b", max_new_tokens=4
        )
    assert target.num_passes == 0
    same = generate(
        Speaking(target, shifted(0)), [[1, 2]], assistant_model=Speaking(other, shifted(0)), max_new_tokens=4
    )
    assert same.tolist() == generate(target, [[1, 2]], max_new_tokens=4).tolist()


def test_other_tokenizers_must_be_named() -> None:
    own, other = make_pair("merges")
    target, draft = FakeModel(len(own)), FakeModel(len(other))
    assert target.info.vocab_size != draft.info.vocab_size
    call = {"model": target, "assistant_model": draft}
    refuse("vocabulary of .*pass `tokenizer` and `assistant_tokenizer` too", **call)
    refuse("vocabulary of .*pass `assistant_tokenizer` too", **call, tokenizer=own)
    refuse("`assistant_tokenizer` was given.*pass `tokenizer` too", **call, assistant_tokenizer=other)
    refuse("`assistant_tokenizer` is a draft model's, and there is none", target, assistant_tokenizer=other)
    big = make_byte_level([f" {a}{b}" for a in "abcdefgh" for b in "abcdefgh"])
    refuse("`assistant_tokenizer` has .* so it is not that model's", **call, tokenizer=own, assistant_tokenizer=big)
    refuse("`tokenizer` has .* so it is not that model's", **call, tokenizer=big, assistant_tokenizer=other)


@pytest.mark.parametrize("name", ["assistant_lookbehind", "target_lookbehind"])
def test_look_behinds(name: str) -> None:
    own, other = make_pair("merges")
    both = {"tokenizer": own, "assistant_tokenizer": other, "assistant_model": FakeModel(len(other))}
    target = FakeModel(len(own))
    for value in (0, -1, 10**6, 2**40, 1.5, float("nan"), "3", True):
        refuse(f"`{name}`", target, **both, **{name: value})
    refuse("here they are drawn from the tokens that both have", target, do_sample=True, **both, **{name: 3})
    refuse("here both have the same tokens", target, assistant_model=FakeModel(len(own)), **{name: 3})
    refuse("here both have the same tokens", **LOOKUP, **{name: 3})


def test_hardly_any_common_tokens_to_draw_from() -> None:
    own = make_pair("merges")[0]
    words = tokenizers.models.WordLevel({f"word{number}": number for number in range(40)}, unk_token="word0")
    other = Tokenizer(tokenizers.Tokenizer(words))
    both = {"tokenizer": own, "assistant_tokenizer": other, "assistant_model": FakeModel(40)}
    refuse("only 0 read the same; use do_sample=False", FakeModel(len(own)), do_sample=True, **both)


def test_an_encoder_decoder_with_another_tokenizer() -> None:
    own, other = make_pair("merges")
    target, draft = FakeEncoderDecoder(len(own)), FakeEncoderDecoder(len(other))
    more = {"tokenizer": own, "assistant_tokenizer": other, "assistant_model": draft, "decoder_start_token_id": 1}
    refuse("what an encoder-decoder reads and writes is not put", target, **more)


def test_a_draft_models_context_ends_its_drafts_not_the_text() -> None:
    target = Layered(9)
    draft = blur(target, 0.0)
    draft.info = replace(draft.info, max_context=10)
    plain = generate(target, [[1, 2, 3]], max_new_tokens=20)
    drafted = generate(target, [[1, 2, 3]], max_new_tokens=20, assistant_model=draft)
    assert drafted.tolist() == plain.tolist()


def test_a_draft_models_own_settings_are_followed() -> None:
    target, draft = Layered(9), blur(FakeModel(9), 0.0)

    def longest(**more: Any) -> int:
        draft.num_tokens_read = 0
        output = generate(
            target, [[1, 2, 3]], max_new_tokens=85, assistant_model=draft, return_dict_in_generate=True, **more
        )
        told = output.speculation
        return round(sum(told.drafted) / sum(told.checks))

    draft.generation_config = GenerationConfig(num_assistant_tokens=3, assistant_confidence_threshold=0.0)
    assert longest() == 3
    assert longest(num_assistant_tokens=6) == 6  # the call comes first
    draft.generation_config = GenerationConfig(assistant_confidence_threshold=1.0)
    assert longest() == 1


@pytest.mark.parametrize(("schedule", "later"), [("heuristic", 9), ("heuristic_transient", 3), ("constant", 3)])
def test_a_heuristic_length_is_kept_for_the_next_call(schedule: str, later: int) -> None:
    target, draft = Layered(9), blur(FakeModel(9), 0.0)
    draft.generation_config = GenerationConfig(
        num_assistant_tokens=3, num_assistant_tokens_schedule=schedule, assistant_confidence_threshold=0.0
    )
    # The prompt's turn and two drafts, right to their ends: the reference comes to the same number.
    generate(target, [[1, 2, 3]], max_new_tokens=1 + 6 + 4, assistant_model=draft)
    assert draft.generation_config.num_assistant_tokens == later


# --- caches and streams -------------------------------------------------------------------------------------


class Forgetful(DynamicCache):
    """A cache that can't be rolled back."""

    can = DynamicCache.can - {ROLL_BACK}


def test_caches_that_cannot_take_tokens_back() -> None:
    for drafter in (LOOKUP, {"assistant_early_exit": 1}):
        refuse("which a Forgetful can't; use cache_implementation='dynamic'", past_key_values=Forgetful(), **drafter)


def test_tuples_of_ragged_rows() -> None:
    refuse("return_legacy_cache", inputs=pad_left([[1, 2], [3, 4]]), return_legacy_cache=True, **LOOKUP)


def test_a_streamer_takes_one_row() -> None:
    target = Layered(160)
    with pytest.raises(SettingError, match="stream one row"):
        generate(target, **pad_left([[1, 2], [3]]), streamer=TextStreamer(make_tokenizer()), **LOOKUP)
    assert target.num_passes == 0


def test_no_token_left_names_the_processor_at_its_place() -> None:
    """A dead end that only a refused draft runs into is none; one in the text itself is told."""
    target = Layered(9)
    plain = generate(target, [[1, 2, 3, 1, 2]], max_new_tokens=12)[0].tolist()

    def forbid_after(width: int) -> Any:
        return lambda ids, scores: scores - (torch.inf if ids.shape[1] == width else 0)

    with pytest.raises(UnspoolError, match="no token is left to choose for row 0, at position 9"):
        generate(target, [plain[:5]], max_new_tokens=12, logits_processor=[forbid_after(9)], **LOOKUP)

    def strict(row: int, ids: torch.Tensor) -> list[int]:
        assert ids.tolist() == plain[: len(ids)]  # never shown a text that plain decoding would not write
        return [plain[len(ids)]]

    allowed = generate(target, [plain[:5]], max_new_tokens=12, prefix_allowed_tokens_fn=strict, **LOOKUP)
    assert allowed[0].tolist() == plain


def test_processors_that_remember() -> None:
    refuse("MirostatLogitsWarper remembers the step before", **LOOKUP, logits_processor=[MirostatLogitsWarper()])


def test_kinds_of_errors() -> None:
    with pytest.raises(UnsupportedError):
        generate(FakeModel(9), [[1]], assistant_early_exit=1)

"""`low_memory`: the beams' passes run in parts, and say the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.conformance.cases import Case, load_model, read_cases, run_case
from tests.fakes import FakeEncoderDecoder, FakeModel, pad_left
from unspool import generate
from unspool.api.starting import start
from unspool.cache import DIVIDE, Cache, DynamicCache, EncoderDecoderCache
from unspool.cache.kinds import KINDS
from unspool.errors import SettingError, UnsupportedError

PROMPTS = [[5, 6, 7, 3], [8, 9], [13]]
METHODS: dict[str, dict[str, Any]] = {
    "search": {},
    "sampling": {"do_sample": True, "seed": 3},
    "groups": {"num_beam_groups": 2, "diversity_penalty": 0.7},
    "words": {"force_words_ids": [[4, 9], [[2, 3], [11]]]},
}
WAYS: list[dict[str, Any]] = [{}, {"cache_implementation": "static"}, {"use_cache": False}]
CASES = [
    case
    for case in read_cases()
    if case.model in ("bloom", "t5") and case.name in ("beam4_never", "beam4_ret3", "diverse6", "force_two")
]


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", [FakeModel, FakeEncoderDecoder])
def test_parts_say_what_the_whole_says(kind: type[FakeModel], method: str, way: dict[str, Any]) -> None:
    model = kind()
    settings = {
        **pad_left(PROMPTS),
        "num_beams": 4,
        "max_new_tokens": 7,
        "num_return_sequences": 2,
        "eos_token_id": [1, 2],
        "pad_token_id": 0,
        "return_dict_in_generate": True,
        "output_scores": True,
        **METHODS[method],
        **way,
    }
    if model.info.is_encoder_decoder:
        settings["decoder_start_token_id"] = 1
    whole = generate(model, **settings)
    model.rows_of_passes.clear()
    parts = generate(model, **settings, low_memory=True)
    assert max(model.rows_of_passes) == len(PROMPTS)
    assert parts.sequences.tolist() == whole.sequences.tolist()
    assert parts.beam_indices.tolist() == whole.beam_indices.tolist()
    torch.testing.assert_close(parts.sequences_scores, whole.sequences_scores)
    for mine, theirs in zip(parts.scores, whole.scores, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("case", [case for case in CASES if not case.settings.get("do_sample")], ids=str)
def test_reference_outputs_in_parts(case: Case) -> None:
    output = run_case(replace(case, settings={**case.settings, "low_memory": True}))
    assert output.sequences.tolist() == case.expected["sequences"]


def test_states_come_in_the_order_of_the_rows() -> None:
    model = load_model("llama").model
    settings = {
        "input_ids": torch.tensor([[5, 6, 7], [9, 8, 3]]),
        "num_beams": 3,
        "max_new_tokens": 4,
        "return_dict_in_generate": True,
        "output_hidden_states": True,
        "output_attentions": True,
    }
    whole, parts = generate(model, **settings), generate(model, **settings, low_memory=True)
    for name in ("hidden_states", "attentions"):
        for step, other in zip(getattr(whole, name), getattr(parts, name), strict=True):
            for mine, theirs in zip(step, other, strict=True):
                torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


def test_a_prompt_is_still_held_once() -> None:
    run = start(load_model("llama").model, [[5, 6, 7] * 20], num_beams=4, max_new_tokens=3, low_memory=True)
    whole = start(load_model("llama").model, [[5, 6, 7] * 20], num_beams=4, max_new_tokens=3)
    assert [list(run), list(whole)] and run.cache.nbytes == whole.cache.nbytes > 0


def test_low_memory_needs_something_to_divide() -> None:
    model = FakeModel()
    with pytest.raises(SettingError, match=r"`low_memory`, set in the call, .* this is neither"):
        generate(model, [[5, 6]], low_memory=True)
    assert model.num_passes == 0
    assert generate(model, [[5, 6]], low_memory=False, max_new_tokens=2).shape == (1, 4)


class Undivided(DynamicCache):
    """A kind of cache that can't run in parts."""

    can = frozenset({"roll_back", "select_rows", "ragged"})


def test_a_cache_that_can_not_be_divided_says_so_first() -> None:
    model = FakeModel()
    model.new_cache = lambda *_, **__: Undivided()  # another kind, for this test
    with pytest.raises(
        UnsupportedError, match=r"`low_memory` reads beams in parts, .*Undivided\) can't divide rows; leave"
    ):
        generate(model, [[5, 6]], num_beams=2, low_memory=True, max_new_tokens=2)
    assert model.num_passes == 0


# --- the source of an encoder-decoder ---------------------------------------------------------------------
SOURCE = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12], [9, 8, 3, 4, 4, 2, 7, 6]])


def hold(num_beams: int, **settings: Any) -> tuple[Cache, Any]:
    run = start(
        load_model("t5").model,
        SOURCE,
        num_beams=num_beams,
        max_new_tokens=5,
        return_dict_in_generate=True,
        output_attentions=True,
        output_scores=True,
        **settings,
    )
    for _ in run:
        pass
    assert run.cache.held is not None
    return run.cache.held, run.output()


@pytest.mark.parametrize("more", [{}, {"low_memory": True}, {"cache_implementation": "static"}], ids=str)
def test_beams_share_the_source_they_read(more: dict[str, Any]) -> None:
    """Cross-attention keys are held once a prompt: their bytes do not grow with the beams."""
    single, _ = hold(1)
    cache, output = hold(4, **more)
    assert isinstance(single, EncoderDecoderCache) and isinstance(cache, EncoderDecoderCache)
    cross = cache.cross_attention_cache
    assert isinstance(cross, DynamicCache) and isinstance(single.cross_attention_cache, DynamicCache)
    assert cross.nbytes == single.cross_attention_cache.nbytes
    assert len(cross.lengths) == 2 and len(cache.lengths) == 8
    # What callers get is plain: every row with a source of its own.
    plain = output.past_key_values
    assert len(plain.cross_attention_cache.lengths) == len(plain.lengths) == 8
    for layer in range(len(cross)):
        for mine, theirs in zip(plain.cross_attention_cache[layer], cross[layer], strict=True):
            assert torch.equal(mine, theirs.repeat_interleave(4, dim=0))


def test_shared_sources_say_what_copies_say(monkeypatch: pytest.MonkeyPatch) -> None:
    _, shared = hold(4)
    model = load_model("t5").model
    monkeypatch.setattr(model, "info", replace(model.info, can=model.info.can - {"branches"}))
    cache, copied = hold(4)
    assert isinstance(cache, EncoderDecoderCache) and len(cache.source_lengths) == 8
    assert torch.equal(shared.sequences, copied.sequences)
    torch.testing.assert_close(shared.sequences_scores, copied.sequences_scores)
    for step, other in zip(shared.cross_attentions, copied.cross_attentions, strict=True):
        for mine, theirs in zip(step, other, strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)


def test_rows_that_share_a_source_may_go_apart() -> None:
    cache, _ = hold(2)
    sources = list(cache.source_lengths)  # one per prompt, which two beams share
    cache.select_rows([0, 2, 2, 3])
    assert len(cache.lengths) == 4 and cache.num_branches == 1
    assert list(cache.source_lengths) == [sources[0], sources[1], sources[1], sources[1]]


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_guided_beams_in_parts(name: str) -> None:
    """Both texts of a guided row go in the same part, and its beams share both prompts."""
    settings = {
        "input_ids": SOURCE,
        "negative_prompt_ids": SOURCE.flip(1),
        "guidance_scale": 1.5,
        "num_beams": 3,
        "max_new_tokens": 6,
    }
    model = load_model(name).model
    assert torch.equal(generate(model, **settings), generate(model, **settings, low_memory=True))


def test_kinds_say_whether_they_divide() -> None:
    model, seen = load_model("mistral").model, set()
    for name, kind in KINDS.items():
        if kind.refuse is None or kind.refuse(model.info) is None:
            seen.add(name)
            assert kind.divides == (DIVIDE in model.new_cache(name, 1, 16).can), name
    assert {"dynamic", "static", "paged", "offloaded", "hybrid", "quantized"} <= seen


def test_an_encoder_reads_nothing_for_a_cache_that_can_not_be_divided() -> None:
    model = FakeEncoderDecoder()
    settings = {"num_beams": 2, "low_memory": True, "max_new_tokens": 2, "decoder_start_token_id": 1}
    with pytest.raises(UnsupportedError, match="'offloaded_static' cache can't divide rows"):
        generate(model, [[5, 6]], cache_implementation="offloaded_static", **settings)
    assert model.num_encodings == 0

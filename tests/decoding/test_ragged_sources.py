"""A row of an encoder-decoder is the same alone and in a batch, with sources of other lengths and rows that leave."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

import unspool
from tests.conformance.cases import GOLDENS, load_model
from unspool import Cache, EncoderDecoderCache, StaticCache, generate
from unspool.errors import SettingError, UnsupportedError

NEW = 4
SOURCES = [[*range(10, 40)], [*range(50, 59)], [70, 71], [*range(60, 69)]]  # the longest first, two of one length
SEEDS = [11, 12, 13, 14]
NEGATIVE = [[*range(80, 92)], [5], [6, 7, 8], [9]]

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 0, "temperature": 1.5},
    "several sequences": {"do_sample": True, "top_k": 0, "num_return_sequences": 2},
    "processors": {"repetition_penalty": 1.3, "encoder_repetition_penalty": 1.2, "encoder_no_repeat_ngram_size": 2},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 4},
    "contrastive, one by one": {"penalty_alpha": 0.6, "top_k": 4, "low_memory": True},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "beams in parts": {"num_beams": 3, "low_memory": True},
    "beams that draw": {"num_beams": 3, "do_sample": True, "top_k": 0},
    "beam groups": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0},
    "forced words": {"num_beams": 3, "force_words_ids": [[33]]},
    "prompt lookup": {"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 2},
    "guidance": {"guidance_scale": 1.7},
    "guided beams": {"guidance_scale": 1.7, "num_beams": 2},
    "no cache": {"use_cache": False},
    "static": {"cache_implementation": "static"},
    "paged": {"cache_implementation": "paged"},
    "offloaded": {"cache_implementation": "offloaded"},
    "quantized": {"cache_implementation": "quantized"},
    "static beams": {"cache_implementation": "static", "num_beams": 3},
}
ADAPTED = {
    "t5": ("greedy", "sampling", "contrastive", "beams", "beams in parts", "guidance"),
    "bart": ("greedy", "prompt lookup", "static beams"),
}


@lru_cache
def load(name: str) -> unspool.LanguageModel:
    kind, model = name.split()
    return load_model(model) if kind == "native" else unspool.load(GOLDENS / "models" / model, native=False)


def run(lm: unspool.LanguageModel, way: dict[str, Any], rows: list[int], **settings: Any) -> unspool.Generation:
    told: dict[str, Any] = {"max_new_tokens": NEW, **way, **settings}
    if told.get("num_beams", 1) == 1:
        told["logprobs"] = 0
    if told.get("do_sample"):
        told["seed"] = [SEEDS[row] for row in rows]
    if "guidance_scale" in told:
        told["negative_prompt"] = [NEGATIVE[row] for row in rows]
    return lm.generate([SOURCES[row] for row in rows], **told)


def find_end(lm: unspool.LanguageModel, way: dict[str, Any]) -> int:
    """The token that the longest row writes first, so that it leaves before the others."""
    return run(lm, way, [0], eos_token_id=None).token_ids[0][0]


CASES = [("native t5", way) for way in WAYS] + [(f"adapted {name}", way) for name in ADAPTED for way in ADAPTED[name]]


@pytest.mark.parametrize(("model", "way"), CASES, ids=lambda told: told.replace(" ", "-"))
def test_a_row_alone_is_the_row_in_a_batch(model: str, way: str) -> None:
    lm, settings = load(model), WAYS[way]
    end = find_end(lm, settings)
    copies = settings.get("num_return_sequences", 1)
    alones = [run(lm, settings, [row], eos_token_id=end) for row in range(4)]
    for rows in ([0, 1, 2, 3], [3, 0]):
        batch = run(lm, settings, rows, eos_token_id=end)
        for place, row in enumerate(rows):
            alone = alones[row]
            mine = slice(place * copies, (place + 1) * copies)
            assert batch.token_ids[mine] == alone.token_ids
            assert batch.finish_reasons[mine] == alone.finish_reasons
            for told, expected in zip((batch.logprobs or [])[mine], alone.logprobs or [], strict=True):
                assert [one.logprob for one in told] == pytest.approx([one.logprob for one in expected], abs=1e-4)


@pytest.mark.parametrize("way", ["greedy", "sampling"])
def test_a_draft_model_follows_rows_that_leave(way: str) -> None:
    lm, settings = load("native t5"), WAYS[way]
    drafter = unspool.load(GOLDENS / "models" / "t5", native=True)
    end = find_end(lm, settings)
    plain = run(lm, settings, [0, 1, 2, 3], eos_token_id=end)
    drafted = run(lm, settings, [0, 1, 2, 3], eos_token_id=end, assistant_model=drafter)
    if way == "greedy":
        assert drafted.token_ids == plain.token_ids
    for row in range(3):
        alone = run(lm, settings, [row], eos_token_id=end, assistant_model=drafter)
        assert alone.token_ids == drafted.token_ids[row : row + 1]


# --- the cache of a pair says what rows see -----------------------------------------------------------------


def fill_right(rows: list[list[int]]) -> dict[str, torch.Tensor]:
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    return {"input_ids": ids, "attention_mask": ids.ne(0).long()}


def make_cache(rows: list[int]) -> EncoderDecoderCache:
    model, given = load("native t5").model, fill_right([SOURCES[row] for row in rows])
    lengths = [len(SOURCES[row]) for row in rows]
    return model.new_cache(rows=len(rows), encoded=model.encode(given["input_ids"], lengths))


def assert_alike(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def read(cache: Cache, tokens: list[list[int]]) -> torch.Tensor:
    return load("native t5").model.forward(torch.tensor(tokens), cache).logits


@pytest.mark.parametrize("index", [[1], [1, 3], [3, 2], [2, 1, 1], [3, 0]])
def test_keys_and_mask_have_the_width_of_the_sources_that_stayed(index: list[int]) -> None:
    cache = make_cache([0, 1, 2, 3])
    read(cache, [[0, 4]] * 4)
    cache.select_rows(index)
    lengths = [len(SOURCES[row]) for row in index]
    assert cache.source_lengths == lengths
    assert {keys.shape[2] for layer in cache.read_sources() for keys in layer} == {max(lengths)}
    mask = cache.mask_source(torch.device("cpu"))
    assert (mask is None) == (len(set(lengths)) == 1)
    assert mask is None or mask.sum(-1).flatten().tolist() == lengths
    assert cache.cross_attention_cache.get_seq_length() == max(lengths)
    fresh = make_cache(index)
    read(fresh, [[0, 4]] * len(index))
    assert_alike(read(cache, [[5]] * len(index)), read(fresh, [[5]] * len(index)))


def test_rows_that_share_a_source_may_go_apart(tmp_path: Path) -> None:
    cache = make_cache([0, 1])
    read(cache, [[0], [0]])
    cache.branch(3)
    expected = read(cache.clone(), [[4], [5], [6], [7], [8], [9]])
    cache.save(tmp_path / "cache.safetensors")
    loaded = Cache.load(tmp_path / "cache.safetensors")
    assert isinstance(loaded, EncoderDecoderCache) and loaded.num_branches == 3
    assert_alike(read(loaded, [[4], [5], [6], [7], [8], [9]]), expected)
    legacy = EncoderDecoderCache(*cache.clone().check_dynamic_cache("a test"))
    assert legacy.source_lengths == [30] * 3 + [9] * 3
    cache.select_rows([1, 5, 3])
    assert cache.num_branches == 1 and cache.source_lengths == [30, 9, 9]
    assert_alike(read(cache, [[5], [9], [7]]), expected[[1, 5, 3]])


def test_a_pass_over_other_rows_than_the_sources_is_refused() -> None:
    cache = make_cache([0, 1])
    with pytest.raises(SettingError, match="sources for 2 rows and the forward pass has 4"):
        read(cache, [[0]] * 4)
    assert cache.lengths == []


# --- a caller's own cache -----------------------------------------------------------------------------------


def test_a_callers_cache_belongs_to_the_input(monkeypatch: pytest.MonkeyPatch) -> None:
    model, settings = load("native t5").model, {"max_new_tokens": 3, "eos_token_id": None}
    given = fill_right([SOURCES[1], SOURCES[2]])
    expected = generate(model, **given, **settings)
    assert torch.equal(generate(model, **given, past_key_values=make_cache([1, 2]), **settings), expected)
    encoded = model.encode(given["input_ids"], [9, 2])
    states = {"encoder_outputs": encoded.states, "attention_mask": given["attention_mask"]}
    assert torch.equal(generate(model, **states, past_key_values=make_cache([1, 2]), **settings), expected)
    monkeypatch.setattr(model, "run_decoder", lambda *_, **__: pytest.fail("nothing may be read"))
    with pytest.raises(SettingError, match="for 1 rows and the encoder's input has 2"):
        generate(model, **given, past_key_values=make_cache([1]), **settings)
    with pytest.raises(SettingError, match="30 positions for row 0 and the encoder's input has 9"):
        generate(model, **given, past_key_values=make_cache([0, 2]), **settings)
    with pytest.raises(SettingError, match=r"of 9 positions for row 0 .* attention_mask"):
        generate(model, input_ids=given["input_ids"][:, :5], past_key_values=make_cache([1, 2]), **settings)


def test_a_callers_cache_comes_back_whole_from_beams_that_fail() -> None:
    model, cache, given = load("native t5").model, make_cache([1, 2]), fill_right([SOURCES[1], SOURCES[2]])
    read(cache, [[0], [0]])

    def fail(*_: Any) -> Any:
        raise ZeroDivisionError

    prompt = {"decoder_input_ids": [[0, 4], [0, 5]], "past_key_values": cache}
    with pytest.raises(ZeroDivisionError):
        generate(model, **given, **prompt, num_beams=3, max_new_tokens=3, logits_processor=[fail])
    assert cache.lengths == [1, 1] and cache.source_lengths == [9, 2]
    found = generate(model, **given, **prompt, max_new_tokens=3)
    assert torch.equal(found, generate(model, **given, decoder_input_ids=[[0, 4], [0, 5]], max_new_tokens=3))


def test_cross_keys_in_a_kind_that_cannot_be_read_are_refused() -> None:
    model, cache = load("native t5").model, make_cache([1])
    sizes = model.config
    static = StaticCache(sizes, 1, 16)
    static.begin(1, 9)
    for layer, (keys, values) in enumerate(cache.read_sources()):
        static.write(layer, torch.stack((keys, values), 3).transpose(1, 2).transpose(3, 2))
    static.end()
    pair = EncoderDecoderCache(cache.self_attention_cache, static)
    assert_alike(read(pair, [[0]]), read(make_cache([1]), [[0]]))
    packed = EncoderDecoderCache(cache.self_attention_cache, unspool.QuantizedCache(unspool.QuantizedCacheConfig()))
    packed.cross_attention_cache.lengths = [9]
    with pytest.raises(UnsupportedError, match="can't be read from a QuantizedCache"):
        packed.read_sources()

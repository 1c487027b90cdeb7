"""Prefixes and prompts of which keys are let go: exact at their distances, for every strategy, or refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.conformance.cases import GOLDENS, load_model

import unspool
from unspool import LanguageModel
from unspool.api.pruning import RULES, Held, Pruning, choose_keys

IDS = [(7 * place * place + 3 * place) % 90 + 5 for place in range(60)]
NEXT = [11, 40, 23]


def see_kept(folder: Path, ids: list[int], kept: list[int]) -> torch.Tensor:
    """The logits of transformers after the last token, where tokens behind the prefix see the kept ones alone."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    visible = torch.ones(len(ids), len(ids)).tril().bool()
    gone = [place for place in range(len(IDS)) if place not in kept]
    visible[len(IDS) :, gone] = False
    mask = torch.where(visible, 0.0, torch.finfo(torch.float32).min)[None, None]
    with torch.no_grad():
        return model(torch.tensor([ids]), attention_mask=mask, use_cache=False).logits[0, -1]


@pytest.mark.parametrize("rule", ["sinks", "llmlingua"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_neox"])
def test_later_tokens_see_the_kept_keys_where_they_stood(family: str, rule: str) -> None:
    """Rules that keep the same tokens for all heads: positions are those of the whole text."""
    lm = load_model(family)
    prefix = lm.prefix(IDS)
    kept, places = choose_keys(Held(lm.model, IDS, prefix.cache, []), Pruning(0.4, rule, window=6))
    assert all(torch.equal(each, kept[0][:1].expand_as(each)) for each in kept)
    assert places == kept[0][0].tolist()
    short = prefix.compress(0.4, rule, window=6)
    made = lm.generate(
        NEXT, prefix=short, max_new_tokens=1, output_logits=True, do_sample=False, return_dict_in_generate=True
    )
    expected = see_kept(GOLDENS / "models" / family, [*IDS, *NEXT], places)
    torch.testing.assert_close(made.output.logits[0][0], expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("rule", list(RULES))
def test_every_rule_keeps_its_share_and_the_prefix_stays_as_it_was(rule: str) -> None:
    lm = load_model("llama")
    prefix = lm.prefix(IDS)
    before = [layer.clone() for layer in prefix.cache.key_cache]
    short = prefix.compress(0.5, rule, window=8)
    assert len(short) == 30 and short.cache.lengths == [30]
    assert short.source_ids == IDS and len(prefix) == 60
    assert all(torch.equal(new, old) for new, old in zip(prefix.cache.key_cache, before, strict=True))
    values = prefix.cache.value_cache[-1][0]  # values are not turned: each head's are some of its own, in order
    for head, mine in enumerate(short.cache.value_cache[-1][0]):
        places = [int((values[head] == one).all(-1).nonzero()[0]) for one in mine]
        assert places == sorted(places) and len(set(places)) == 30


def test_all_keys_answer_as_the_whole_prefix_does() -> None:
    lm = load_model("llama")
    prefix = lm.prefix(IDS)
    whole = prefix.compress(1.0)
    for settings in (
        {"do_sample": False},
        {"num_beams": 3},
        {"prompt_lookup_num_tokens": 3, "do_sample": False},
        {"do_sample": True, "seed": 5},
    ):
        given = {"max_new_tokens": 12, **settings}
        assert (
            whole.generate([NEXT, NEXT[:1]], **given).token_ids == prefix.generate([NEXT, NEXT[:1]], **given).token_ids
        )


@pytest.mark.parametrize("settings", [{"prompt_lookup_num_tokens": 3}, {"num_beams": 1, "cache_implementation": None}])
def test_drafts_behind_a_short_prefix_change_nothing(settings: dict[str, object]) -> None:
    lm = load_model("llama")
    short = lm.prefix(IDS).compress(0.4, "keydiff", window=4)
    plain = short.generate(NEXT, max_new_tokens=16, do_sample=False)
    assert short.generate(NEXT, max_new_tokens=16, do_sample=False, **settings).token_ids == plain.token_ids


def test_a_question_decides_what_stays() -> None:
    lm = unspool.load(Path(__file__).parents[1] / "compression" / "goldens" / "models" / "llama", device="cpu")
    prefix = lm.prefix("The pier of Lisbon was built in 1843. " * 4)
    asked = prefix.compress(0.3, question="When was the pier built?")
    assert len(asked) == round(0.3 * len(prefix))
    assert any(
        not torch.equal(mine, theirs)
        for mine, theirs in zip(asked.cache.value_cache, prefix.compress(0.3).cache.value_cache, strict=True)
    )


def test_prompts_of_a_call_are_pruned_row_by_row() -> None:
    lm = load_model("llama")
    rows, config = [[*IDS, *NEXT], IDS[:25]], {"ratio": 0.5, "rule": "keydiff", "window": 4}
    given = {"max_new_tokens": 8, "do_sample": False}
    both = lm.generate(rows, cache_implementation="pruned", cache_config=config, **given)
    assert both.prompt_token_ids == rows
    for row, tokens in zip(rows, both.token_ids, strict=True):
        alone = lm.generate(row, cache_implementation="pruned", cache_config=config, **given)
        prefix = lm.prefix(row[:-1]).compress(0.5, "keydiff", window=4)
        assert alone.token_ids == [tokens] == prefix.generate([row[-1]], **given).token_ids
    beams = lm.generate(rows, cache_implementation="pruned", cache_config=config, max_new_tokens=8, num_beams=3)
    assert len(beams.token_ids) == 2


def test_it_is_saved_and_read(tmp_path: Path) -> None:
    lm = load_model("llama")
    short = lm.prefix(IDS).compress(0.5, "knorm")
    short.save(tmp_path / "prefix.safetensors")
    again = lm.load_prefix(tmp_path / "prefix.safetensors")
    assert (again.token_ids, again.source_ids) == (short.token_ids, IDS)
    assert again.generate(NEXT, max_new_tokens=6).token_ids == short.generate(NEXT, max_new_tokens=6).token_ids


@pytest.mark.parametrize("family", ["gpt2", "bloom", "mistral", "mamba"])
def test_models_whose_keys_can_not_be_moved_are_refused(family: str) -> None:
    lm: LanguageModel = load_model(family)
    with pytest.raises(unspool.UnsupportedError):
        lm.prefix(IDS[:20]).compress(0.5)


def test_what_can_not_be_is_refused() -> None:
    lm = load_model("llama")
    prefix = lm.prefix(IDS)
    for given in ({"ratio": 0}, {"ratio": 1.5}, {"ratio": float("nan")}, {"rule": "none"}, {"window": -1}):
        with pytest.raises(unspool.SettingError):
            prefix.compress(**{"ratio": 0.5, **given})
    with pytest.raises(unspool.SettingError, match="once"):
        prefix.compress(0.5).compress(0.5)
    with pytest.raises(unspool.SettingError, match="question"):
        prefix.compress(0.5, "h2o", question="When?")
    with pytest.raises(unspool.UnsupportedError, match="dynamic"):
        lm.prefix(IDS, cache_implementation="paged").compress(0.5)
    with pytest.raises(unspool.SettingError, match="cache_implementation"):
        unspool.generate(lm.model, torch.tensor([IDS]), cache_implementation="pruned", max_new_tokens=2)
    with unspool.Engine(lm) as engine:
        with pytest.raises(unspool.UnsupportedError, match="engine"):
            engine.submit(IDS, cache_implementation="pruned", max_new_tokens=2)
        short = prefix.compress(0.5, "keydiff")
        made = engine.submit(NEXT, prefix=short, max_new_tokens=4, do_sample=False).result()
        assert made.token_ids == short.generate(NEXT, max_new_tokens=4, do_sample=False).token_ids
    with pytest.raises(unspool.InputError, match="tokenizer"):
        prefix.compress(0.5, question="When?")
    for config in ({"ratio": 2}, {"keep": 1}, 3):
        with pytest.raises(unspool.SettingError):
            lm.generate(IDS, cache_implementation="pruned", cache_config=config, max_new_tokens=2)
    with pytest.raises(unspool.SettingError, match="max_new_tokens"):
        lm.generate(IDS, cache_implementation="pruned", max_new_tokens=-2)
    with pytest.raises(unspool.InputError):
        lm.generate([5], cache_implementation="pruned", max_new_tokens=2)

"""Draft models with another tokenizer: the same output, greedy and drawn, and guesses that come through."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch

import unspool
from tests.decoding.speculative.drafting_fakes import blur
from tests.decoding.speculative.test_verify import CRITICAL, chi_square, shape_scores
from tests.decoding.speculative.tokenizer_fakes import PAIRS, make_byte_level, make_pair, renumber
from tests.fakes import FakeModel, pad_left
from unspool import StoppingCriteria, generate, stream
from unspool.cache import ROLL_BACK, DynamicCache
from unspool.text import Tokenizer

TEXTS = ["the cat and the cat", "a", "hello world é日", "stop stopping\n\nstop", "aaaaaab"]
MODELS = {"num_assistant_tokens": 5, "assistant_confidence_threshold": 0.0}

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ends": {"eos_token_id": [1, 20, 45]},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2},
    "ngrams": {"no_repeat_ngram_size": 2, "min_new_tokens": 6, "eos_token_id": [1, 30]},
    "words": {"bad_words_ids": [[40, 41], [37]], "sequence_bias": [[[50, 51], 4.0]], "suppress_tokens": [33]},
    "custom": {"logits_processor": [lambda ids, scores: scores + torch.arange(scores.shape[1]) * (ids.shape[1] % 3)]},
}


def set_up(kind: str) -> tuple[FakeModel, dict[str, Any], Tokenizer]:
    """A target, the arguments of a draft model that speaks otherwise, and the target's tokenizer."""
    own, other = make_pair(kind)
    target, draft = FakeModel(len(own)), FakeModel(len(other), seed=3)
    if kind == "renumbered":
        draft = blur(renumber(target, own, other), 0.5)
    return target, {"assistant_model": draft, "tokenizer": own, "assistant_tokenizer": other, **MODELS}, own


def encode(tokenizer: Tokenizer, num_rows: int) -> dict[str, torch.Tensor]:
    return pad_left([tokenizer.encode(text, add_special_tokens=False) for text in TEXTS[:num_rows]])


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("num_rows", [1, 5])
@pytest.mark.parametrize("kind", PAIRS)
def test_greedy_equals_plain_greedy(kind: str, num_rows: int, name: str) -> None:
    target, drafter, own = set_up(kind)
    call = {**encode(own, num_rows), "max_new_tokens": 20, **SETTINGS[name]}
    plain = generate(target, **call)
    output = generate(target, **call, **drafter, return_dict_in_generate=True)
    assert output.sequences.tolist() == plain.tolist()
    assert sum(output.speculation.drafted) > 0
    if num_rows > 1:
        assert generate(target, **call, **drafter).tolist() == plain.tolist()  # rows may leave


@pytest.mark.parametrize("kind", ["merges", "characters"])
@pytest.mark.parametrize("more", [{"speculate": "auto"}, {"cache_implementation": "static"}, {"target_lookbehind": 1}])
def test_other_policies_caches_and_look_behinds(kind: str, more: dict[str, Any]) -> None:
    target, drafter, own = set_up(kind)
    call = {**encode(own, 5), "max_new_tokens": 20, "eos_token_id": [1, 20]}
    assert generate(target, **call, **drafter, **more).tolist() == generate(target, **call).tolist()


class AtWidth(StoppingCriteria):
    """Ends rows at widths of their own."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.tensor([input_ids.shape[1] >= 22 + 3 * row for row in range(len(input_ids))])


@pytest.mark.parametrize("stop", [{"stopping_criteria": [AtWidth()]}, {"stop_strings": ["t", "q"]}])
def test_stops_inside_a_draft(stop: dict[str, Any]) -> None:
    target, drafter, own = set_up("renumbered")
    call = {**encode(own, 5), "max_new_tokens": 30, **stop}
    plain = generate(target, **call, tokenizer=own)
    assert generate(target, **call, **drafter).tolist() == plain.tolist()
    rows: list[list[int]] = [[] for _ in range(5)]
    for emitted in stream(target, **call, **drafter):
        for row, tokens in emitted.tokens.items():
            rows[row] += tokens
    width = call["input_ids"].shape[1]
    for row, tokens in enumerate(rows):
        assert plain[row, width : width + len(tokens)].tolist() == tokens


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("num_extra", [0, 9])
def test_the_same_model_under_other_numbers_is_always_right(num_extra: int, do_sample: bool) -> None:
    """Renumbered tokens and a wider head: every guess is what the model says itself."""
    own, other = make_pair("renumbered")
    target = FakeModel(len(own))
    twin = renumber(target, own, other, num_extra)
    special = {"suppress_tokens": [0, 1]}  # which end drafts
    output = generate(
        target,
        **encode(own, 5),
        max_new_tokens=25,
        assistant_model=twin,
        tokenizer=own,
        assistant_tokenizer=other,
        return_dict_in_generate=True,
        do_sample=do_sample,
        **({"seed": 1, "temperature": 1.5} if do_sample else {}),
        **MODELS,
        **special,
    )
    assert output.speculation.acceptance == 1.0
    assert output.stats.forward_passes == 1 + -(-24 // 6)


class Writing(FakeModel):
    """Recites a text in its own tokens: what two tokenizers make of it is all that differs between two of these."""

    def __init__(self, tokenizer: Tokenizer, text: str) -> None:
        super().__init__(len(tokenizer))
        self._tokenizer, self._written = tokenizer, text

    def forward(self, tokens: Any, cache: Any, *, counts: Any = None, **more: Any) -> Any:
        result = super().forward(tokens, cache, counts=counts, **more)
        keys = cache[0][0][:, 0, :, 0].long()
        wants_all = more.get("want") is not None and more["want"].logits == "all"
        width = tokens.shape[1]
        for row, length in enumerate(cache.lengths):
            count = width if counts is None else counts[row]
            for place in range(count) if wants_all else [count - 1]:
                read = keys[row, : length - count + place + 1].tolist()
                scores = torch.zeros(self.info.vocab_size)
                scores[self._find_next(read)] = 9.0
                result.logits[(row, place) if wants_all else row] = scores
        return result

    def _find_next(self, read: list[int]) -> int:
        text = self._tokenizer.decode(read, skip_special_tokens=True)
        rest = self._written[len(text) :] if self._written.startswith(text) else "?"
        return (self._tokenizer.encode(rest or "?", add_special_tokens=False))[0]


@pytest.mark.parametrize("kind", ["merges"])
@pytest.mark.parametrize("lookbehind", [1, 10])
def test_a_draft_that_writes_the_same_text_is_nearly_always_right(kind: str, lookbehind: int) -> None:
    own, other = make_pair(kind)
    text = "the cat and the world, hello hello stopping\n\naaaaaab the catthe 日é😀 and so it goes on and on"
    target, draft = Writing(own, text), Writing(other, text)
    call = {"inputs": [own.encode("the cat")], "max_new_tokens": 60}
    plain = generate(target, **call)
    output = generate(
        target,
        **call,
        **MODELS,
        assistant_model=draft,
        tokenizer=own,
        assistant_tokenizer=other,
        assistant_lookbehind=lookbehind,
        target_lookbehind=lookbehind,
        return_dict_in_generate=True,
    )
    assert output.sequences.tolist() == plain.tolist()
    assert own.decode(plain[0]).startswith(text[:60])
    assert output.speculation.mean_accepted_length > 2.5
    assert draft.num_tokens_read < 2.2 * 60  # the text once, its guesses, and now and then an end again


# --- drawing -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"top_p": 0.9, "repetition_penalty": 1.6}], ids=["plain", "shaped"])
def test_draws_follow_the_models_distribution(settings: dict[str, Any]) -> None:
    """Only three of five tokens are common, one of them under another number."""
    own, other = few_tokens("abcde"), few_tokens("xdyabz")
    target, draft = FakeModel(5), FakeModel(6, seed=5)
    call = {"do_sample": True, "temperature": 5.0, "top_k": 0, "max_new_tokens": 4, **settings}
    drafter = {"assistant_model": draft, "tokenizer": own, "assistant_tokenizer": other, **MODELS}
    output = generate(
        target, [[1, 2]], **call, **drafter, seed=11, num_return_sequences=2000, return_dict_in_generate=True
    )
    assert 0.2 < output.speculation.acceptance < 1
    drawn = output.sequences[:, 2:]
    for place in (0, 1):
        expected = torch.zeros(5, dtype=torch.float64)
        for first in range(5) if place else [None]:
            before = [1, 2] if first is None else [1, 2, first]
            share = 1.0 if first is None else float((drawn[:, 0] == first).double().mean())
            expected += share * shape(target, before, settings)
        assert chi_square(torch.bincount(drawn[:, place], minlength=5).double(), expected) < CRITICAL[4]
    pairs = torch.bincount(drawn[:, 1] * 5 + drawn[:, 2], minlength=25).double()
    expected = torch.zeros(25, dtype=torch.float64)
    for first, second in ((a, b) for a in range(5) for b in range(5)):
        share = float(((drawn[:, 0] == first) & (drawn[:, 1] == second)).double().mean())
        expected[second * 5 : second * 5 + 5] += share * shape(target, [1, 2, first, second], settings)
    assert chi_square(pairs, expected) < CRITICAL[24]


def shape(target: FakeModel, ids: list[int], settings: dict[str, Any]) -> torch.Tensor:
    return shape_scores(ids, target.score(ids), {"temperature": 5.0, **settings})


def few_tokens(letters: str) -> Tokenizer:
    vocab = {letter: place for place, letter in enumerate(letters)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    backend.decoder = tokenizers.decoders.Fuse()
    return Tokenizer(backend)


@pytest.mark.parametrize("kind", PAIRS)
def test_drawn_rows_alone_are_rows_in_the_batch(kind: str) -> None:
    target, drafter, own = set_up(kind)
    more = {"max_new_tokens": 15, "do_sample": True, "eos_token_id": [1, 20, 21], "temperature": 0.8, **drafter}
    call = encode(own, 5)
    whole = generate(target, **call, seed=[5, 6, 7, 8, 9], **more)
    width = call["input_ids"].shape[1]
    for row, text in enumerate(TEXTS):
        prompt = own.encode(text, add_special_tokens=False)
        alone = generate(target, [prompt], seed=5 + row, **more)[0, len(prompt) :].tolist()
        assert whole[row, width : width + len(alone)].tolist() == alone


# --- limits ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("do_sample", [False, True])
def test_a_draft_models_context_ends_its_drafts_not_the_text(do_sample: bool) -> None:
    target, drafter, own = set_up("merges")
    draft = drafter["assistant_model"]
    draft.info = replace(draft.info, max_context=25)
    call = {**encode(own, 5), "max_new_tokens": 40, "do_sample": do_sample, "seed": 3}
    output = generate(target, **call, **drafter, return_dict_in_generate=True)
    assert max(output.speculation.drafted) > 0 and output.sequences.shape[1] == call["input_ids"].shape[1] + 40
    if not do_sample:
        assert output.sequences.tolist() == generate(target, **call).tolist()


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_draft_model_that_keeps_states_reads_its_text_again(rows: int, do_sample: bool) -> None:
    class Forgetful(DynamicCache):
        can = DynamicCache.can - {ROLL_BACK}

    made = []

    def open_cache(*_: Any, **__: Any) -> Forgetful:
        made.append(Forgetful())
        return made[-1]

    target, drafter, own = set_up("merges")
    asked = {**encode(own, rows), "max_new_tokens": 24, "do_sample": do_sample, "seed": 3}
    expected = generate(target, **asked, **drafter, return_dict_in_generate=True)
    drafter["assistant_model"].new_cache = open_cache
    found = generate(target, **asked, **drafter, return_dict_in_generate=True)
    assert found.sequences.tolist() == expected.sequences.tolist() and len(made) > 1
    assert found.speculation.accepted == expected.speculation.accepted


# --- the real model ----------------------------------------------------------------------------------------


def test_the_default_model_with_a_draft_model_of_another_tokenizer(default_model_file: Path) -> None:
    lm = unspool.load(default_model_file)
    other = make_byte_level([" the", " The", " is", " of", " and", " Paris", "ing"])
    draft = FakeModel(len(other))

    class Other:
        model, tokenizer = draft, other

    prompt = [{"role": "user", "content": "Name the capital of France. Straße, 日本."}]
    plain = lm.generate(prompt, max_new_tokens=8)
    drafted = lm.generate(prompt, max_new_tokens=8, assistant_model=Other(), num_assistant_tokens=3)
    assert drafted.texts == plain.texts and drafted.token_ids == plain.token_ids
    assert sum(drafted.speculation.drafted) > 0
    drawn = lm.generate(prompt, max_new_tokens=4, assistant_model=Other(), do_sample=True, seed=1)
    assert sum(drawn.speculation.drafted) > 0


@pytest.mark.parametrize("do_sample", [False, True])
def test_tokenizers_of_transformers(do_sample: bool) -> None:
    from transformers import PreTrainedTokenizerFast

    target, drafter, own = set_up("merges")
    other = drafter["assistant_tokenizer"]
    theirs = {
        "tokenizer": PreTrainedTokenizerFast(tokenizer_object=own.backend_tokenizer, eos_token="</s>"),
        "assistant_tokenizer": PreTrainedTokenizerFast(tokenizer_object=other.backend_tokenizer, eos_token="</s>"),
    }
    call = {**encode(own, 5), "max_new_tokens": 15, "do_sample": do_sample, "seed": 2}
    ours = generate(target, **call, **drafter, return_dict_in_generate=True)
    output = generate(target, **call, **(drafter | theirs), return_dict_in_generate=True)
    assert output.sequences.tolist() == ours.sequences.tolist()
    assert output.speculation == ours.speculation and sum(ours.speculation.drafted) > 0

"""Greedy steps that choose under grammars without masks: the tokens that scores under masks have on top."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.grammar.test_masks import END, FIRST, SCHEMAS, VOCAB, make_processor
from tests.grammar.tiny import load_tiny, make_tokenizer
from unspool.decoding import choice
from unspool.grammar.choosing import Chooser
from unspool.grammar.compiling import compile_grammar
from unspool.grammar.masks import MaskMaker
from unspool.grammar.processor import GrammarLogitsProcessor
from unspool.grammar.sources import read_source
from unspool.grammar.vocabulary import find_vocabulary
from unspool.kernels.cpu.library import find_library

needs_library = pytest.mark.skipif(find_library() is None, reason="the C library is not built")


@pytest.mark.parametrize("ends", [(END,), (0, 1)])
@pytest.mark.parametrize("seed", range(4))
def test_every_step_takes_the_highest_allowed_score(seed: int, ends: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(seed)
    plain, steps = make_processor(ends), make_processor(ends)
    ids = torch.full((len(SCHEMAS), FIRST), 7)
    for _ in range(6):  # calls
        choose = steps.start_choosing(ids)
        for _ in range(4):  # steps of each
            logits = torch.randn(len(ids), VOCAB, generator=generator)
            if torch.rand(1, generator=generator) < 0.3:  # the model would like to end, or to write what it must not
                logits[:, [*ends, 5]] += 10
            expected = plain(ids, logits).argmax(dim=-1).tolist()
            assert choose(logits.argmax(dim=-1).tolist(), logits) == expected
            ids = torch.cat((ids, torch.tensor(expected)[:, None]), dim=1)
            if set(expected) & set(ends):
                return


@pytest.mark.parametrize("text", ["hello the cat", "what and world"])
def test_forced_text_is_written_in_the_tokens_that_masks_have(text: str) -> None:
    """Where a text goes on in one way alone, a grammar takes its first letter too, and a mask does not."""
    tokenizer = make_tokenizer()
    grammar = compile_grammar(read_source("choice", [text, "no"]), find_vocabulary(tokenizer, VOCAB))
    plain, steps = (GrammarLogitsProcessor([grammar], FIRST, (END,)) for _ in range(2))
    ids, taken = torch.full((1, FIRST), 7), [0]
    while taken != [END]:
        written = tokenizer.decode(ids[0, FIRST:].tolist())
        logits = torch.zeros(1, VOCAB)
        if written != text:
            logits[0, tokenizer.encode(text[len(written)], add_special_tokens=False)] = 10.0  # a letter alone
        taken = plain(ids, logits).argmax(dim=-1).tolist()
        assert steps.start_choosing(ids)(logits.argmax(dim=-1).tolist(), logits) == taken
        ids = torch.cat((ids, torch.tensor(taken)[:, None]), dim=1)
    assert tokenizer.decode(ids[0, FIRST:-1].tolist()) == text


def test_steps_that_were_taken_and_not_emitted_are_forgotten() -> None:
    generator = torch.Generator().manual_seed(5)
    plain, steps = make_processor(), make_processor()
    ids = torch.full((len(SCHEMAS), FIRST), 7)
    for num_kept in (2, 0, 3, 1):
        logits = torch.randn(4, len(ids), VOCAB, generator=generator)
        logits[..., END] = -20
        choose = steps.start_choosing(ids)
        taken = [choose(each.argmax(dim=-1).tolist(), each) for each in logits]
        for expected, each in zip(taken[:num_kept], logits, strict=False):
            assert plain(ids, each).argmax(dim=-1).tolist() == expected
            ids = torch.cat((ids, torch.tensor(expected)[:, None]), dim=1)


def test_a_forced_beginning_is_free_and_a_row_without_a_token_says_so() -> None:
    processor = make_processor()
    choose = processor.start_choosing(torch.full((3, FIRST - 2), 7))
    logits = torch.zeros(3, VOCAB)
    assert [choose([token] * 3, logits) for token in (9, 8)] == [[9] * 3, [8] * 3]  # nothing is asked of it
    logits[:] = float("-inf")
    logits[:, 5] = 0  # which begins no document
    assert choose([5, 5, 5], logits) == [-1, -1, 5]


@needs_library
@pytest.mark.parametrize("rows", [1, 3])
def test_a_call_takes_the_tokens_of_single_steps(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = load_tiny("llama")
    chosen: list[int] = []
    call = Chooser.__call__

    def note(self: Chooser, likeliest: list[int], logits: torch.Tensor) -> list[int]:
        chosen.append(len(likeliest))
        return call(self, likeliest, logits)

    settings: dict[str, Any] = {
        "json_schema": SCHEMAS[:rows] if rows > 1 else SCHEMAS[0],
        "max_new_tokens": 48,
        "eos_token_id": END,
        "drafter": False,
    }
    prompts = [[5, 17, 90 + row] for row in range(rows)]
    monkeypatch.setattr(Chooser, "__call__", note)
    found = lm.generate(prompts, **settings)
    assert chosen
    monkeypatch.setattr(choice, "can_stretch", lambda step, rows: False)
    assert found.token_ids == lm.generate(prompts, **settings).token_ids


@needs_library
def test_a_token_that_is_allowed_needs_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = load_tiny("llama")
    free = lm.generate([[5, 17, 90]], max_new_tokens=24, eos_token_id=None).token_ids
    made: list[int] = []
    make = MaskMaker.make

    def note(self: MaskMaker, *args: Any, **kwargs: Any) -> Any:
        made.append(1)
        return make(self, *args, **kwargs)

    monkeypatch.setattr(MaskMaker, "make", note)
    kept = lm.generate([[5, 17, 90]], regex="(?s).{0,400}", max_new_tokens=24, eos_token_id=END, drafter=False)
    if kept.token_ids == free:
        assert len(made) <= 2  # the prompt's own pass is scored as ever

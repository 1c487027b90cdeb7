"""Masks along drafts, and states that rows share: what single steps find, found in fewer calls."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tests.grammar.tiny import make_tokenizer
from unspool.grammar.compiling import compile_grammar
from unspool.grammar.masks import MaskMaker
from unspool.grammar.processor import GrammarLogitsProcessor
from unspool.grammar.sources import read_source
from unspool.grammar.vocabulary import find_vocabulary

SCHEMAS: list[Any] = [  # of which no document has fewer than a dozen tokens
    {"type": "object", "properties": {"name": {"type": "string", "minLength": 40}}, "required": ["name"]},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 20},
    None,
]
VOCAB, END, FIRST = 256, 2, 3


def make_processor(ends: tuple[int, ...] = (END,)) -> GrammarLogitsProcessor:
    vocabulary = find_vocabulary(make_tokenizer(), VOCAB)
    sources = [read_source("json_schema", schema) for schema in SCHEMAS]
    grammars = [None if source is None else compile_grammar(source, vocabulary) for source in sources]
    return GrammarLogitsProcessor(grammars, FIRST, ends)


def mask(processor: GrammarLogitsProcessor, ids: torch.Tensor) -> torch.Tensor:
    """Which tokens are allowed: (rows, vocab)."""
    return processor(ids, torch.zeros(len(ids), VOCAB)).isfinite()


def write(num_tokens: int, seed: int, ends: tuple[int, ...] = (END,)) -> torch.Tensor:
    """A prompt and tokens that the grammars allow, none of which ends a text."""
    rng, processor = random.Random(seed), make_processor(ends)
    ids = torch.full((len(SCHEMAS), FIRST), 7)
    for _ in range(num_tokens):
        listed = [
            [token for token in row.nonzero().flatten().tolist() if token not in ends] for row in mask(processor, ids)
        ]
        ids = torch.cat((ids, torch.tensor([[rng.choice(tokens)] for tokens in listed])), dim=1)
    return ids


@pytest.mark.parametrize("ends", [(END,), (0, 1)])
@pytest.mark.parametrize("seed", [0, 1])
def test_masks_along_drafts_are_those_of_single_steps(
    seed: int, ends: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = write(9, seed, ends)
    plain, ahead = make_processor(ends), make_processor(ends)
    for begin, counts in ((FIRST, [4, 2, 3]), (FIRST + 4, [0, 5, 0])):
        drafts = [ids[row, begin : begin + count].tolist() for row, count in enumerate(counts)]
        ahead.foresee(ids[:, :begin].tolist(), drafts, torch.device("cpu"))
        for width in range(begin, begin + max(counts) + 1):
            index = torch.tensor([row for row, count in enumerate(counts) if width <= begin + count])
            expected = mask(plain.select_rows(index), ids[index, :width])
            with monkeypatch.context() as patch:
                patch.setattr(MaskMaker, "make", None)  # everything is known already
                assert torch.equal(mask(ahead.select_rows(index), ids[index, :width]), expected)
    assert torch.equal(mask(ahead, ids), mask(plain, ids))  # what was not drafted is found as ever


def test_rows_of_different_lengths_and_a_draft_that_is_not_allowed() -> None:
    ids, ahead = write(6, 2), make_processor()
    expected = [mask(make_processor(), ids[:, : FIRST + width]) for width in (2, 4)]
    wrong = int(expected[0][0].logical_not().nonzero()[0])
    rows = [ids[0, : FIRST + 2].tolist(), ids[1, : FIRST + 4].tolist(), ids[2, : FIRST + 2].tolist()]
    ahead.foresee(rows, [[wrong, 8], [], [1]], torch.device("cpu"))
    first, second = ahead.select_rows(torch.tensor([0, 2])), ahead.select_rows(torch.tensor([1]))
    assert torch.equal(mask(first, ids[[0, 2], : FIRST + 2]), expected[0][[0, 2]])
    assert torch.equal(mask(second, ids[[1], : FIRST + 4]), expected[1][[1]])


def test_rows_with_one_text_and_states_that_others_have_moved() -> None:
    """Copies of a processor share states; whoever finds that another has moved one of its own looks again."""
    ids = write(8, 3)
    one = make_processor()
    one.grammars = one.grammars[:1] * 3
    same = ids[[0, 0, 0]]
    for width in range(FIRST, ids.shape[1] + 1):
        expected = mask(make_processor(), ids[:, :width])[[0, 0, 0]]
        assert torch.equal(mask(one, same[:, :width]), expected)
        part = one.select_rows(torch.tensor([1]))
        for back in (width, FIRST, width):  # moves the row's state, and back
            mask(part, same[[1], :back])


def test_a_token_that_is_not_allowed_leaves_no_other() -> None:
    ids, processor = write(4, 4), make_processor()
    allowed = mask(processor, ids)
    wrong = torch.cat((ids, allowed.int().argmin(dim=1)[:, None]), dim=1)
    assert not mask(processor, wrong)[:2].any() and mask(processor, wrong)[2].all()
    assert torch.equal(mask(processor, ids), allowed)  # and can be taken back

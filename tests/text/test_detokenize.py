"""Text from tokens as they come: the pieces joined are the text of all of them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unspool.text import Detokenizer, Tokenizer

REPLACEMENT = "\ufffd"


class Counting:
    """A tokenizer with nothing but decode, which notes how many ids it was given."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.longest = 0
        self.total = 0

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        self.longest = max(self.longest, len(ids))
        self.total += len(ids)
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


def stream(tokenizer: Any, ids: list[int], sizes: list[int], skip: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    pieces, at = [], 0
    for size in [*sizes, len(ids)]:
        pieces.append(detokenizer.put(ids[at : at + size]))
        at += size
    pieces.extend(detokenizer.put([token_id]) for token_id in ids[at:])
    return [*pieces, detokenizer.end()]


cuts = st.lists(st.integers(1, 5), max_size=30) | st.just([1] * 200)


@settings(max_examples=40)
@given(text=st.text(max_size=40), sizes=cuts, skip=st.booleans())
@pytest.mark.parametrize("name", ["smollm2", "sentencepiece"])
def test_any_text(name: str, text: str, sizes: list[int], skip: bool, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    ids = tokenizer.encode(text)
    pieces = stream(tokenizer, ids, sizes, skip)
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    assert "".join(pieces) == whole
    if REPLACEMENT not in whole:  # SmolLM2's vocabulary lacks a few bytes
        assert not any(REPLACEMENT in piece for piece in pieces)


@settings(max_examples=200)
@given(
    ids=st.lists(st.integers(0, 49151) | st.integers(0, 500), max_size=60),
    sizes=cuts,
    skip=st.booleans(),
)
def test_any_ids_of_a_byte_level_vocabulary(smollm2: Tokenizer, ids: list[int], sizes: list[int], skip: bool) -> None:
    whole = smollm2.decode(ids, skip_special_tokens=skip)
    assert "".join(stream(smollm2, ids, sizes, skip)) == whole
    one_by_one = stream(smollm2, ids, [1] * len(ids), skip)
    assert Detokenizer(smollm2, skip_special_tokens=skip).read(ids) == "".join(one_by_one)


@settings(max_examples=30)
@given(data=st.data())
def test_long_runs_of_stray_bytes(smollm2: Tokenizer, data: st.DataObject) -> None:
    # The byte-level letters for bytes that never stand alone: continuations, leads, and bytes of no UTF-8 text.
    letters = [letter for letter in "ĢģĤðäÿÀé" if smollm2.convert_tokens_to_ids(letter) != smollm2.unk_token_id]
    strays = [smollm2.convert_tokens_to_ids(letter) for letter in letters]
    ids = data.draw(st.lists(st.sampled_from([*strays, 49200, 33]), min_size=100, max_size=600))
    joined, whole = "".join(stream(smollm2, ids, [1] * 600)), smollm2.decode(ids, skip_special_tokens=True)
    assert joined == whole


@settings(max_examples=150)
@given(data=st.data(), sizes=cuts, skip=st.booleans())
def test_any_ids_of_a_sentencepiece_vocabulary(
    sentencepiece: Tokenizer, data: st.DataObject, sizes: list[int], skip: bool
) -> None:
    character = st.characters(exclude_categories=("Cs",)).map(lambda c: [3 + byte for byte in c.encode()])
    groups = data.draw(
        st.lists(st.integers(0, 2).map(lambda i: [i]) | st.integers(259, 320).map(lambda i: [i]) | character)
    )
    ids = [token_id for group in groups for token_id in group if token_id < len(sentencepiece) or token_id > 310]
    whole = sentencepiece.decode(ids, skip_special_tokens=skip)
    assert "".join(stream(sentencepiece, ids, sizes, skip)).rstrip(REPLACEMENT) == whole.rstrip(REPLACEMENT)


def test_the_difference_for_bytes_that_are_no_text(sentencepiece: Tokenizer) -> None:
    # Bytes of a finished character, then a byte that begins none: the decoder takes the character back.
    ids = [3 + byte for byte in "é".encode()] + [3 + 0xFF] + sentencepiece.encode("the", add_special_tokens=False)
    assert sentencepiece.decode(ids) == REPLACEMENT * 3 + " the"
    assert "".join(stream(sentencepiece, ids, [1] * 20)) == "é" + REPLACEMENT * 2 + " the"
    assert Detokenizer(sentencepiece).read(ids) == "é" + REPLACEMENT * 2 + " the"  # the same where all are known


def test_a_character_comes_out_when_it_is_whole(smollm2: Tokenizer, sentencepiece: Tokenizer) -> None:
    for tokenizer in (smollm2, sentencepiece):
        for text in ("a👍b", "日本", "né"):
            ids = tokenizer.encode(text, add_special_tokens=False)
            shown = ""
            detokenizer = Detokenizer(tokenizer)
            for num_ids in range(1, len(ids) + 1):
                shown += detokenizer.put(ids[num_ids - 1 : num_ids])
                so_far = tokenizer.decode(ids[:num_ids])
                if REPLACEMENT not in so_far:
                    assert shown == so_far


@pytest.mark.parametrize("name", ["smollm2", "sentencepiece"])
def test_a_text_that_is_cut_inside_a_character_ends_in_its_bytes(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    ids = tokenizer.encode("né👍", add_special_tokens=False)
    for num_ids in range(1, len(ids) + 1):
        pieces = [tokenizer.decode(ids[:most]) for most in range(num_ids + 1)]
        most = max(most for most, piece in enumerate(pieces) if REPLACEMENT not in piece)  # the whole characters
        for sizes in ([1] * num_ids, [num_ids]):
            expected = pieces[most] + tokenizer.decode(ids[most:num_ids])
            assert "".join(stream(tokenizer, ids[:num_ids], sizes)) == expected
            assert name != "smollm2" or expected == tokenizer.decode(ids[:num_ids])
    assert tokenizer.decode(ids[:-1]).endswith(REPLACEMENT)


def test_the_cost_of_a_token_is_constant(smollm2: Tokenizer) -> None:
    text = "The quick brown fox 123 日本語 👍🏽 jumps. " * 40
    garbage = smollm2.convert_tokens_to_ids("ģ")  # the byte 0x81, which continues a character and begins none
    assert smollm2.decode([garbage]) == REPLACEMENT
    for ids in (smollm2.encode(text), [garbage] * 1500):
        counting = Counting(smollm2)
        pieces = stream(counting, ids, [1] * len(ids))
        assert "".join(pieces) == smollm2.decode(ids, skip_special_tokens=True)
        assert counting.longest <= 130
        assert counting.total <= 700 * len(ids)
    counting = Counting(smollm2)
    stream(counting, smollm2.encode(text), [1] * 5000)
    assert counting.longest <= 16


def test_a_transformers_tokenizer_and_a_second_text(smollm2: Tokenizer) -> None:
    import transformers

    other = transformers.PreTrainedTokenizerFast(tokenizer_object=smollm2.backend_tokenizer)
    detokenizer = Detokenizer(other)
    for text in ("Hello, 世界 👍", " again"):
        ids = smollm2.encode(text)
        assert "".join([detokenizer.put([token_id]) for token_id in ids] + [detokenizer.end()]) == text

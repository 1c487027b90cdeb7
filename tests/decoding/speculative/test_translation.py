"""Text in other tokens: nothing is lost, nothing is repeated, and only the end is told again."""

from __future__ import annotations

from itertools import accumulate

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.decoding.speculative.tokenizer_fakes import PAIRS, make_characters, make_pair
from unspool.decoding.speculative.drafters.alignment import align_tokens, join_text
from unspool.decoding.speculative.drafters.translation import Translation, split_at_special
from unspool.decoding.speculative.drafters.vocabulary import Vocabularies, Vocabulary
from unspool.errors import SettingError
from unspool.text import Tokenizer

LETTERS = "ab the cat andstopinghello wrld\n日é😀€aaa"
TEXTS = st.text(st.sampled_from(LETTERS), min_size=1, max_size=60)
CUTS = st.lists(st.integers(1, 5), min_size=1, max_size=60)


def make_vocabularies(kind: str) -> Vocabularies:
    own, other = make_pair(kind)
    return Vocabularies(Vocabulary(own, len(own)), Vocabulary(other, len(other)))


BOTH = {kind: make_vocabularies(kind) for kind in PAIRS}


def translate(kind: str, lookbehind: int = 3) -> Translation:
    return Translation(BOTH[kind], target_lookbehind=lookbehind, assistant_lookbehind=lookbehind)


def read(kind: str, translation: Translation) -> str:
    """What the draft model was told, without the space that its tokenizer may begin with."""
    drafts = BOTH[kind].drafts
    text, is_whole = join_text(drafts.read([one for one in translation.ids if one not in drafts.special]))
    assert is_whole
    return text.removeprefix(" ") if kind == "characters" else text


# --- places ------------------------------------------------------------------------------------------------


def cut(text: bytes, sizes: list[int]) -> list[bytes]:
    ends = [end for end in accumulate(sizes) if end < len(text)]
    return [text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True) if start < end]


@settings(max_examples=300)
@given(st.binary(max_size=40), st.binary(max_size=8), st.binary(max_size=8), CUTS, CUTS, st.integers(0, 1))
def test_tokens_meet_at_the_last_common_place(
    text: bytes, old: bytes, new: bytes, sizes: list[int], others: list[int], lead: int
) -> None:
    held, window = cut(text + old, sizes), cut(b" " * lead + text + new, others)
    kept, skipped = align_tokens(held, window, window_lead=lead)
    if (kept, skipped) != (0, 0):
        assert b"".join(held[:kept]) == b"".join(window[:skipped])[lead:]
        assert len(b"".join(window[:skipped])) >= lead
    for more in range(kept + 1, len(held) + 1):  # no later place would do
        told = b" " * lead + b"".join(held[:more])
        assert all(b"".join(window[:count]) != told for count in range(len(window) + 1))


def test_the_alignment_picks_up_after_a_mismatch() -> None:
    assert align_tokens([b"a", b"b", b"cd", b"x"], [b"a", b"bc", b"d", b"y"]) == (3, 3)
    assert align_tokens([b"a", b"a", b"a"], [b"aa", b"aa"]) == (2, 1)  # repeated text is no trap
    assert align_tokens([b"hel"], [b"hello"]) == (0, 0)
    assert align_tokens([b" wor", b"ld"], [b" ", b" world", b"!"], window_lead=1) == (2, 2)
    assert align_tokens([b"x"], [b" ", b"y"], window_lead=1) == (0, 1)  # the space is the tokenizer's, not the text's
    assert align_tokens([], [b"a"]) == align_tokens([b"a"], []) == (0, 0)


def test_unfinished_characters_wait() -> None:
    assert join_text(["日".encode()[:2]]) == ("", False)
    assert join_text([b"a", "日".encode()[:1], "日".encode()[1:]]) == ("a日", True)
    assert join_text([b"\xff", b"a"]) == ("\ufffda", True)


# --- there -------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@pytest.mark.parametrize("kind", PAIRS)
@given(text=TEXTS, sizes=CUTS, lookbehind=st.integers(1, 12))
def test_a_text_told_in_pieces_is_the_text(kind: str, text: str, sizes: list[int], lookbehind: int) -> None:
    tokens = BOTH[kind].own.encode(text)
    translation = translate(kind, lookbehind)
    first = 0
    for size in [*sizes, len(tokens)]:
        before = list(translation.ids)
        unchanged = translation.follow(tokens[first : first + size])
        first += size
        assert before[:unchanged] == translation.ids[:unchanged]
    assert read(kind, translation) == text


@settings(max_examples=60)
@pytest.mark.parametrize("kind", PAIRS)
@given(text=TEXTS, guess=TEXTS, right=st.integers(0, 60), sizes=CUTS)
def test_refused_guesses_leave_no_trace(kind: str, text: str, guess: str, right: int, sizes: list[int]) -> None:
    own, drafts = BOTH[kind].own, BOTH[kind].drafts
    translation = translate(kind)
    translation.follow(own.encode(text))
    written = text
    for size in sizes[:4]:
        translation.ids += drafts.encode(guess)
        accepted = translation.express()[: right % 7]
        new = [*accepted, *own.encode("b" * size)]
        translation.follow(new)
        written += join_text(own.read(new))[0]
    # Bytes that turned out to be no character are none to the draft model either.
    assert read(kind, translation).replace("\ufffd", "") == written.replace("\ufffd", "")


def test_only_the_changed_end_is_told_again() -> None:
    own, drafts = BOTH["merges"].own, BOTH["merges"].drafts
    translation = translate("merges", lookbehind=2)
    text = "the cat and the cat" * 20
    translation.follow(own.encode(text))
    held = list(translation.ids)
    assert translation.follow(own.encode(" and")) == len(held)
    assert translation.ids[len(held) :] == drafts.encode(" and")
    long_ago = len(translation.ids)
    for word in (" h", "e", "l", "l", "o"):  # "hell" is one token of the draft model's
        assert translation.follow(own.encode(word)) >= long_ago
    assert read("merges", translation).endswith("and hello")
    assert translation.ids[-3:] == drafts.encode(" hello")[-3:]


# --- and back ----------------------------------------------------------------------------------------------


@settings(max_examples=60)
@pytest.mark.parametrize("kind", PAIRS)
@given(text=TEXTS, guess=TEXTS)
def test_guesses_come_back_as_the_text_they_are(kind: str, text: str, guess: str) -> None:
    own, drafts = BOTH[kind].own, BOTH[kind].drafts
    translation = translate(kind)
    translation.follow(own.encode(text))
    translation.ids += drafts.encode(text + guess)[len(drafts.encode(text)) :]
    guessed, _ = join_text(drafts.read(translation.ids[translation.num_encoded :]))
    written, _ = join_text(own.read(translation.express()))
    if kind == "characters first":  # its "▁the" can't begin in the middle of a word: then there is no guess
        assert written in (guessed, "")
        assert written or not guessed or "the" in guessed
    else:
        assert written == guessed


def test_a_guess_inside_a_word_goes_on_from_there() -> None:
    own, drafts = BOTH["merges"].own, BOTH["merges"].drafts
    translation = translate("merges")
    translation.follow([*own.encode("hello worl")])
    translation.ids += drafts.encode("d and")
    assert own.tokenizer.decode(translation.express()) == "d and"


def test_unfinished_characters_of_a_row_are_finished_by_guesses() -> None:
    own, drafts = BOTH["merges"].own, BOTH["merges"].drafts
    whole = own.encode("a é")
    assert len(whole) == 4  # its two bytes are tokens
    translation = translate("merges")
    translation.follow(whole[:3])
    assert read("merges", translation) == "a "
    translation.ids += drafts.encode("éa")
    assert translation.express() == [whole[3], *own.encode("a")]


def test_special_tokens_are_never_guessed_through() -> None:
    own, drafts = BOTH["merges"].own, BOTH["merges"].drafts
    end, other = drafts.special_ids["</s>"], drafts.special_ids["<other>"]
    translation = translate("merges")
    translation.follow(own.encode("the"))
    cat = drafts.encode(" cat")
    translation.ids += [*cat, end, *cat]
    assert translation.express() == [*own.encode(" cat"), own.special_ids["</s>"]]
    translation.follow([])
    translation.ids += [*cat, other, *cat]  # the model has no such token
    assert translation.express() == own.encode(" cat")


def test_special_tokens_of_a_prompt() -> None:
    own, drafts = BOTH["merges"].own, BOTH["merges"].drafts
    start, end = own.special_ids["<s>"], own.special_ids["</s>"]
    translation = translate("merges")
    translation.follow([start, *own.encode("the cat"), end, *own.encode(" and")])
    assert translation.ids == [*drafts.encode("the cat"), drafts.special_ids["</s>"], *drafts.encode(" and")]
    opened = translate("characters")  # whose tokenizer begins texts with a token of its own
    opened.follow([start, *own.encode("ab")])
    told = BOTH["characters"].drafts
    assert opened.ids == [told.special_ids["<s>"], *told.encode("ab")]
    assert list(split_at_special([5, 1, 6, 7], frozenset({1}))) == [([5], 1), ([6, 7], None)]


# --- vocabularies ------------------------------------------------------------------------------------------


def test_relations() -> None:
    own, other = make_pair("merges")
    same = make_pair("merges")[0]
    assert Vocabularies(Vocabulary(own, 200), Vocabulary(same, 200)).relation == "same"
    assert Vocabularies(Vocabulary(own, 200), Vocabulary(same, 208)).relation == "renumbered"  # a wider head
    assert Vocabularies(Vocabulary(own, 200), Vocabulary(other, 200)).relation == "other"
    assert BOTH["renumbered"].relation == "renumbered"


@pytest.mark.parametrize("kind", PAIRS)
def test_common_tokens_read_the_same(kind: str) -> None:
    both = BOTH[kind]
    told, own = zip(*both.common.items(), strict=True)
    assert both.drafts.read(told) == both.own.read(own)
    assert len(set(own)) == len(own) > 90
    assert not both.own.special & set(own) and not both.drafts.special & set(told)
    if kind == "renumbered":
        assert set(own) == both.own.plain


def test_spaces_are_spaces_in_every_spelling() -> None:
    both = BOTH["characters"]
    own, other = both.own.ids["\u0120the"], both.drafts.ids["▁the"]
    assert both.common[other] == own


def test_hardly_any_common_tokens() -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"word{n}x": n for n in range(40)}, unk_token="word0x"))
    both = Vocabularies(BOTH["merges"].own, Vocabulary(Tokenizer(backend), 40))
    with pytest.raises(SettingError, match="only 0 read the same; use do_sample=False"):
        both.check_common()
    BOTH["merges"].check_common()


def test_tokens_that_the_model_lacks_are_left_out() -> None:
    tokenizer = make_characters()
    few = Vocabulary(tokenizer, len(tokenizer) - 3)
    assert all(token < few.num_tokens for token in few.encode("the é th"))
    assert max(few.plain) < few.num_tokens

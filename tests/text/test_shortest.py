"""How few tokens a text can have, known by its length alone: never more than there are."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from unspool.text.shortest import TokenBound, find_bound
from unspool.text.token_texts import list_byte_letters

LETTERS = list(list_byte_letters())
MERGES = [("a", "b"), ("Ġ", "Ġ"), ("ĠĠ", "ĠĠ"), ("Ã", "©")]


def make(normalizer: Any = None, cut: Any = None, letters: list[str] = LETTERS, **model: Any) -> Tokenizer:
    tokens = [*letters, *("".join(merge) for merge in MERGES)]
    backend = Tokenizer(models.BPE({one: place for place, one in enumerate(tokens)}, MERGES, **model))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False) if cut is None else cut
    if normalizer is not None:
        backend.normalizer = normalizer
    return backend


def make_fallback(**model: Any) -> Tokenizer:
    tokens = ["<unk>", "\u2581", "a", "\u2581a", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {one: place for place, one in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocabulary, [("\u2581", "a")], unk_token="<unk>", **model))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    return backend


KEEPING = {
    "bytes": make(),
    "composed": make(normalizers.NFC()),
    "compatible": make(normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])),
    "cut": make(cut=pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.ByteLevel(False)])),
    "letters alone": make(letters=[*LETTERS[:100], "Ġ", "Ã", "©"]),
    "fallback": make_fallback(byte_fallback=True),
    "unknown": make_fallback(fuse_unk=False),
}
TAKING = {
    "strip": make(normalizers.Strip()),
    "pattern": make(normalizers.Replace(Regex(" {2,}"), " ")),
    "shorter": make(normalizers.Replace("aaaa", "b")),
    "no accents": make(normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])),
    "no spaces": make(cut=pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel(False)])),
    "letters alone": make(normalizers.NFC(), letters=[*LETTERS[:100], "Ġ", "Ã", "©"]),
    "fused": make_fallback(fuse_unk=True),
    "words": Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1})),
    "pieces": Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], 0)),
}


SIGNS = st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from("ab é\u0301\u1fef𝐀각 \x04"))


@pytest.mark.parametrize("name", KEEPING)
@given(text=st.text(alphabet=SIGNS))
def test_a_text_has_no_fewer_tokens_than_its_length_says(name: str, text: str) -> None:
    backend = KEEPING[name]
    bound = find_bound(backend)
    assert bound is not None and bound.most_bytes <= 16 * 12
    assert len(backend.encode(text).ids) >= bound.count(text)


@pytest.mark.parametrize("name", TAKING)
def test_where_a_token_may_stand_for_anything_nothing_is_said(name: str) -> None:
    assert find_bound(TAKING[name]) is None


def test_added_tokens_count_and_those_that_take_spaces_have_no_bound() -> None:
    backend = make()
    backend.add_tokens([AddedToken("<|" + "long" * 10 + "|>")])
    assert find_bound(backend) == TokenBound(44)
    backend.add_tokens([AddedToken("<mask>", lstrip=True)])
    assert find_bound(backend) is None


def test_what_is_cut_has_no_bound() -> None:
    backend = make()
    backend.enable_truncation(5)
    assert find_bound(backend) is None


def test_bytes_without_tokens_count_for_nothing() -> None:
    """SmolLM2 has no tokens for some control characters."""
    backend = make(letters=[one for one in LETTERS if list_byte_letters()[one] != 4])
    bound = find_bound(backend)
    assert bound is not None and bound.lost == b"\x04"
    assert bound.count("\x04" * 1000) == len(backend.encode("\x04" * 1000).ids) == 0 < bound.count("a" * 1000)

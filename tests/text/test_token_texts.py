"""The text that is shown for a token: its characters, and single bytes by their numbers."""

from __future__ import annotations

from tests.fakes import make_tokenizer

from unspool.text.token_texts import TokenTexts


def test_bytes_of_a_character_are_shown_one_by_one() -> None:
    tokenizer = make_tokenizer()
    texts = TokenTexts(tokenizer)
    ids = tokenizer.encode("a日é the", add_special_tokens=False)
    shown = [texts.show(token) for token in ids]
    assert shown == ["a", "<0xE6>", "<0x97>", "<0xA5>", "<0xC3>", "<0xA9>", " the"]
    assert b"".join(texts.find(token)[1] for token in ids).decode() == "a日é the"
    assert texts.show(2) == "</s>"


def test_without_a_tokenizer_ids_are_shown() -> None:
    assert TokenTexts(None).show(7) == "token_id:7"

from __future__ import annotations

import gc
import random
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from unspool.errors import SettingError
from unspool.loading.gguf import GGUFFile
from unspool.stopping import StopStringCriteria
from unspool.stopping.pieces import BYTE_OF_CHARACTER, TokenPieces
from unspool.text import tokenizer_from_gguf

WORDS = ["st", "op", "stop", "opera", "sto", "pper", "las", "topper", "s", "to", "pped", "at", "tion", "p", "e", "nd"]
BYTE_CHARACTERS = [chr(character) for character in BYTE_OF_CHARACTER]


def wrap(tokenizer: Tokenizer) -> Any:
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def byte_level(num_fillers: int = 0) -> Any:
    """A small vocabulary of GPT-2's kind, with every byte a token."""
    spaced = ["Ġ" + word for word in WORDS]
    accents = ["Ã©", "cafÃ©", "Ġ" * 2]
    tokens = list(dict.fromkeys([*BYTE_CHARACTERS, *WORDS, *spaced, *accents]))
    tokens += [f"filler{number}" for number in range(num_fillers)]
    tokenizer = Tokenizer(models.BPE(vocab={token: place for place, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_end|>"])
    return wrap(tokenizer)


def sentencepiece() -> Any:
    """A small vocabulary of Llama's kind: a mark for spaces, and bytes for what it lacks."""
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    letters = list("abcdefghijklmnopqrstuvwxyz.,▁")
    tokens = list(dict.fromkeys(["<unk>", "</s>", *fallback, *letters, *WORDS, *("▁" + word for word in WORDS), "é"]))
    vocab = {token: place for place, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return wrap(tokenizer)


def wordpiece() -> Any:
    """A vocabulary that knows no bytes."""
    tokens = list(dict.fromkeys(["[UNK]", *"abcdefghijklmnopqrstuvwxyz", *WORDS, *("##" + word for word in WORDS)]))
    tokens += [f"##{letter}" for letter in "abcdefghijklmnoqrtuvwxyz"]
    tokenizer = Tokenizer(models.WordPiece(vocab={t: n for n, t in enumerate(tokens)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    return wrap(tokenizer)


TOKENIZERS = {"byte_level": byte_level(), "byte_fallback": sentencepiece(), "none": wordpiece()}


def ids_of(tokenizer: Any, tokens: list[str]) -> torch.Tensor:
    vocab = tokenizer.get_vocab()
    return torch.tensor([[vocab[token] for token in tokens]])


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@pytest.mark.parametrize(
    ("tokens", "stops"),
    [
        (["st", "op"], True),
        (["stop"], True),
        (["st", "opera"], True),
        (["sto", "pper"], True),
        (["las", "topper"], True),
        (["s", "to", "pped"], True),
        (["stop", "at"], False),
        (["st", "op", "at"], False),
        (["st", "opera", "tion"], False),
        (["st"], False),
        (["op"], False),
    ],
)
def test_overlaps(kind: str, tokens: list[str], stops: bool) -> None:
    tokenizer = TOKENIZERS[kind]
    assert StopStringCriteria(tokenizer, "stop")(ids_of(tokenizer, tokens), None).tolist() == [stops]


def test_modes_are_found() -> None:
    assert TokenPieces(TOKENIZERS["byte_level"]).mode == "byte_level"
    assert TokenPieces(TOKENIZERS["byte_fallback"]).mode == "byte_fallback"
    assert TokenPieces(TOKENIZERS["none"]).mode is None


def test_half_characters_and_spaces() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    criterion = StopStringCriteria(tokenizer, ["é", "e nd"])
    assert criterion(ids_of(tokenizer, ["Ã", "©"]), None).tolist() == [True]
    assert criterion(ids_of(tokenizer, ["Ã"]), None).tolist() == [False]
    assert criterion(ids_of(tokenizer, ["e", "Ġnd"]), None).tolist() == [True]
    assert criterion(ids_of(tokenizer, ["e", "nd"]), None).tolist() == [False]
    assert criterion.match(ids_of(tokenizer, ["e", "Ġnd"])[0].tolist()) == "e nd"
    tokenizer = TOKENIZERS["byte_fallback"]
    criterion = StopStringCriteria(tokenizer, ["é", "e nd"])
    assert criterion(ids_of(tokenizer, ["<0xC3>", "<0xA9>"]), None).tolist() == [True]
    assert criterion(ids_of(tokenizer, ["e", "▁nd"]), None).tolist() == [True]


def test_rows_are_judged_one_by_one_with_left_padding() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    pad = tokenizer.get_vocab()["<|im_end|>"]
    vocab = tokenizer.get_vocab()
    rows = [["s", "to", "pped"], ["stop"], ["at"], ["stop", "at"]]
    ids = torch.tensor([[pad] * (4 - len(row)) + [vocab[token] for token in row] for row in rows])
    criterion = StopStringCriteria(tokenizer, ["stop"])
    assert criterion(ids, None).tolist() == [True, True, False, False]
    for row, flag in zip(ids, criterion(ids, None), strict=True):
        assert criterion(row[None], None)[0] == flag
    assert StopStringCriteria(tokenizer, "<|im_end|>")(torch.tensor([[pad]]), None).tolist() == [True]


def test_ids_that_are_no_tokens_break_a_match() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    vocab = tokenizer.get_vocab()
    criterion = StopStringCriteria(tokenizer, "stop")
    ids = torch.tensor(
        [[vocab["st"], 10**6, vocab["op"]], [vocab["st"], vocab["op"], 10**6], [vocab["st"], -1, vocab["op"]]]
    )
    assert criterion(ids, None).tolist() == [False, False, False]
    assert criterion(ids[:, :0], None).tolist() == [False, False, False]


@settings(max_examples=150)
@given(data=st.data(), kind=st.sampled_from(sorted(TOKENIZERS)))
def test_equals_the_reference_on_random_tokens(data: st.DataObject, kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    letters = "stopera nd" if kind != "none" else "stopera"
    text = st.text(letters, min_size=1, max_size=6)
    extra = ["é", "<|im_end|>"] if kind == "byte_level" else ["é"] if kind == "byte_fallback" else []
    stops = data.draw(st.lists(text | st.sampled_from([*extra, "stop", "aa"]), min_size=1, max_size=3))
    try:
        theirs = transformers.StopStringCriteria(tokenizer, stops)
    except ValueError:  # no token ends any of them
        return
    ours = StopStringCriteria(tokenizer, stops)
    vocab = tokenizer.get_vocab()
    likely = [index for token, index in vocab.items() if set(token.lstrip("Ġ▁#")) <= set(letters + "Ã©é")]
    token = st.sampled_from(likely) | st.sampled_from(sorted(vocab.values())) | st.just(len(vocab) + 7)
    length = data.draw(st.integers(1, 8))
    rows = data.draw(st.lists(st.lists(token, min_size=length, max_size=length), min_size=1, max_size=8))
    ids = torch.tensor(rows)
    assert ours(ids, None).tolist() == theirs(ids, None).tolist(), (stops, rows)


@pytest.mark.parametrize("kind", sorted(TOKENIZERS))
def test_tables_equal_the_reference(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    stops = ["stop", "aa", "p", "opop"]
    ours, theirs = StopStringCriteria(tokenizer, stops), transformers.StopStringCriteria(tokenizer, stops)
    assert torch.equal(ours.embedding_vec, theirs.embedding_vec)
    assert torch.equal(ours.target_lens, theirs.target_lens)
    assert ours.max_valid_positions == theirs.max_valid_positions
    assert ours.max_valid_end_lens == theirs.max_valid_end_lens
    assert ours.maximum_token_len == theirs.maximum_token_len
    assert ours.num_stop_strings == 4
    ours_clean, theirs_clean = (one.clean_tokenizer_vocab(tokenizer) for one in (ours, theirs))
    # The vocabulary comes in another order at each call.
    assert sorted(zip(*ours_clean, strict=True)) == sorted(zip(*theirs_clean, strict=True))
    vocab = tokenizer.get_vocab()
    again = ours.clean_and_embed_tokens_with_cache(tuple(vocab), tuple(vocab.values()), tokenizer)
    assert again[0] is ours.embedding_vec


def test_positions_and_table_by_hand() -> None:
    tokens = ["last", "top", "topper", "s", "p"]
    inside, at_end = StopStringCriteria._stop_string_get_matching_positions(tokens, range(5), ["stop"])
    assert {tokens[index]: found for index, found in inside["stop"].items()} == {"s": [3], "last": [2]}
    assert {tokens[i]: found for i, found in at_end["stop"].items()} == {"top": [3], "topper": [3], "p": [1]}
    table, most_inside, most_at_end = StopStringCriteria._stop_string_create_embedding_vec(tokens, range(5), ["stop"])
    assert (most_inside, most_at_end) == (1, 1)
    assert table[:-1].tolist() == [[2, -1, 4], [-1, 3, 3], [-1, 3, 6], [3, -1, 1], [-1, 1, 1]]
    with pytest.raises(ValueError, match="stop strings"):
        StopStringCriteria._stop_string_create_embedding_vec(["a"], [0], ["z"])


@settings(max_examples=100)
@given(
    tokens=st.lists(st.text("ab", max_size=4), min_size=1, max_size=6, unique=True),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
)
def test_positions_equal_the_reference(tokens: list[str], stops: list[str]) -> None:
    indices = list(range(len(tokens)))
    ours = StopStringCriteria._stop_string_get_matching_positions(tokens, indices, stops)
    assert ours == transformers.StopStringCriteria._stop_string_get_matching_positions(tokens, indices, stops)


@pytest.mark.parametrize("bad", [[], "", ["a", ""], ["a" * 5000], [3], ["a"] * 1000])
def test_bad_stop_strings_are_refused(bad: Any) -> None:
    with pytest.raises(SettingError):
        StopStringCriteria(TOKENIZERS["byte_level"], bad)


def test_set_up_takes_no_time_on_a_large_vocabulary() -> None:
    tokenizer = byte_level(num_fillers=128_000)
    ids = ids_of(tokenizer, ["Ġ", "st", "opera"])
    start = time.process_time()
    flags = StopStringCriteria(tokenizer, ["stop", "\n\nUser:"])(ids, None)
    assert time.process_time() - start < 0.05
    assert flags.tolist() == [True]


def test_a_tokenizer_is_let_go() -> None:
    tokenizer = byte_level()
    criterion = StopStringCriteria(tokenizer, "stop")
    criterion(ids_of(tokenizer, ["st", "op"]), None)
    alive = weakref.ref(tokenizer)
    del tokenizer, criterion
    gc.collect()
    assert alive() is None


class PlainTokenizer:
    """The least a tokenizer must offer: it can't be called, hashed by content or weakly held."""

    __slots__ = ("tokens",)

    def __init__(self) -> None:
        self.tokens = ["st", "op", "Ġstop"]

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [self.tokens[one] for one in ids]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        joined = "".join(tokens)
        return bytes(BYTE_OF_CHARACTER[ord(character)] for character in joined).decode("utf-8", "replace")


def test_a_plain_tokenizer_is_enough() -> None:
    criterion = StopStringCriteria(PlainTokenizer(), " stop")
    assert criterion(torch.tensor([[0, 1], [0, 2], [1, 9]]), None).tolist() == [False, True, False]


@pytest.mark.slow
def test_equals_the_reference_on_smollm2(default_model_file: Path) -> None:
    tokenizer = wrap(tokenizer_from_gguf(GGUFFile(default_model_file).metadata).backend_tokenizer)
    stops = ["<|im_end|>", "stop", "e nd", "\n\n", "é", "日本"]
    ours, theirs = StopStringCriteria(tokenizer, stops), transformers.StopStringCriteria(tokenizer, stops)
    chooser = random.Random(0)
    table, most, num = theirs.embedding_vec[:-1], theirs.max_valid_positions, len(stops)
    ends = table[:, most * num : -1].unflatten(-1, (num, -1))

    def tokens_with(columns: torch.Tensor) -> list[int]:
        return (columns != -1).any(-1).nonzero().flatten().tolist() or [0]

    inner = [tokens_with(table[:, most * place : most * (place + 1)]) for place in range(num)]
    final = [tokens_with(ends[:, place]) for place in range(num)]
    rows = []
    for _ in range(6000):
        place = chooser.randrange(num)
        row = [chooser.choice(inner[place]) for _ in range(7)] + [chooser.choice(final[place])]
        if chooser.random() < 0.2:
            row[chooser.randrange(8)] = chooser.randrange(len(tokenizer))
        rows.append(row)
    for text in ("please stop", "cut the e nd", "in 日本", "caféteria", "a\n\nb", "hello<|im_end|>", "none of them"):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        rows.extend(([0] * 8 + ids[: end + 1])[-8:] for end in range(len(ids)))
    flags = theirs(torch.tensor(rows), None)
    assert 200 < flags.sum() < 5500
    assert torch.equal(ours(torch.tensor(rows), None), flags)

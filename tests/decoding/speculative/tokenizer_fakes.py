"""Tokenizers that cut the same texts otherwise, and models that speak them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import tokenizers
import torch

from tests.fakes import FakeModel, bytes_to_letters
from unspool.text import Tokenizer

LETTERS = bytes_to_letters()
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
KNOWN = [*range(32, 127), 10, *sorted({*"é€日😀".encode()})]


def make_byte_level(words: Sequence[str], special: Sequence[str] = ("<s>", "</s>"), reverse: bool = False) -> Tokenizer:
    """Byte-level BPE over a few bytes, with merges that make up the words from the left."""
    known = KNOWN[::-1] if reverse else KNOWN
    vocab = {token: place for place, token in enumerate(special)}
    vocab |= {LETTERS[byte]: len(special) + place for place, byte in enumerate(known)}
    merges = []
    for word in words:
        spelled = "".join(LETTERS[byte] for byte in word.encode())
        for end in range(2, len(spelled) + 1):
            if spelled[:end] not in vocab:
                merges.append((spelled[: end - 1], spelled[end - 1]))
                vocab[spelled[:end]] = len(vocab)
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(list(special))
    return Tokenizer(backend, special_tokens={name: token for name, token in SPECIAL.items() if token in special})


def make_characters(opens: bool = False) -> Tokenizer:
    """A token a character, or bytes where it has none; spaces are sentencepiece's, and each text begins with one."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for letter in ["▁", *map(chr, range(33, 127)), "é", "▁the", "the"]:
        vocab.setdefault(letter, len(vocab))
    merges = [("t", "h"), ("th", "e"), ("▁", "the")]
    vocab.setdefault("th", len(vocab))
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    backend.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    backend.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    if opens:
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
        )
    return Tokenizer(backend, special_tokens=SPECIAL)


OWN_WORDS = (" the", " cat", " and", "stop", "ing", "hello", " world", "日", "aaaa", "ab")
OTHER_WORDS = (" ca", " an", "the", "st", "op", "hell", " wor", "ld", "😀", "aaa", "ba", "\n\n")


def make_pair(kind: str) -> tuple[Tokenizer, Tokenizer]:
    """The model's tokenizer and a draft model's."""
    own = make_byte_level(OWN_WORDS)
    if kind == "merges":
        return own, make_byte_level(OTHER_WORDS, special=("</s>", "<other>"), reverse=True)
    if kind == "characters":
        return own, make_characters(opens=True)
    if kind == "characters first":
        return make_characters(), own
    assert kind == "renumbered"
    return own, make_byte_level(OWN_WORDS, reverse=True)


PAIRS = ("merges", "characters", "characters first", "renumbered")


def renumber(model: FakeModel, own: Tokenizer, other: Tokenizer, num_extra: int = 0) -> FakeModel:
    """The same model under another tokenizer's numbers, with a wider head if asked."""
    own_ids, other_ids = own.get_vocab(), other.get_vocab()
    size = len(own_ids) + num_extra
    twin = FakeModel(size)
    twin.info = replace(model.info, vocab_size=size)
    order = torch.zeros(size, dtype=torch.int64)
    for token, number in other_ids.items():
        order[number] = own_ids[token]
    twin.table, twin.places = model.table[order][:, order], model.places[:, order]
    twin.table[:, len(own_ids) :], twin.places[:, len(own_ids) :] = -100.0, 0.0
    return twin

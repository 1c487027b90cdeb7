"""Sentencepiece files without sentencepiece: T5's, Pegasus's and Marian's folders, and files that are damaged."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from unspool.errors import InputError, LoadError, UnsupportedError
from unspool.text.opening import open_tokenizer
from unspool.text.sentencepiece_file import PieceKind, build_pieces, read_sentencepieces

# Logarithms of probabilities: "▁hello" is likelier than its parts, "wo" and "rld" likelier than other cuts.
WORDS = (("▁hello", -2.0), ("▁", -3.0), ("wo", -3.0), ("rld", -3.5), ("▁he", -4.0), ("llo", -4.0), ("o", -5.0))
LETTERS = tuple((letter, -9.0) for letter in "helwrd!")


def write_varint(value: int) -> bytes:
    found = b""
    while value > 0x7F:
        found += bytes([value & 0x7F | 0x80])
        value >>= 7
    return found + bytes([value])


def write_bytes(number: int, data: bytes) -> bytes:
    return write_varint(number << 3 | 2) + write_varint(len(data)) + data


def write_piece(text: str, score: float = 0.0, kind: int = 1) -> bytes:
    body = write_bytes(1, text.encode()) + write_varint(2 << 3 | 5) + struct.pack("<f", score)
    return write_bytes(1, body + (write_varint(3 << 3) + write_varint(kind) if kind != 1 else b""))


def write_model(first: Sequence[tuple[str, int]], *, algorithm: int = 1, keeps_spaces: bool = False) -> bytes:
    """A model file: control tokens, words and letters."""
    pieces = b"".join(write_piece(text, kind=kind) for text, kind in first)
    pieces += b"".join(write_piece(text, score) for text, score in (*WORDS, *LETTERS))
    trained = write_bytes(2, write_varint(3 << 3) + write_varint(algorithm))
    prepared = write_bytes(3, write_varint(4 << 3) + b"\x00") if keeps_spaces else b""
    return pieces + trained + prepared


T5 = write_model([("<pad>", 3), ("</s>", 3), ("<unk>", 2)])
PEGASUS = write_model([("<pad>", 3), ("</s>", 3), ("<unk>", 2)])


def write_folder(folder: Path, files: dict[str, Any]) -> Path:
    for name, content in files.items():
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        (folder / name).write_bytes(data)
    return folder


def test_what_a_file_says(tmp_path: Path) -> None:
    path = write_folder(tmp_path, {"a.model": write_model([("<unk>", 2), ("<s>", 3)], keeps_spaces=True)}) / "a.model"
    model = read_sentencepieces(path)
    assert [piece.text for piece in model.pieces[:4]] == ["<unk>", "<s>", "▁hello", "▁"]
    assert [piece.kind for piece in model.pieces[:3]] == [PieceKind.UNKNOWN, PieceKind.CONTROL, PieceKind.NORMAL]
    assert model.pieces[2].score == -2.0 and model.unk_id == 0
    assert model.adds_space_prefix and not model.removes_extra_spaces


def test_text_is_cut_into_its_likeliest_pieces(tmp_path: Path) -> None:
    path = write_folder(tmp_path, {"a.model": T5}) / "a.model"
    backend = build_pieces(read_sentencepieces(path), "a.model")
    assert backend.encode("hello  world!").tokens == ["▁hello", "▁", "wo", "rld", "!"]
    assert backend.encode("hellX").ids[-1] == 2  # the unknown token's
    assert backend.decode(backend.encode("hello world!").ids) == "hello world!"


def test_bytes_for_what_has_no_piece(tmp_path: Path) -> None:
    data = T5 + b"".join(write_piece(f"<0x{byte:02X}>", kind=6) for byte in range(256))
    backend = build_pieces(read_sentencepieces(write_folder(tmp_path, {"a.model": data}) / "a.model"), "a.model")
    ids = backend.encode("hello é").ids
    assert backend.decode(ids) == "hello é" and backend.id_to_token(ids[-1]) == "<0xA9>"


@pytest.mark.parametrize("told", [{"tokenizer_class": "T5Tokenizer"}, None])
def test_t5_has_sentinels_that_count_down(tmp_path: Path, told: dict[str, Any] | None) -> None:
    beside = {"config.json": {"model_type": "t5"}} if told is None else {"tokenizer_config.json": told}
    tokenizer = open_tokenizer(write_folder(tmp_path, {"spiece.model": T5, **beside}))
    size = 3 + len(WORDS) + len(LETTERS)
    assert tokenizer.convert_tokens_to_ids(["<extra_id_99>", "<extra_id_0>"]) == [size, size + 99]
    assert tokenizer.encode("hello") == [3, 1] and tokenizer.encode("hello<extra_id_0>") == [3, size + 99, 1]
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id) == (1, 0, 2)
    assert tokenizer.decode([0, 3, 1], skip_special_tokens=True) == "hello"
    tokenizer.save(tmp_path / "saved")
    assert open_tokenizer(tmp_path / "saved").encode("hello world!") == tokenizer.encode("hello world!")


def test_pegasus_puts_tokens_before_its_pieces(tmp_path: Path) -> None:
    files = {"spiece.model": PEGASUS, "tokenizer_config.json": {"tokenizer_class": "PegasusTokenizer"}}
    tokenizer = open_tokenizer(write_folder(tmp_path, files))
    tokens = ["<pad>", "</s>", "<mask_1>", "<mask_2>", "<unk_2>", "<unk_102>", "<unk>", "▁hello"]
    assert tokenizer.convert_tokens_to_ids(tokens) == [0, 1, 2, 3, 4, 104, 105, 106]
    assert tokenizer.encode("hello") == [106, 1] and tokenizer.encode("hellX")[-2] == 105


def test_other_families_with_such_a_file_are_refused(tmp_path: Path) -> None:
    files = {"spiece.model": T5, "tokenizer_config.json": {"tokenizer_class": "AlbertTokenizer"}}
    with pytest.raises(UnsupportedError, match=r"albert.*T5 and Pegasus are known"):
        open_tokenizer(write_folder(tmp_path, files))
    with pytest.raises(UnsupportedError, match="another kind than unigram and BPE"):
        build_pieces(
            read_sentencepieces(write_folder(tmp_path, {"b": write_model([("<unk>", 2)], algorithm=3)}) / "b"), "b"
        )
    with pytest.raises(UnsupportedError, match=r"tokenizer.model is the vocabulary of a xlnet"):
        files = {"tokenizer.model": T5, "tokenizer_config.json": {"tokenizer_class": "XLNetTokenizer"}}
        (tmp_path / "spiece.model").unlink()
        open_tokenizer(write_folder(tmp_path, files))


# A BPE vocabulary with bytes that sentencepiece 0.2.2 learned, and what it makes of texts: (text, ids, decoded).
BPE_FILE = Path(__file__).parent / "data" / "bpe.model"
BPE_TEXTS = json.loads((Path(__file__).parent / "data" / "bpe.json").read_text(encoding="utf-8"))


def test_bpe_joins_what_sentencepiece_joins(tmp_path: Path) -> None:
    backend = build_pieces(read_sentencepieces(BPE_FILE), "bpe.model")
    for text, ids, decoded in BPE_TEXTS:
        assert backend.encode(text, add_special_tokens=False).ids == ids
        assert backend.decode(ids) == decoded
    files = {"tokenizer.model": BPE_FILE.read_bytes(), "config.json": {"model_type": "llama"}}
    tokenizer = open_tokenizer(write_folder(tmp_path, files))
    text, ids, _ = BPE_TEXTS[0]
    assert tokenizer.encode(text) == [1, *ids] and tokenizer.decode([1, *ids, 2], skip_special_tokens=True) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (1, 2, 0)
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": false, "add_eos_token": true}')
    assert open_tokenizer(tmp_path).encode(text) == [*ids, 2]


MARIAN = write_model([("<unk>", 2), ("<s>", 3), ("</s>", 3)])
TOKENS = ("</s>", "<unk>", "rld", "▁hello", "wo", "▁", "▁welt", ">>deu<<", ">>fra<<", "<pad>")
IDS = {token: index for index, token in enumerate(TOKENS)}


def test_marian_numbers_the_sources_pieces_by_its_vocabulary(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, {"source.spm": MARIAN, "target.spm": MARIAN, "vocab.json": IDS})
    tokenizer = open_tokenizer(folder)
    assert tokenizer.encode("hello world!") == [3, 5, 4, 2, 1, 0]  # "!" is a piece of the file without an id
    assert tokenizer.encode(">>fra<< hello") == [8, 3, 0]
    assert tokenizer.encode("hello", add_special_tokens=False) == [3]
    assert tokenizer.decode([9, 3, 6, 0], skip_special_tokens=True) == "hello welt"
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, len(tokenizer)) == (0, 9, 10)
    with pytest.raises(InputError, match=r">>spa<<, and the model does not write that language; it writes deu, fra"):
        tokenizer.encode(">>spa<< hello")
    tokenizer.save(tmp_path / "saved")
    assert open_tokenizer(tmp_path / "saved").encode("hello world!") == [3, 5, 4, 2, 1, 0]


def test_marian_with_a_vocabulary_for_each_side(tmp_path: Path) -> None:
    target = {"</s>": 0, "<unk>": 1, "▁welt": 2, "<pad>": 3}
    files = {"source.spm": MARIAN, "vocab.json": IDS, "target_vocab.json": target}
    tokenizer = open_tokenizer(write_folder(tmp_path, files))
    assert tokenizer.encode("hello") == [3, 0] and tokenizer.decode([2, 0], skip_special_tokens=True) == "welt"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 40,
        T5[:-3],
        T5[:50],
        b"not a model at all",
        write_bytes(1, b"\x0a\x05ab"),
        write_piece("a", float("nan")) + T5,
        write_piece("\ufffd" * 300) + T5,
        write_piece("a", kind=77),
        write_bytes(1, b"\x0a\x02\xff\xfe"),
        write_varint(1 << 3 | 3),
        b"\x08" + b"\x80" * 12,
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(LoadError):
        read_sentencepieces(write_folder(tmp_path, {"a.model": data}) / "a.model")


@pytest.mark.parametrize(
    "ids", [{}, {"</s>": 0}, {**IDS, "x": -1}, {**IDS, "x": 10**12}, {**IDS, "x": "3"}, {**IDS, "\ud800": 9}]
)
def test_damaged_vocabularies_are_refused(tmp_path: Path, ids: dict[str, Any]) -> None:
    with pytest.raises(LoadError):
        open_tokenizer(write_folder(tmp_path, {"source.spm": MARIAN, "vocab.json": ids}))


@pytest.mark.parametrize("told", [{"extra_ids": -1}, {"extra_ids": 10**9}, {"extra_ids": "many"}])
def test_numbers_of_added_tokens_are_bounded(tmp_path: Path, told: dict[str, Any]) -> None:
    files = {"spiece.model": T5, "tokenizer_config.json": {"tokenizer_class": "T5Tokenizer", **told}}
    with pytest.raises(LoadError, match="extra_ids"):
        open_tokenizer(write_folder(tmp_path, files))

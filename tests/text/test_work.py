"""What encoding may cost: worked out beforehand, and cut off in a process of its own where it can't be."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pytest

from unspool.errors import InputError, LoadError
from unspool.text import confined
from unspool.text.backend import build_byte_level, build_sentencepiece
from unspool.text.tokenizer import Tokenizer
from unspool.text.work import Workload, measure_workload

MEGABYTE = 1_000_000
BYTES = {**{chr(code): code for code in range(33, 127)}, "Ġ": 0, "Ċ": 1, "ab": 200, "ĠĠ": 201}
TEXTS = {
    "letters": "ab" * (MEGABYTE // 2),
    "spaces before a letter": " " * MEGABYTE + "a",
    "lines": "\n" * MEGABYTE,
    "lines and spaces": "\n " * (MEGABYTE // 2) + "1",
    "emoji": "\U0001f680" * (MEGABYTE // 4),
    "digits": "1" * MEGABYTE,
}


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def grow(times: int) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * times}


def load(folder: Path, **parts: Any) -> Tokenizer:
    described: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "c": 2}, "merges": []},
        **parts,
    }
    (folder / "tokenizer.json").write_text(json.dumps(described))
    return Tokenizer.from_folder(folder)


@pytest.mark.parametrize("name", TEXTS)
def test_a_megabyte_of_text(name: str) -> None:
    tokenizer = Tokenizer(build_byte_level(BYTES, [("a", "b"), ("Ġ", "Ġ")], "llama-bpe"))
    before = resource.getrusage(resource.RUSAGE_SELF)
    tokenizer.encode(TEXTS[name])
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert after.ru_utime - before.ru_utime < 10
    assert after.ru_maxrss - before.ru_maxrss < 2 << 20  # kilobytes


def test_the_workload_of_tokenizers_in_use(tmp_path: Path) -> None:
    long, letters = "a " * (4 << 20), "日" * 1000
    plain = measure_workload(build_byte_level(BYTES, [], "llama-bpe"))
    assert plain.degree == 1
    assert plain.fits_here([long])
    words = measure_workload(build_sentencepiece({"a": 0}, [], unk_token=None, adds_space_prefix=True))
    assert words == Workload(growth=3.0, growth_of_ascii=3.0)
    assert words.fits_here([long, letters])
    pieces = [["<unk>", 0.0], ["▁" * 16, -1.0]]
    composed = load(tmp_path, model={"type": "Unigram", "unk_id": 0, "vocab": pieces}, normalizer={"type": "NFKC"})
    unigram = measure_workload(composed.backend_tokenizer)
    assert (unigram.growth, unigram.growth_of_ascii) == (11.0, 1.0)
    assert unigram.fits_here(["a" * MEGABYTE])
    assert unigram.fits_here([letters])
    assert not unigram.fits_here(["\ufdfa" * 300_000])


def test_the_workload_of_hostile_ones(tmp_path: Path) -> None:
    long = "a" * MEGABYTE
    square = measure_workload(load(tmp_path, pre_tokenizer=split("a*b")).backend_tokenizer)
    assert square == Workload(tries=1, degree=2)
    assert square.fits_here(["a" * 20_000])
    assert not square.fits_here([long])
    growing = measure_workload(load(tmp_path, normalizer=grow(9)).backend_tokenizer)
    assert growing == Workload(growth=9.0, growth_of_ascii=9.0)
    assert growing.fits_here(["a" * 100_000])
    assert not growing.fits_here([long])
    pieces = [["<unk>", 0.0], *(["a" * size, -1.0] for size in range(1, 250))]
    long_pieces = load(tmp_path, model={"type": "Unigram", "unk_id": 0, "vocab": pieces})
    assert not measure_workload(long_pieces.backend_tokenizer).fits_here([long])


@pytest.mark.parametrize("pattern", ["(a+)+b", "(a|aa)+b", r"(a*)b\1", "a*b|a", "(?~b)"])
def test_a_process_of_its_own_gives_the_same(pattern: str, tmp_path: Path) -> None:
    tokenizer = load(tmp_path, pre_tokenizer=split(pattern), normalizer=grow(2))
    texts = ["aab", "", "abcab" * 3]
    expected = [encoding.ids for encoding in tokenizer.backend_tokenizer.encode_batch_fast(texts)]
    assert confined.encode_confined(tokenizer.backend_tokenizer, texts, True) == expected
    assert [tokenizer.encode(text) for text in texts] == expected


def test_what_takes_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confined, "SECONDS", 0)
    tokenizer = load(tmp_path, pre_tokenizer=split("a*b"))
    with pytest.raises(InputError, match="took more than"):
        tokenizer.encode("a" * MEGABYTE + "cb")
    with pytest.raises(LoadError, match="retry-limit"):
        load(tmp_path, pre_tokenizer=split("(a+)+b")).encode("a" * 40)


def test_what_takes_too_much_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confined, "MEMORY_BYTES", 1 << 28)
    tokenizer = load(tmp_path, normalizer=grow(16), pre_tokenizer=split("a"))
    with pytest.raises(InputError, match="out of memory"):
        tokenizer.encode("a" * MEGABYTE)


def test_errors_cross_over(tmp_path: Path) -> None:
    model = {"type": "Unigram", "unk_id": None, "vocab": [["a", -1.0]], "byte_fallback": False}
    tokenizer = load(tmp_path, model=model, pre_tokenizer=split("(?~b)"))
    with pytest.raises(InputError, match="can't be encoded by this tokenizer"):
        tokenizer.encode("z")
    with pytest.raises(InputError, match="not valid Unicode"):
        tokenizer.encode("a\ud800")

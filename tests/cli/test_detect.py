"""`unspool detect` and `unspool train-detector`."""

from __future__ import annotations

import html
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import unspool
from unspool.cli.detect import cut_text
from unspool.watermark import BayesianDetectorModel, WatermarkDetector

KEY = 918273645546372
KEYS = [KEY + 7919 * place for place in range(6)]
GREEN = {"greenlist_ratio": 0.5}
SYNTHID = {"ngram_len": 3}


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    path = tmp_path / "mark.json"
    path.write_text(json.dumps(GREEN))
    (tmp_path / "mark.key").write_text(f"{KEY}\n")
    return path


def write_marked(lm: unspool.LanguageModel, length: int) -> str:
    """Capital letters, which no merge joins, most of them green after the one before."""
    processor = unspool.WatermarkingConfig(hashing_key=KEY, greenlist_ratio=0.5).construct_processor(160, "cpu")
    letters = {lm.encode(letter)[0][-1]: letter for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ"}
    chance, text, last = random.Random(1), "A", lm.encode("A")[0][-1]
    while len(text) < length:
        token = chance.choice(list(letters))
        if processor.are_green(torch.tensor([[last]]), torch.tensor([token])) or chance.random() < 0.1:
            text, last = text + letters[token], token
    return text


def test_marked_text_is_found(cli: Callable[..., Any], tiny: str, lm: unspool.LanguageModel, mark: Path) -> None:
    text = write_marked(lm, 160)
    (mark.parent / "text.txt").write_text(text)
    given = ("--watermark", str(mark), "--key-file", str(mark.parent / "mark.key"), "-m", tiny)
    page = mark.parent / "page.html"
    ended = cli("detect", str(mark.parent / "text.txt"), *given, "--html", str(page))
    assert ended.code == 0
    assert ended.out.startswith("The text carries the mark.\np value ")
    report = json.loads(cli("detect", str(mark.parent / "text.txt"), *given, "--json").out)
    config = unspool.WatermarkingConfig(hashing_key=KEY, greenlist_ratio=0.5)
    detector = WatermarkDetector(lm.model.info, "cpu", config, ignore_repeated_ngrams=True)
    expected = detector(torch.tensor(lm.encode(text)), return_dict=True)
    assert report["is_marked"] and report["p_value"] == pytest.approx(expected.p_value[0])
    assert report["z_score"] == pytest.approx(expected.z_score[0])
    assert report["num_tokens_scored"] == expected.num_tokens_scored[0]
    shown = page.read_text()
    assert shown.count('class="g"') > 2 * shown.count('class="r"') and "<polyline" in shown
    assert "http" not in shown.replace("http-equiv", "") and "default-src 'none'" in shown
    for told in (ended.out, ended.err, json.dumps(report), shown):
        assert str(KEY) not in told


class Bytes:
    """A tokenizer whose tokens are bytes."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        assert not skip_special_tokens
        return bytes(token_ids).decode(errors="replace")


def test_a_page_has_the_text_as_it_was_written(cli: Callable[..., Any], tiny: str, mark: Path) -> None:
    text = "Grüße aus Köln! 北京, Москва & 😀"
    pieces = cut_text(Bytes(), list(text.encode()))
    assert "".join(pieces) == text and len(pieces) == len(text.encode())
    text = "A page has what was written: <b>words</b> & spaces, ABCDEFG XYZ, in 1998"
    page = mark.parent / "page.html"
    given = ("--watermark", str(mark), "--key-file", str(mark.parent / "mark.key"), "-m", tiny, "--html", str(page))
    assert cli("detect", "-", *given, stdin=text.encode()).code == 0
    shown = page.read_text().split('<p class="text">')[1].split("</p>")[0]
    assert html.unescape(re.sub("<[^>]*>", "", shown)) == text


def test_other_text_and_keys_from_the_environment(
    cli: Callable[..., Any], tiny: str, lm: unspool.LanguageModel, mark: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = write_marked(lm, 160)
    monkeypatch.setenv("UNSPOOL_WATERMARK_KEY", str(KEY))
    assert cli("detect", "-", "--watermark", str(mark), "-m", tiny, stdin=text.encode()).out.startswith(
        "The text carries"
    )
    monkeypatch.setenv("UNSPOOL_WATERMARK_KEY", str(KEY + 2))
    assert cli("detect", "-", "--watermark", str(mark), "-m", tiny, stdin=text.encode()).out.startswith(
        "No mark was found."
    )


@pytest.mark.parametrize(
    ("words", "key", "said"),
    [
        ((), None, "has no `hashing_key`: put it into a file"),
        ((), "secret", "holds no key"),
        ((), "[1.5]", "holds no key"),
        ((), str(2**70), "`hashing_key` should be an integer"),
        (("--level", "2"), str(KEY), "must be a probability"),
        (("--min-tokens", "0"), str(KEY), "at least 1"),
        (("--min-tokens", "500"), str(KEY), "nothing can be said about a mark"),
        (("--detector", "x"), str(KEY), "is for SynthID-Text"),
    ],
)
def test_what_can_t_be_judged(
    cli: Callable[..., Any],
    tiny: str,
    mark: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    key: str | None,
    said: str,
) -> None:
    if key is not None:
        monkeypatch.setenv("UNSPOOL_WATERMARK_KEY", key)
    text = "AZBYCXDWEVFUGTHSIRJQKPLOMN" * 2
    ended = cli("detect", "-", "--watermark", str(mark), "-m", tiny, *words, stdin=text.encode())
    assert ended.code == 2 and said in ended.err
    assert key is None or key not in ended.err


def test_repetitive_text_is_not_judged(cli: Callable[..., Any], tiny: str, mark: Path) -> None:
    given = ("--watermark", str(mark), "--key-file", str(mark.parent / "mark.key"), "-m", tiny)
    ended = cli("detect", "-", *given, stdin=b"ABC" * 40)
    assert ended.code == 2 and "the text repeats itself" in ended.err


def test_a_detector_is_trained_resumed_and_used(cli: Callable[..., Any], tiny: str, tmp_path: Path) -> None:
    (tmp_path / "mark.json").write_text(json.dumps(SYNTHID))
    (tmp_path / "mark.key").write_text(json.dumps(KEYS))
    folder = tmp_path / "detector"
    given = ("--watermark", str(tmp_path / "mark.json"), "--key-file", str(tmp_path / "mark.key"), "-m", tiny)
    words = ("train-detector", str(folder), *given, "--texts", "36", "--tokens", "60")
    ended = cli(*words)
    assert ended.code == 0, ended.err
    report = json.loads(ended.out)
    assert report["held_out"] == 12 and set(report["rates"]) == {"bayesian", "mean", "weighted mean"}
    assert report["rates"]["weighted mean"]["true_positive_rate_at_1%"] > 0.5
    assert report["true_positive_rate_at_even_odds"] > 0.5 > report["false_positive_rate_at_even_odds"]
    saved = {path.name for path in folder.iterdir()}
    assert saved == {"config.json", "model.safetensors", "report.json", "texts.json"}
    for path in folder.iterdir():
        assert str(KEYS[3]).encode() not in path.read_bytes()
    assert BayesianDetectorModel.from_pretrained(folder).watermarking_depth == 6
    again = cli(*words)  # nothing is written anew: the texts are there
    assert json.loads(again.out) == report and "texts," not in again.err
    text = "The quick brown fox jumps over a lazy dog while rain falls on tin roofs and nobody minds"
    judged = cli("detect", "-", *given, "--detector", str(folder), "--json", stdin=text.encode())
    assert 0 <= json.loads(judged.out)["probability"] < 0.99
    refused = cli(*words[:-1], "50")
    assert refused.code == 2 and "holds texts of other settings" in refused.err


def test_texts_too_short_for_an_ngram_are_not_written(cli: Callable[..., Any], tiny: str, tmp_path: Path) -> None:
    (tmp_path / "mark.json").write_text(json.dumps({"ngram_len": 12, "keys": KEYS}))
    words = ("train-detector", str(tmp_path / "d"), "--watermark", str(tmp_path / "mark.json"), "-m", tiny)
    ended = cli(*words, "--tokens", "11")
    assert ended.code == 2 and "n-grams alone have 12" in ended.err and not (tmp_path / "d").exists()


def test_only_synthid_has_a_detector_to_train(cli: Callable[..., Any], tiny: str, mark: Path) -> None:
    given = ("--watermark", str(mark), "--key-file", str(mark.parent / "mark.key"), "-m", tiny)
    ended = cli("train-detector", str(mark.parent / "d"), *given)
    assert ended.code == 2 and "only SynthID-Text has a detector to train" in ended.err


# --- writing marked text ------------------------------------------------------------------------------------


def test_run_writes_the_mark_and_never_the_key(
    cli: Callable[..., Any], tiny: str, lm: unspool.LanguageModel, mark: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("run", "Hello", "-m", tiny, "--max-new-tokens", "8", "--do-sample", "--seed", "3", "--json")
    config = unspool.WatermarkingConfig(hashing_key=KEY, greenlist_ratio=0.5)
    expected = lm.generate("Hello", max_new_tokens=8, do_sample=True, seed=3, watermarking_config=config)
    ended = cli(*words, "--watermark", str(mark), "--key-file", str(mark.parent / "mark.key"))
    report = json.loads(ended.out)
    assert report["token_ids"] == expected.token_ids
    assert report["settings"]["watermarking_config"]["hashing_key"] == "(hidden)"
    monkeypatch.setenv("UNSPOOL_WATERMARK_KEY", str(KEY))
    again = cli(*words, "--watermark", str(mark))
    assert json.loads(again.out)["token_ids"] == expected.token_ids
    plain = json.loads(cli(*words).out)
    assert "watermarking_config" not in plain["settings"] and plain["token_ids"] != expected.token_ids
    assert all(str(KEY) not in one.out + one.err for one in (ended, again))


def test_a_chat_is_marked_too(cli: Callable[..., Any], tiny: str, mark: Path) -> None:
    words = ("chat", "-m", tiny, "--max-new-tokens", "8", "--do-sample", "--seed", "3")
    given = ("--watermark", str(mark), "--key-file", str(mark.parent / "mark.key"))
    marked = cli(*words, *given, stdin=b"Hello\n")
    plain = cli(*words, stdin=b"Hello\n")
    assert marked.code == plain.code == 0 and marked.out != plain.out
    assert str(KEY) not in marked.out + marked.err


def test_a_key_without_a_mark_is_refused(cli: Callable[..., Any], tiny: str, mark: Path) -> None:
    for command in ("run", "chat"):
        ended = cli(command, "-m", tiny, "--key-file", str(mark.parent / "mark.key"), stdin=b"Hello")
        assert ended.code == 2 and "--watermark FILE" in ended.err

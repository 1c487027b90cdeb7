"""Whisper tiny.en on a file whose words and pauses are known, and on one spoken now, where espeak-ng is installed.

`data/spoken.wav` was made with espeak-ng 1.51 (`espeak-ng -v en-us -s 140`): three sentences, resampled to 16 kHz, with
silence of 1.5 s between them. SPOKEN has when each was spoken.
"""

from __future__ import annotations

import difflib
import re
import shutil
import subprocess
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unspool
from tests.speech.sounds import resample
from unspool.models.encoder_decoder.model import EncoderDecoder
from unspool.speech.sound import open_sound

SPOKEN = (
    ("My father has a small red car.", 0.5, 2.65),
    ("Please open the window.", 4.15, 5.59),
    ("We will meet again tomorrow morning.", 7.09, 9.23),
)
FILE = Path(__file__).parent / "data" / "spoken.wav"


def test_the_words_that_were_spoken_and_their_pauses(whisper: unspool.LanguageModel) -> None:
    found = whisper.transcribe(FILE, return_timestamps="word")
    assert found.text == " ".join(text for text, _, _ in SPOKEN) and found.language == "en"
    for segment, (text, start, end) in zip(found.segments, SPOKEN, strict=True):
        assert segment.text.strip() == text
        assert segment.start == pytest.approx(start, abs=0.5) and segment.end == pytest.approx(end, abs=0.5)
        assert segment.words is not None and [word.text.strip() for word in segment.words] == text.split()


def test_half_the_rate_and_two_channels_are_understood(whisper: unspool.LanguageModel) -> None:
    samples = resample(np.concatenate(list(open_sound(FILE).blocks())), 16_000, 8_000)
    found = whisper.transcribe({"array": np.stack((samples, samples)), "sampling_rate": 8_000})
    assert "Please open the window. We will meet again tomorrow morning." in found.text


def test_a_grammar_leaves_the_words(whisper: unspool.LanguageModel) -> None:
    text = " ".join(text for text, _, _ in SPOKEN)
    assert whisper.transcribe(FILE, regex="[a-z ]+").text == text.lower().replace(".", "")
    assert whisper.transcribe(FILE, choice=[" My mother has a small red car.", f" {text}", " We will"]).text == text


def test_the_adapter_writes_the_same(whisper: unspool.LanguageModel) -> None:
    pytest.importorskip("transformers")
    expected = whisper.transcribe(FILE, return_timestamps=True)
    found = unspool.load("whisper-tiny.en", native=False).transcribe(FILE, return_timestamps=True)
    assert [one.tokens for one in found.segments] == [one.tokens for one in expected.segments]


@pytest.mark.parametrize("drafter", ["itself", "short", "lookup"])
def test_a_drafter_changes_no_text(whisper: unspool.LanguageModel, drafter: str) -> None:
    draft: dict[str, Any] = {"prompt_lookup_num_tokens": 5}
    if drafter != "lookup":
        draft = {"assistant_model": whisper if drafter == "itself" else shorten(whisper.model, 3)}
    expected = whisper.transcribe(FILE, return_timestamps="word")
    found = whisper.transcribe(FILE, return_timestamps="word", **draft)
    assert [one.tokens for one in found.segments] == [one.tokens for one in expected.segments]
    assert [one.words for one in found.segments] == [one.words for one in expected.segments]


def shorten(model: Any, num_layers: int) -> Any:
    """The model with the first layers of its decoder."""
    stack = replace(model.spec.decoder, num_layers=num_layers)
    own = model.weights.decoder
    layers = {"layers": own.layers[:num_layers], "crosses": own.crosses[:num_layers]}
    weights = replace(model.weights, decoder=replace(own, **layers))
    config = vars(model.config)
    return EncoderDecoder(replace(model.spec, decoder=stack), weights, config, model.device, model.dtype)


def test_silence_is_silence(whisper: unspool.LanguageModel) -> None:
    assert whisper.transcribe(np.zeros(16_000 * 40, np.float32)).text == ""


def test_prompts_and_offsets_of_the_tokenizer(whisper: unspool.LanguageModel) -> None:
    ids = whisper.tokenizer.get_prompt_ids("Quilter ")
    assert ids.tolist() == [50360, *whisper.tokenizer.encode(" Quilter", add_special_tokens=False)]
    found = whisper.transcribe(FILE, return_timestamps=True)
    tokens = [token for segment in found.segments for token in segment.tokens]
    made = whisper.tokenizer.decode(tokens, output_offsets=True)
    assert made["text"].strip() == found.text.strip()
    assert [one["text"] for one in made["offsets"]] == [segment.text for segment in found.segments]


SENTENCES = (
    "The old captain looked at the sea and said nothing.",
    "It had rained for three days without a pause.",
    "Nobody in the village could remember such a storm.",
    "In the morning the boats were gone.",
    "They found the first of them near the lighthouse.",
    "The captain smiled when he heard the news.",
    "Every house in the street had lost its windows.",
    "The children were sent to school in another town.",
    "After a week the water went back to the harbour.",
    "He bought a new boat and painted it green.",
)
PAUSE = 1.2  # seconds between sentences


@pytest.mark.skipif(shutil.which("espeak-ng") is None, reason="espeak-ng is not installed: apt install espeak-ng")
def test_what_espeak_says_in_more_than_a_window(whisper: unspool.LanguageModel, tmp_path: Path) -> None:
    """A sound of some 40 s: most words are recognised, and silences between segments are the pauses that were made."""
    pieces, times, now = [], [], 0.0
    for index, sentence in enumerate(SENTENCES):
        file = tmp_path / f"{index}.wav"
        subprocess.run(["espeak-ng", "-v", "en-us", "-s", "140", "-w", file, sentence], check=True, timeout=60)
        samples = np.concatenate(list(open_sound(file).blocks()))
        loud = np.flatnonzero(np.abs(samples) > 0.01)
        samples = samples[loud[0] : loud[-1] + 1]
        times.append((now, now + len(samples) / 16_000))
        pieces += [samples, np.zeros(int(PAUSE * 16_000), np.float32)]
        now = times[-1][1] + PAUSE
    found = whisper.transcribe(np.concatenate(pieces), return_timestamps="word")
    assert found.duration > 32
    said, heard = (
        [re.sub(r"[^a-z ]", "", text.lower()).split() for text in texts] for texts in (SENTENCES, [found.text])
    )
    expected = [word for words in said for word in words]
    alike = difflib.SequenceMatcher(None, expected, heard[0], autojunk=False).ratio()
    assert alike > 0.9, found.text  # a synthetic voice and the smallest of models
    spoken = [word for segment in found.segments for word in segment.words or ()]
    inside = [any(start - 0.4 <= word.start and word.end <= end + 0.4 for start, end in times) for word in spoken]
    assert sum(inside) > 0.9 * len(spoken)
    for (_, end), (start, _) in pairwise(times):  # no word is spoken in the middle of a pause
        middle = (end + start) / 2
        assert sum(word.start < middle < word.end for word in spoken) == 0

"""Whisper tiny.en, if it is installed (`unspool pull whisper-tiny.en`), on a file whose words and pauses are known.

`data/spoken.wav` was made with espeak-ng 1.51 (`espeak-ng -v en-us -s 140`): three sentences, resampled to 16 kHz, with
silence of 1.5 s between them. SPOKEN has when each was spoken.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import unspool
from unspool.loading.catalogue import find_model

SPOKEN = (
    ("My father has a small red car.", 0.5, 2.65),
    ("Please open the window.", 4.15, 5.59),
    ("We will meet again tomorrow morning.", 7.09, 9.23),
)
FILE = Path(__file__).parent / "data" / "spoken.wav"
pytestmark = pytest.mark.skipif(
    find_model("whisper-tiny.en") is None, reason="whisper-tiny.en is not installed: unspool pull whisper-tiny.en"
)


@pytest.fixture(scope="module")
def lm() -> unspool.LanguageModel:
    return unspool.load("whisper-tiny.en")


def test_the_words_that_were_spoken_and_their_pauses(lm: unspool.LanguageModel) -> None:
    found = lm.transcribe(FILE, return_timestamps="word")
    assert found.text == " ".join(text for text, _, _ in SPOKEN) and found.language == "en"
    for segment, (text, start, end) in zip(found.segments, SPOKEN, strict=True):
        assert segment.text.strip() == text
        assert segment.start == pytest.approx(start, abs=0.5) and segment.end == pytest.approx(end, abs=0.5)
        assert segment.words is not None and [word.text.strip() for word in segment.words] == text.split()


def test_half_the_rate_and_two_channels_are_understood(lm: unspool.LanguageModel) -> None:
    import numpy as np

    from unspool.speech.resample import resample
    from unspool.speech.sound import open_sound

    samples = resample(np.concatenate(list(open_sound(FILE).blocks())), 16_000, 8_000)
    found = lm.transcribe({"array": np.stack((samples, samples)), "sampling_rate": 8_000})
    assert "Please open the window. We will meet again tomorrow morning." in found.text


def test_the_adapter_writes_the_same(lm: unspool.LanguageModel) -> None:
    pytest.importorskip("transformers")
    expected = lm.transcribe(FILE, return_timestamps=True)
    found = unspool.load("whisper-tiny.en", native=False).transcribe(FILE, return_timestamps=True)
    assert [one.tokens for one in found.segments] == [one.tokens for one in expected.segments]


def test_silence_is_silence(lm: unspool.LanguageModel) -> None:
    import numpy as np

    assert lm.transcribe(np.zeros(16_000 * 40, np.float32)).text == ""


def test_prompts_and_offsets_of_the_tokenizer(lm: unspool.LanguageModel) -> None:
    ids = lm.tokenizer.get_prompt_ids("Quilter ")
    assert ids.tolist() == [50360, *lm.tokenizer.encode(" Quilter", add_special_tokens=False)]
    found = lm.transcribe(FILE, return_timestamps=True)
    tokens = [token for segment in found.segments for token in segment.tokens]
    made = lm.tokenizer.decode(tokens, output_offsets=True)
    assert made["text"].strip() == found.text.strip()
    assert [one["text"] for one in made["offsets"]] == [segment.text for segment in found.segments]

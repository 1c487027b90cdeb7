"""Sound in, text out, on a tiny Whisper of random weights: the whole way from samples to segments and files."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import unspool
from tests.speech.models import WINDOW, WORDS, save_speech_model
from tests.speech.test_features import draw_sound
from tests.speech.test_sound import write_wav
from unspool.errors import InputError, SettingError, UnsupportedError
from unspool.speech.features import extract_features
from unspool.speech.results import Segment, Transcription, Word
from unspool.speech.words import group_words, trim_edges
from unspool.speech.writing import FORMATS, format_time

RATE = 16_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a tokenizer whose tokens are words."""
    folder = tmp_path_factory.mktemp("speech")
    save_speech_model(folder)
    return folder


@pytest.fixture(scope="module")
def lm(folder: Path) -> unspool.LanguageModel:
    return unspool.load(folder, native=False)


SURE: dict[str, Any] = {
    "language": "en",
    "temperature": 0.0,
    "compression_ratio_threshold": None,
    "logprob_threshold": None,
    "no_speech_threshold": None,
}


def test_a_sound_is_its_features(lm: unspool.LanguageModel) -> None:
    """transcribe() writes the tokens that generate() writes for the features of the whole sound."""
    samples = draw_sound(1.7)
    found = lm.transcribe(samples, return_timestamps=True, **SURE)
    features = extract_features(samples, 16)[None]
    made = unspool.generate(lm.model, input_features=features, language="en", task="transcribe", return_timestamps=True)
    assert [token for segment in found.segments for token in segment.tokens] == made[0].tolist()
    assert found.duration == pytest.approx(1.7) and found.language == "en" and len(found.segments) > 1
    assert found.text == "".join(segment.text for segment in found.segments).strip()
    texts = ["".join(WORDS[token] for token in segment.tokens if token < 50) for segment in found.segments]
    assert [segment.text for segment in found.segments] == texts


def test_rate_and_channels_do_not_matter(lm: unspool.LanguageModel, tmp_path: Path) -> None:
    samples = draw_sound(1.0)
    expected = lm.transcribe(samples, **SURE).text
    (tmp_path / "stereo.wav").write_bytes(write_wav(np.stack((samples, samples), axis=1), RATE, width=4))
    assert lm.transcribe(tmp_path / "stereo.wav", **SURE).text == expected
    assert lm.transcribe({"raw": samples, "sampling_rate": RATE}, **SURE).text == expected
    slow = lm.transcribe({"array": samples[::2], "sampling_rate": 8_000}, **SURE)  # it lacks what is above 4 kHz
    assert slow.duration == pytest.approx(1.0) and slow.segments


def test_a_list_of_numbers_is_one_sound(lm: unspool.LanguageModel) -> None:
    samples = draw_sound(0.4)
    expected = lm.transcribe(samples, **SURE).text
    for numbers in (list(samples), samples.tolist(), tuple(samples)):  # of numpy's own numbers, and of Python's
        assert lm.transcribe(numbers, **SURE).text == expected


def test_several_sounds_are_each_as_alone(lm: unspool.LanguageModel) -> None:
    sounds = [draw_sound(seconds, seed) for seed, seconds in enumerate((0.5, 1.9, 1.2, 0.61))]
    together = lm.transcribe(sounds, return_timestamps=True, batch_size=2, **SURE)
    for sound, found in zip(sounds, together, strict=True):
        alone = lm.transcribe(sound, return_timestamps=True, **SURE)
        assert [(one.tokens, one.start, one.end) for one in found.segments] == [
            (one.tokens, one.start, one.end) for one in alone.segments
        ]


def test_segments_stream_from_a_pipe(lm: unspool.LanguageModel) -> None:
    samples = draw_sound(1.9)
    seen: list[tuple[int, float, float | None]] = []
    stream = io.BytesIO(write_wav(samples[:, None], RATE))
    with pytest.raises(SettingError, match="`progress`=3 can't be called"):
        lm.transcribe(samples, progress=3)
    found = list(lm.stream_segments(stream, progress=lambda *told: seen.append(told), return_timestamps=True, **SURE))
    assert found and all(0 <= one.start <= one.end <= 1.9 for one in found)
    assert seen[-1][1] == pytest.approx(1.9, abs=0.02) and seen[-1][2] is None
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)


def test_words_lie_in_their_segments(lm: unspool.LanguageModel) -> None:
    found = lm.transcribe(draw_sound(1.7), return_timestamps="word", **SURE)
    for segment in found.segments:
        words = segment.words
        assert words is not None and "".join(word.text for word in words) == segment.text
        assert all(0 <= word.start <= word.end <= 1.7 for word in words)
        assert [word.start for word in words] == sorted(word.start for word in words)


def test_silence_has_no_text(lm: unspool.LanguageModel) -> None:
    found = lm.transcribe(np.zeros(RATE, np.float32), **SURE)
    assert found.text == "" and found.segments == [] and found.duration == 1.0


def test_the_same_sound_gives_the_same_text(lm: unspool.LanguageModel) -> None:
    sound = draw_sound(0.9)
    common = {**SURE, "temperature": (0.0, 0.9), "logprob_threshold": 0.0}
    first, second = (lm.transcribe(sound, return_timestamps=True, **common) for _ in range(2))
    assert [one.tokens for one in first.segments] == [one.tokens for one in second.segments]
    assert {one.temperature for one in first.segments} == {0.9}


def test_the_language_is_found(lm: unspool.LanguageModel) -> None:
    samples = draw_sound(0.5)
    found = lm.transcribe(samples, **{**SURE, "language": None})
    assert found.language in ("en", "de", "fr")
    assert found.text == lm.transcribe(samples, **{**SURE, "language": found.language}).text


def test_a_prompt_is_read(lm: unspool.LanguageModel) -> None:
    tokens: list[list[int]] = []

    def watch(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        tokens.append(ids[0].tolist())
        return scores

    lm.transcribe(draw_sound(0.5), prompt="w7", logits_processor=[watch], **SURE)
    assert tokens[0][0] == 58 and tokens[0][-4:] == [51, 52, 56, 60]


def test_generate_returns_texts(lm: unspool.LanguageModel) -> None:
    features = extract_features(draw_sound(1.7), 16)[None]
    made = lm.generate(input_features=features, language="en", return_timestamps=True)
    assert made.segments is not None and made.text == "".join(WORDS[token] for token in made.token_ids[0] if token < 50)
    short = lm.generate(input_features=features[:, :, :WINDOW], language="en", max_new_tokens=5)
    assert len(short.token_ids[0]) <= 5 and short.segments is None
    pieces = list(lm.stream(input_features=features[:, :, :WINDOW], language="en", max_new_tokens=5))
    assert "".join(pieces) == short.text


@pytest.mark.parametrize(
    ("audio", "settings", "error", "words"),
    [
        (np.zeros(0, np.float32), {}, InputError, "the sound is empty"),
        ([], {}, InputError, "list of sounds is empty"),
        (np.full(RATE, np.nan), {}, InputError, "NaN"),
        (np.ones(RATE), {"language": "elvish"}, SettingError, "is not one of the 3"),
        (np.ones(RATE), {"language": ["en", "de"]}, SettingError, "2 entries for 1 sounds"),
        (np.ones(RATE), {"task": "sing"}, SettingError, "is not known"),
        (np.ones(RATE), {"return_timestamps": "letters"}, SettingError, "'word'"),
        (np.ones(RATE), {"batch_size": 0}, SettingError, "batch_size"),
        (np.ones(RATE), {"prompt": " "}, SettingError, "`prompt`"),
        (np.ones(RATE), {"num_return_sequences": 2}, SettingError, "num_return_sequences"),
        (np.ones(RATE), {"do_sample": True}, SettingError, "and a first temperature of 0.0 are at odds"),
        (np.ones(RATE), {"condition_on_prev_tokens": "yes"}, SettingError, "condition_on_prev_tokens"),
        (np.ones(RATE), {"penalty_alpha": 0.6, "top_k": 4}, SettingError, "temperature=0"),
        (np.ones(RATE), {"num_beams": 4, "num_beam_groups": 2}, SettingError, "temperature=0"),
        (io.StringIO("RIFF"), {}, InputError, "open the file with 'rb'"),
        (np.ones(RATE), {"no_such_setting": 2}, SettingError, "no setting 'no_such_setting'"),
    ],
)
def test_what_cannot_be_asked_for(
    lm: unspool.LanguageModel, audio: Any, settings: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        lm.transcribe(audio, **settings)


def test_a_reader_of_text_hears_nothing() -> None:
    from tests.conformance.cases import load_model

    with pytest.raises(UnsupportedError, match="reads text, not sound"):
        load_model("gpt2").transcribe(np.ones(RATE))


def test_a_grammar_describes_one_window_without_timestamps(lm: unspool.LanguageModel) -> None:
    words = [f"{WORDS[5]}{WORDS[17]}"]
    streamed = io.BytesIO(write_wav(draw_sound(0.3)[:, None], RATE))  # whose length is not known before
    for sound in (draw_sound(0.3), streamed):
        assert lm.transcribe(sound, choice=words, **SURE).text == words[0].strip()
    for seconds, stamps in ((0.3, True), (0.3, "word"), (1.9, False)):
        with pytest.raises(SettingError, match="timestamps are written into this one"):
            lm.transcribe(draw_sound(seconds), choice=words, return_timestamps=stamps, **SURE)
    with pytest.raises(SettingError, match="timestamps are written into this one"):
        lm.transcribe(io.BytesIO(write_wav(draw_sound(1.9)[:, None], RATE)), choice=words, **SURE)
    features = torch.zeros(1, 16, WINDOW)
    with pytest.raises(SettingError, match="timestamps are written into this one"):
        lm.generate({"input_features": features}, choice=words, return_timestamps=True)


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ("langauge", "language"),
        ("retrun_timestamps", "return_timestamps"),
        ("num_beam", "num_beams"),
        ("batchsize", "batch_size"),
        ("logits_processors", "logits_processor"),
        ("progres", "progress"),
    ],
)
def test_a_misspelt_option_is_named(lm: unspool.LanguageModel, asked: str, meant: str) -> None:
    for call in (lm.transcribe, lambda *given, **more: list(lm.stream_segments(*given, **more))):
        with pytest.raises(SettingError, match=rf"transcribe\(\) has no setting '{asked}'; did you mean '{meant}'\?"):
            call(draw_sound(0.3), **{asked: 1})
    if meant not in ("batch_size", "progress"):
        with pytest.raises(SettingError, match=f"has no setting '{asked}'; did you mean '{meant}'"):
            lm.generate({"input_features": torch.zeros(1, 16, WINDOW)}, **{asked: 1})


def test_an_english_model_has_no_choice(lm: unspool.LanguageModel) -> None:
    import copy

    english = copy.copy(lm)
    english.generation_config = copy.deepcopy(lm.generation_config)
    english.generation_config.is_multilingual = False
    plain = {name: value for name, value in SURE.items() if name != "language"}
    assert english.transcribe(draw_sound(0.3), **plain).language == "en"
    assert english.transcribe(draw_sound(0.3), language="English", **plain).language == "en"
    with pytest.raises(SettingError, match="knows English only"):
        english.transcribe(draw_sound(0.3), language="de", **plain)
    with pytest.raises(SettingError, match="knows English only"):
        english.transcribe(draw_sound(0.3), task="translate", **plain)
    with pytest.raises(SettingError, match="it is one of transcribe, translate"):
        english.transcribe(draw_sound(0.3), task="sing", **plain)
    for languages in ([], ["en", "en"]):
        with pytest.raises(SettingError, match="entries for 1 sounds"):
            english.transcribe(draw_sound(0.3), language=languages, **plain)


# --- words and files -----------------------------------------------------------------------------------------


def test_tokens_become_words() -> None:
    pieces = [" Hel", "lo", ",", " “", "world", "”", "!", " Ça"]
    spans = [(float(index), index + 1.0) for index in range(len(pieces))]
    found = group_words(range(len(pieces)), spans, lambda ids: "".join(pieces[one] for one in ids), "en")
    assert [(word.text, word.start, word.end) for word in found] == [
        (" Hello,", 0.0, 3.0),
        (" “world”!", 3.0, 7.0),
        (" Ça", 7.0, 8.0),
    ]
    broken = {(0,): "\ufffd", (0, 1): "日", (2,): "本"}
    found = group_words([0, 1, 2], spans, lambda ids: broken[tuple(ids)], "ja")
    assert [(word.text, word.start, word.end) for word in found] == [("日", 0.0, 2.0), ("本", 2.0, 3.0)]


def test_pauses_are_not_part_of_words() -> None:
    words = [Word(" a", 0.0, 2.0), Word(" b", 2.0, 2.2), Word(" c", 2.2, 2.4), Word(" d", 2.4, 5.0)]
    trimmed = trim_edges(words)
    assert trimmed[0].start > 0.9 and trimmed[0].end == 2.0 and trimmed[-1].start == 2.4 and trimmed[-1].end < 3.5
    assert trimmed[1:3] == words[1:3] and trim_edges([]) == []


def test_every_format() -> None:
    words = [Word(" A", 1.0, 1.5), Word(" <b>", 1.5, 2.25)]
    made = Transcription(
        [Segment(1.0, 2.25, " A <b> --> c", [1], words), Segment(3600.0, 3601.0, " ", [2])], "en", 4000.0
    )
    assert FORMATS["txt"](made) == "A <b> --> c\n"
    assert FORMATS["srt"](made) == "1\n00:00:01,000 --> 00:00:02,250\nA <b> -> c\n\n"
    assert FORMATS["vtt"](made) == (
        "WEBVTT\n\n00:00:01.000 --> 00:00:02.250\n<00:00:01.000><c> A</c><00:00:01.500><c> &lt;b&gt;</c>\n\n"
    )
    told = json.loads(FORMATS["json"](made))
    assert told["language"] == "en" and told["segments"][0]["words"][1] == {"text": " <b>", "start": 1.5, "end": 2.25}
    assert format_time(3725.0005) == "01:02:05.000" and format_time(-1) == "00:00:00.000"

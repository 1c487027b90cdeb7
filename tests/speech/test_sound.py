"""Sounds of every kind: rates, channels, sample formats, streams; and what is no sound."""

from __future__ import annotations

import io
import math
import os
import random
import struct
import sys
import threading
import wave
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.speech.sounds import resample
from unspool.errors import InputError, MissingExtraError, SettingError
from unspool.speech import resample as resampling
from unspool.speech.resample import Resampler
from unspool.speech.sound import RATE, Sound, measure_sound, open_sound, open_stream


def play(pitch: float, seconds: float, rate: int) -> np.ndarray:
    """A tone."""
    return (0.5 * np.sin(2 * np.pi * pitch * np.arange(int(seconds * rate)) / rate)).astype(np.float32)


def collect(sound: Sound) -> np.ndarray:
    return np.concatenate(list(sound.blocks()))


def write_wav(frames: np.ndarray, rate: int, width: int = 2) -> bytes:
    """A WAV file of frames (samples, channels) between -1 and 1."""
    whole = io.BytesIO()
    with wave.open(whole, "wb") as file:
        file.setnchannels(frames.shape[1])
        file.setsampwidth(width)
        file.setframerate(rate)
        scaled = np.clip(np.round(frames * 2 ** (8 * width - 1)), -(2 ** (8 * width - 1)), 2 ** (8 * width - 1) - 1)
        scaled = scaled.astype(np.int64) + (128 if width == 1 else 0)
        file.writeframes(b"".join(int(one).to_bytes(width, "little", signed=width > 1) for one in scaled.flatten()))
    return whole.getvalue()


# --- rates -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [8_000, 11_025, 22_050, 44_100, 48_000, 96_000, 16_001])
def test_a_tone_keeps_its_pitch_and_loudness(rate: int) -> None:
    found = resample(play(440, 0.5, rate), rate, RATE)
    expected = play(440, 0.5, RATE)
    assert abs(len(found) - len(expected)) <= 1
    inner = slice(800, len(expected) - 800)
    np.testing.assert_allclose(found[inner], expected[inner], atol=2e-3)


def test_what_a_lower_rate_cannot_hold_is_removed() -> None:
    """A tone of 11 kHz would be heard at 5 kHz."""
    found = resample(play(11_000, 0.3, 48_000), 48_000, RATE)
    assert np.abs(found[400:-400]).max() < 1e-3


@pytest.mark.parametrize("rate", [8_000, 44_100, 16_001])
def test_blocks_may_be_cut_anywhere(rate: int) -> None:
    samples = np.random.default_rng(0).normal(size=3_000).astype(np.float32)
    whole = resample(samples, rate, RATE)
    parts, resampler = [], Resampler(rate, RATE)
    for size in (1, 500, 3, 1496, 1000):
        parts.append(resampler.push(samples[:size]))
        samples = samples[size:]
    np.testing.assert_allclose(np.concatenate((*parts, resampler.finish())), whole, atol=1e-5)


def test_tables_and_single_phases_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = np.random.default_rng(1).normal(size=2_000).astype(np.float32)
    by_table = resample(samples, 44_100, RATE)
    monkeypatch.setattr(resampling, "_MOST_PHASES", 1)
    np.testing.assert_allclose(resample(samples, 44_100, RATE), by_table, atol=1e-5)


# --- files and arrays --------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_whole_numbers_of_any_width(width: int, tmp_path: Path) -> None:
    tone = play(300, 0.1, RATE)
    path = tmp_path / "tone.wav"
    path.write_bytes(write_wav(tone[:, None], RATE, width))
    sound = open_sound(path)
    assert sound.seconds == pytest.approx(0.1)
    np.testing.assert_allclose(collect(sound), tone, atol=1.01 / 2 ** (8 * width - 1))


@pytest.mark.parametrize("kind", ["<f4", "<f8"])
def test_floats(kind: str, tmp_path: Path) -> None:
    tone = play(300, 0.1, RATE)
    data = tone.astype(kind).tobytes()
    bits = 8 * np.dtype(kind).itemsize
    head = b"fmt " + struct.pack("<IHHIIHH", 16, 3, 1, RATE, RATE * bits // 8, bits // 8, bits)
    extra = b"LIST" + struct.pack("<I", 5) + b"INFO\0\0"  # chunks of odd length are filled up
    body = b"WAVE" + head + extra + b"data" + struct.pack("<I", len(data)) + data
    (tmp_path / "tone.wav").write_bytes(b"RIFF" + struct.pack("<I", len(body)) + body)
    np.testing.assert_array_equal(collect(open_sound(str(tmp_path / "tone.wav"))), tone)


def test_channels_are_mixed() -> None:
    left, right = play(300, 0.1, RATE), play(800, 0.1, RATE)
    expected = (left + right) / 2
    for array in (np.stack((left, right)), np.stack((left, right), axis=1), torch.from_numpy(np.stack((left, right)))):
        np.testing.assert_allclose(collect(open_sound(array)), expected, atol=1e-6)


def test_arrays_of_every_kind() -> None:
    tone = play(300, 0.1, 8_000)
    expected = collect(open_sound({"array": tone, "sampling_rate": 8_000}))
    assert len(expected) == 2 * len(tone)
    for source in (tone.astype(np.float64), torch.from_numpy(tone), tone.tolist()):
        np.testing.assert_allclose(collect(open_sound(source, 8_000)), expected, atol=1e-6)
    whole = np.round(tone * 32_768).astype(np.int16)
    np.testing.assert_allclose(collect(open_sound(whole, 8_000)), expected, atol=1e-4)
    np.testing.assert_allclose(collect(open_sound(torch.from_numpy(whole), 8_000)), expected, atol=1e-4)


def test_the_bytes_of_a_file() -> None:
    tone = play(300, 0.2, RATE)
    for content in (write_wav(tone[:, None], RATE), bytearray(write_wav(tone[:, None], RATE))):
        np.testing.assert_allclose(collect(open_sound(content)), tone, atol=1e-4)
    with pytest.raises(InputError, match="is empty"):
        open_sound(b"")


# --- streams -----------------------------------------------------------------------------------------------


class Pipe(io.RawIOBase):
    """A stream that gives a few bytes at a time, and no length."""

    def __init__(self, content: bytes) -> None:
        self._content = io.BytesIO(content)

    def read(self, size: int = -1) -> bytes:
        return self._content.read(min(size, 1000) if size >= 0 else 1000)


@pytest.mark.parametrize("claims", [None, 0, 0xFFFFFFFF])
def test_wav_from_a_pipe(claims: int | None) -> None:
    """A recorder that does not know how long it will run writes no length."""
    tone = play(300, 0.2, RATE)
    content = write_wav(tone[:, None], RATE)
    if claims is not None:
        at = content.index(b"data") + 4
        content = content[:at] + struct.pack("<I", claims) + content[at + 4 :]
    sound = open_stream(Pipe(content))
    assert sound.seconds is None and not sound.can_repeat
    np.testing.assert_allclose(collect(sound), tone, atol=1e-4)


def test_raw_samples_from_a_pipe() -> None:
    tone = play(300, 0.2, 8_000)
    content = np.round(tone * 32_767).astype("<i2").tobytes()
    np.testing.assert_allclose(collect(open_stream(Pipe(content), 8_000)), resample(tone, 8_000, RATE), atol=1e-3)


def test_compressed_wav_from_a_pipe() -> None:
    """It is decoded when the stream has ended, as other formats are."""
    soundfile = pytest.importorskip("soundfile", reason="soundfile is not installed")
    tone, content = play(300, 0.2, 8_000), io.BytesIO()
    soundfile.write(content, tone, 8_000, format="WAV", subtype="ULAW")
    found = collect(open_stream(Pipe(content.getvalue())))
    np.testing.assert_allclose(found[200:-200], resample(tone, 8_000, RATE)[200:-200], atol=0.05)


# --- what is no sound --------------------------------------------------------------------------------------


def make_bad(folder: Path) -> dict[str, Any]:
    good = write_wav(play(300, 0.1, RATE)[:, None], RATE)
    at = good.index(b"fmt ") + 8
    made: dict[str, bytes] = {
        "empty": b"",
        "no samples": good[: good.index(b"data") + 4] + struct.pack("<I", 0),
        "cut off": good[:-100],
        "headless": good[:30],
        "slow": good[: at + 4] + struct.pack("<I", 10) + good[at + 8 :],
        "many channels": good[: at + 2] + struct.pack("<H", 500) + good[at + 4 :],
    }
    for name, content in made.items():
        (folder / name).write_bytes(content)
    return {name: folder / name for name in made}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("empty", "is an empty file"),
        ("no samples", "is empty: it holds no samples"),
        ("cut off", "ends 100 bytes before"),
        ("headless", "without samples"),
        ("slow", "sampling rate 10"),
        ("many channels", "500 channels"),
    ],
)
def test_files_that_cannot_be_read(name: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=words):
        collect(open_sound(make_bad(tmp_path)[name]))


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("no such file.wav", "there is no file"),
        (".", "is a folder"),
        (np.zeros(0), "is empty"),
        (np.zeros((2, 0)), "is empty"),
        (np.zeros((2, 3, 4)), "can't be read"),
        (np.full(100, np.nan), "NaN or infinite"),
        (np.full(100, 20_000.0), "samples of up to 20000.*divide those of 16 bits by"),
        (np.full(100, True), "not an array of bool"),
        (np.full(100, 1j), "not an array of complex128"),
        (np.zeros((100, 100)), "1 to 64 channels"),
        (["a", "b"], "not an array of <U1"),
        ({"array": np.zeros(10)}, "needs an `array`"),
        (object(), "a sound is a path"),
    ],
)
def test_what_is_no_sound(source: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        collect(open_sound(source))


def test_a_length_that_a_header_names_is_enough() -> None:
    def never() -> Any:
        raise AssertionError("it was read")
        yield

    with pytest.raises(InputError, match="longer than 48 hours"):
        collect(Sound("x.wav", never, 49 * 3600.0))


def test_rates_that_cannot_be() -> None:
    for rate in (0, -1, 10**9, 16000.5, True, math.nan):
        with pytest.raises(InputError, match="sampling rate"):
            open_sound(np.zeros(100), rate)
    with pytest.raises(SettingError, match="a file has its own rate"):
        open_sound("x.wav", 8_000)


def test_other_formats_name_their_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sound.mp3").write_bytes(b"ID3 and so on")
    monkeypatch.setitem(__import__("sys").modules, "soundfile", None)
    with pytest.raises(MissingExtraError, match=r"mp3 is not an uncompressed WAV file; reading .*unspool\[audio\]"):
        open_sound(tmp_path / "sound.mp3")
    with pytest.raises(MissingExtraError, match="audio"):
        open_stream(io.BytesIO(b"fLaC and so on"))


def test_other_formats_through_soundfile(tmp_path: Path) -> None:
    soundfile = pytest.importorskip("soundfile", reason="soundfile is not installed")
    tone = play(300, 0.5, 22_050)
    for name, most in (("a.flac", 1e-3), ("a.ogg", 0.1), ("a.mp3", 0.3)):
        soundfile.write(tmp_path / name, tone, 22_050)
        found = collect(open_sound(tmp_path / name))
        assert np.abs(found[2000:6000]).max() == pytest.approx(0.5, abs=most)
    (tmp_path / "words.txt").write_text("this is no sound at all")
    with pytest.raises(InputError, match=r"is not sound that can be read: Format not recognised\. Give"):
        open_sound(tmp_path / "words.txt")


@pytest.mark.parametrize("seconds", [0.5, 1.0, 1.001, 3.0])
def test_a_stream_is_measured_and_loses_nothing(seconds: float) -> None:
    samples = np.random.default_rng(0).uniform(-0.5, 0.5, round(seconds * 16_000)).astype(np.float32)
    content = write_wav(samples[:, None], 16_000)
    expected = np.concatenate(list(open_sound(io.BytesIO(content)).blocks()))
    measured = measure_sound(open_sound(io.BytesIO(content)), 1.0)
    assert measured.seconds == (seconds if seconds <= 1 else None)
    assert np.array_equal(np.concatenate(list(measured.blocks())), expected)
    known = open_sound(samples)
    assert measure_sound(known, 0.1) is known


class _SoundFile:
    """What soundfile gives: a header that can be read, and then an error."""

    error: Exception = RuntimeError()
    samplerate, channels, frames = RATE, 1, RATE

    def __init__(self, _content: Any) -> None:
        self._has_read = False

    def __enter__(self) -> _SoundFile:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def read(self, count: int, **_: Any) -> np.ndarray:
        if self._has_read:
            raise self.error
        self._has_read = True
        return np.zeros((count // 100, 1), np.float32)


@pytest.mark.parametrize("way", ["path", "bytes", "stream"])
@pytest.mark.parametrize("kind", [RuntimeError, TypeError, AssertionError, SystemError, OSError, ValueError, KeyError])
def test_damage_behind_a_header_is_an_input_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Exception], way: str
) -> None:
    module = SimpleNamespace(SoundFile=_SoundFile, LibsndfileError=type("LibsndfileError", (RuntimeError,), {}))
    monkeypatch.setitem(sys.modules, "soundfile", module)
    monkeypatch.setattr(_SoundFile, "error", kind("lost sync"))
    content = b"fLaC" + bytes(2000)
    (tmp_path / "in.flac").write_bytes(content)
    ways = {"path": tmp_path / "in.flac", "bytes": content, "stream": io.BytesIO(content)}
    sound = open_sound(ways[way])
    with pytest.raises(InputError, match=r"is not sound that can be read: .*lost sync"):
        collect(sound)


def test_damaged_sounds_are_refused_wherever_the_damage_is(tmp_path: Path) -> None:
    soundfile = pytest.importorskip("soundfile", reason="soundfile is not installed")
    rng = random.Random(5)
    for form, subtype in (("FLAC", "PCM_16"), ("OGG", "VORBIS")):
        whole = io.BytesIO()
        soundfile.write(whole, play(440, 1, RATE), RATE, format=form, subtype=subtype)
        for _ in range(200):
            content = bytearray(whole.getvalue())
            for _ in range(rng.choice((1, 5, 40))):
                content[rng.randrange(100, len(content))] = rng.randrange(256)
            try:
                collect(open_sound(bytes(content)))
            except InputError as error:
                assert "the stream" in str(error)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
@pytest.mark.parametrize("name", ["in.wav", "in.flac"])
def test_a_pipe_is_not_waited_for(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    failures: list[Exception] = []

    def open_it() -> None:
        try:
            open_sound(tmp_path / name)
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=open_it, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive() and isinstance(failures[0], InputError)
    assert "is a pipe" in str(failures[0]) and "stream" in str(failures[0])

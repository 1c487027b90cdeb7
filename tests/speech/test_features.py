"""The front end: features equal the reference's, however the samples arrive."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
import transformers

from unspool.errors import InputError
from unspool.protocols import FeatureShape
from unspool.speech.features import Frames, extract_features
from unspool.speech.sound import RATE, Sound, open_sound

WINDOW = FeatureShape(80, 3000, 2)


def draw_sound(seconds: float, seed: int = 0) -> np.ndarray:
    """Noise whose loudness wanders, with a few tones."""
    rng = np.random.default_rng(seed)
    time = np.arange(int(seconds * RATE)) / RATE
    tones = sum(np.sin(2 * np.pi * pitch * time) for pitch in (220, 1030, 4100))
    loudness = 0.1 + 0.3 * np.abs(np.sin(time * 1.7))
    return (loudness * (tones / 4 + rng.normal(size=len(time)) / 3)).astype(np.float32)


def ask_reference(samples: np.ndarray, num_mels: int, **options: object) -> torch.Tensor:
    extractor = transformers.WhisperFeatureExtractor(feature_size=num_mels)
    made = extractor(samples, sampling_rate=RATE, return_tensors="pt", **options).input_features
    return made[0]


@pytest.mark.parametrize("num_mels", [80, 128])
@pytest.mark.parametrize("seconds", [0.005, 0.7, 29.995, 30.0])
def test_a_short_sound_fills_a_window(num_mels: int, seconds: float) -> None:
    samples = draw_sound(seconds)
    frames = Frames(open_sound(samples), FeatureShape(num_mels, 3000, 2))
    torch.testing.assert_close(frames.read(0), ask_reference(samples, num_mels), atol=1e-5, rtol=0)
    assert frames.num_left(0) == 3000
    assert frames.seconds == pytest.approx(seconds, abs=1e-4)


@pytest.mark.parametrize("num_mels", [80, 128])
def test_a_long_sound_in_windows(num_mels: int) -> None:
    samples = draw_sound(47.123)
    expected = ask_reference(samples, num_mels, truncation=False, padding="longest")
    torch.testing.assert_close(extract_features(samples, num_mels), expected, atol=1e-5, rtol=0)
    frames = Frames(open_sound(samples), FeatureShape(num_mels, 3000, 2))
    for seek in (0, 1234, 3001):
        part = expected[:, seek : seek + 3000]
        found = frames.read(seek)
        torch.testing.assert_close(found[:, : part.shape[1]], part, atol=1e-5, rtol=0)
        assert found.shape == (num_mels, 3000) and not found[:, part.shape[1] :].any()
        assert frames.num_left(seek) == part.shape[1]


def cut(samples: np.ndarray, sizes: list[int]) -> Iterator[np.ndarray]:
    first, turn = 0, 0
    while first < len(samples):
        size = sizes[turn % len(sizes)]
        yield samples[first : first + size]
        first, turn = first + size, turn + 1


@pytest.mark.parametrize("sizes", [[1, 7, 199, 201, 160], [16000], [399, 0, 401]])
def test_blocks_of_any_size_give_the_same_frames(sizes: list[int]) -> None:
    samples = draw_sound(0.9)
    shape = FeatureShape(80, 40, 2)  # 0.4 s
    whole = Frames(open_sound(samples), shape)
    parts = Frames(Sound("parts", lambda: cut(samples, sizes), None), shape)
    for seek in (0, 13, 41, 80):
        torch.testing.assert_close(parts.read(seek), whole.read(seek), atol=1e-5, rtol=0)
        assert parts.num_left(seek) == whole.num_left(seek)


def test_hours_are_never_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sound of three hours (in a model of small windows) is read twice, and little of it is kept."""
    reads = []
    samples = draw_sound(60)

    def make() -> Iterator[np.ndarray]:
        reads.append(1)
        for _ in range(10):
            yield from cut(samples, [16000])

    monkeypatch.setattr("unspool.speech.features._HELD_FRAMES", 1000)
    frames = Frames(Sound("long", make, 600.0), WINDOW)
    most = 0
    for seek in range(0, 60_000, 3000):
        frames.read(seek)
        most = max(most, frames._powers.shape[1])
    assert len(reads) == 2 and most < 3500 and frames.num_left(59_999) == 1 and frames.num_left(60_000) == 0


def test_a_stream_is_cut_below_the_loudest_so_far() -> None:
    samples = draw_sound(1.6)
    samples[:8000] *= 1e-3
    shape = FeatureShape(80, 40, 2)
    frames = Frames(Sound("stream", lambda: cut(samples, [1600]), None, can_repeat=False), shape)
    first = frames.peak
    frames.read(0)
    frames.read(60)
    assert frames.peak > first


def test_silence_is_known() -> None:
    samples = np.concatenate((np.zeros(RATE, np.float32), draw_sound(1.0)))
    frames = Frames(open_sound(samples), FeatureShape(80, 50, 2))
    assert frames.is_silent(0) and not frames.is_silent(90)


def test_a_silent_window_is_silent_beside_sound() -> None:
    """The frames at its ends read samples of its neighbours."""
    silence = np.zeros(RATE, np.float32)
    frames = Frames(open_sound(np.concatenate((draw_sound(1.0), silence, draw_sound(1.0)))), FeatureShape(80, 100, 2))
    assert [frames.is_silent(seek) for seek in (0, 96, 100, 104, 200, 299)] == [False, False, True, False, False, False]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_no_sound(value: float) -> None:
    samples = draw_sound(0.5)
    samples[100] = value
    with pytest.raises(InputError, match="NaN or infinite"):
        Frames(open_sound(samples), WINDOW)

"""Log-mel features, as Whisper reads them (Radford et al. 2022): made from blocks of samples, kept while needed."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F

from unspool.protocols import FeatureShape
from unspool.speech.sound import RATE, Sound

HOP = 160  # samples between frames
WINDOW = 400  # samples that a frame covers
FRAMES_PER_SECOND = RATE // HOP
_FLOOR = 1e-10
_DEPTH = 8.0  # powers of ten below the loudest that are distinguished
_HELD_FRAMES = 60_000  # ten minutes are kept from the pass that finds the loudest frame
_CHUNK = 4 * RATE  # samples of a transform


@lru_cache(maxsize=4)
def make_filters(num_mels: int) -> torch.Tensor:
    """Triangular filters of equal area, evenly spaced on Slaney's mel scale: (mels, frequencies)."""
    frequencies = np.linspace(0, RATE / 2, WINDOW // 2 + 1)
    top = 15 + math.log(RATE / 2 / 1000) * 27 / math.log(6.4)  # linear up to 1 kHz, then logarithmic
    mels = np.linspace(0, top, num_mels + 2)
    edges = np.where(mels < 15, mels * 200 / 3, 1000 * np.exp((mels - 15) * math.log(6.4) / 27))
    widths = np.diff(edges)
    slopes = edges[:, None] - frequencies
    rising, falling = -slopes[:-2] / widths[:-1, None], slopes[2:] / widths[1:, None]
    filters = np.maximum(0, np.minimum(rising, falling)) * (2 / (edges[2:] - edges[:-2]))[:, None]
    return torch.from_numpy(filters.astype(np.float32))


@lru_cache(maxsize=1)
def _make_window() -> torch.Tensor:
    return torch.hann_window(WINDOW)


def _transform(samples: torch.Tensor, num_mels: int) -> torch.Tensor:
    """Powers of ten (mels, frames) of samples, the first frame's beginning with them."""
    spectrum = torch.stft(samples, WINDOW, HOP, window=_make_window(), center=False, return_complex=True)
    power = make_filters(num_mels) @ (spectrum.real.square() + spectrum.imag.square())
    return power.clamp_(min=_FLOOR).log10_()


def normalize(powers: torch.Tensor, peak: float) -> torch.Tensor:
    """Powers of ten as features: what is far below the loudest is cut, and the rest lies around 0."""
    return (powers.clamp(min=peak - _DEPTH) + 4) / 4


def extract_features(samples: np.ndarray | torch.Tensor, num_mels: int = 80) -> torch.Tensor:
    """The features (mels, frames) of mono samples at 16 kHz, as a whole."""
    sound = torch.as_tensor(samples, dtype=torch.float32)
    half = WINDOW // 2
    if len(sound) <= half:
        sound = F.pad(sound, (0, half + 1 - len(sound)))
    padded = F.pad(sound[None], (half, half), mode="reflect")[0]
    powers = _transform(padded, num_mels)[:, : len(sound) // HOP]
    return normalize(powers, float(powers.max()))


class Frames:
    """The frames of a sound, made as it is read; what lies before the place last asked for is dropped.

    A sound that fits a window is filled up with silence to the window's length. The loudest frame, below which the
    features are cut, is that of the whole sound; of a stream, that of what was read so far.
    """

    def __init__(self, sound: Sound, shape: FeatureShape) -> None:
        self.sound = sound
        self._mels, self._window, self._stride = shape.channels, shape.frames, shape.stride
        self.peak = -math.inf
        self._start()
        if not self._has_ended and sound.can_repeat:
            self._find_peak()

    def _start(self) -> None:
        self._blocks = self.sound.blocks()
        self._samples = torch.zeros(0)  # from sample `_made * HOP - WINDOW // 2` on
        self._powers = torch.zeros(self._mels, 0)  # from frame `_first` on
        self._made = self._first = 0  # frames made so far, and the first that is kept
        self._num_samples = 0
        self._has_ended = False
        self._fill(self._window)

    @property
    def num_real(self) -> int:
        """Frames of sound read so far, without the silence that fills a short one up."""
        return -(-self._num_samples // HOP)

    @property
    def seconds(self) -> float:
        """Seconds read so far."""
        return self._num_samples / RATE

    def num_left(self, seek: int) -> int:
        """Frames from `seek` to the end, counted up to a window."""
        self._fill(seek + self._window)
        return max(0, min(self._window, self._made - seek))

    def read(self, seek: int) -> torch.Tensor:
        """The features (mels, frames) of the window at `seek`; past the end they are zero."""
        num_frames = self.num_left(seek)
        self._powers = self._powers[:, seek - self._first :]
        self._first = seek
        features = normalize(self._powers[:, :num_frames], self.peak)
        return F.pad(features, (0, self._window - num_frames))

    def is_silent(self, seek: int) -> bool:
        """Whether there is no sound at all in the window at `seek`, whatever stands beside it."""
        num_frames = self.num_left(seek)
        start = seek - self._first
        powers = self._powers[:, start : start + num_frames]
        inner = powers[:, WINDOW // 2 // HOP + 1 : -1]  # the other frames read the neighbours' samples too
        return bool(((inner if inner.shape[1] else powers) <= math.log10(_FLOOR) + 1e-6).all())

    def count_positions(self, seek: int) -> int | None:
        """The encoder's positions of a window that hold sound."""
        return max(1, min(self._window, self.num_real - seek) // self._stride)

    # --- making them ---------------------------------------------------------------------------------
    def _find_peak(self) -> None:
        """Read to the end for the loudest frame; a sound of up to ten minutes is kept, a longer one read again."""
        seconds = self.sound.seconds
        if seconds is not None and seconds * FRAMES_PER_SECOND <= _HELD_FRAMES:
            self._fill(_HELD_FRAMES + self._window)
            return
        while not self._has_ended:
            self._powers, self._first = self._powers[:, :0], self._made
            self._fill(self._made + self._window)
        self._start()

    def _fill(self, stop: int) -> None:
        """Make frames up to `stop`, or to the end."""
        parts = [self._powers]
        while self._made < stop and not self._has_ended:
            block = next(self._blocks, None)
            parts += self._end() if block is None else [self._take(torch.from_numpy(block))]
        self._powers = torch.cat(parts, dim=1) if len(parts) > 1 else self._powers

    def _take(self, block: torch.Tensor) -> torch.Tensor:
        """The frames that a block completes."""
        half, had = WINDOW // 2, self._num_samples
        self._samples = torch.cat((self._samples, block))
        self._num_samples += len(block)
        if self._num_samples <= half:
            return self._powers[:, :0]
        if had <= half:  # the beginning is mirrored
            self._samples = torch.cat((self._samples[1 : half + 1].flip(0), self._samples))
        # A sound has as many frames as whole hops, which the end of its samples would exceed by one.
        return self._make(min((len(self._samples) - WINDOW) // HOP + 1, self._num_samples // HOP - self._made))

    def _end(self) -> list[torch.Tensor]:
        """The last frames: a short sound goes on in silence, and the end is mirrored."""
        self._has_ended = True
        real, window, parts = self._num_samples, self._window * HOP, []
        if real <= window:
            parts.append(self._take(torch.zeros(window - real)))
        mirrored = self._samples[-WINDOW // 2 - 1 : -1].flip(0)
        self._samples = torch.cat((self._samples, mirrored))
        parts.append(self._make(self._num_samples // HOP - self._made))
        self._num_samples = real
        return parts

    def _make(self, num_frames: int) -> torch.Tensor:
        """The next frames, of samples that are here."""
        if num_frames <= 0:
            return self._powers[:, :0]
        step = _CHUNK // HOP
        parts = [
            _transform(self._samples[first * HOP : (min(first + step, num_frames) - 1) * HOP + WINDOW], self._mels)
            for first in range(0, num_frames, step)
        ]
        self._samples = self._samples[num_frames * HOP :]
        self._made += num_frames
        made = torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]
        self.peak = max(self.peak, float(made.max()))
        return made

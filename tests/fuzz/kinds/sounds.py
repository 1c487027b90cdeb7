"""Sound files with damage behind their headers as in them: opened as a path, as bytes and as a stream, and read."""

from __future__ import annotations

import io
import math
import struct
from functools import cache
from pathlib import Path
from random import Random

import numpy as np

from tests.fuzz.findings import Difference
from tests.fuzz.mutate import mutate_bytes
from unspool.speech.sound import RATE, Sound, open_sound, open_stream

NAME = "sounds"
SHARE = 2.0
SHORT = 40
_HEADER = 64  # bytes, about


def _write_wav(samples: np.ndarray, rate: int, bits: int, tag: int = 1) -> bytes:
    """A WAV file of (frames, channels) between -1 and 1."""
    channels = samples.shape[1]
    if tag == 3:
        content = samples.astype("<f4" if bits == 32 else "<f8").tobytes()
    elif bits == 8:
        content = ((samples + 1) * 127).astype(np.uint8).tobytes()
    else:
        wide = (samples * (2 ** (bits - 1) - 1)).astype("<i4")
        content = wide.view(np.uint8).reshape(-1, 4)[:, : bits // 8].tobytes()
    form = struct.pack("<HHIIHH", tag, channels, rate, rate * channels * bits // 8, channels * bits // 8, bits)
    body = b"WAVEfmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", len(content)) + content
    return b"RIFF" + struct.pack("<I", len(body)) + body


@cache
def _make_files() -> tuple[bytes, ...]:
    """Whole files of all formats that can be written here; without soundfile, WAV alone."""
    made: list[bytes] = []
    for rate, channels, seconds in ((16_000, 1, 0.2), (44_100, 2, 0.1), (8_000, 3, 0.05)):
        times = np.arange(int(rate * seconds)) / rate
        samples = np.stack([np.sin(2 * math.pi * (300 + 100 * one) * times) / 2 for one in range(channels)], axis=1)
        made += [_write_wav(samples, rate, bits) for bits in (8, 16, 24, 32)]
        made += [_write_wav(samples, rate, bits, tag=3) for bits in (32, 64)]
        try:
            import soundfile
        except ImportError:
            continue
        for form, subtype in _FORMATS:
            if form in soundfile.available_formats() and (form, channels) != ("MP3", 3):
                buffer = io.BytesIO()
                try:
                    soundfile.write(buffer, samples, rate, format=form, subtype=subtype)
                except (soundfile.LibsndfileError, ValueError):  # not of this rate, or so many channels
                    continue
                made.append(buffer.getvalue())
    return tuple(made)


_FORMATS = (
    ("FLAC", "PCM_16"),
    ("FLAC", "PCM_24"),
    ("OGG", "VORBIS"),
    ("OGG", "OPUS"),
    ("MP3", "MPEG_LAYER_III"),
    ("AIFF", "PCM_16"),
    ("AU", "ULAW"),
    ("CAF", "ALAC_16"),
    ("WAV", "IMA_ADPCM"),
    ("W64", "PCM_16"),
    ("RF64", "PCM_16"),
)


def warm() -> None:
    """Write the files."""
    _make_files()


def make(rng: Random) -> tuple[str, bytes]:
    """How it is given, and the bytes; most have their damage behind the header."""
    data = rng.choice(_make_files())
    head = _HEADER if rng.random() < 0.6 else 0
    data = data[:head] + mutate_bytes(rng, data[head:], rng.choice((1, 1, 2, 5, 20)))
    return rng.choice(("path", "bytes", "stream", "pieces", "raw")), data


class _Pieces(io.RawIOBase):
    """A stream that gives a few bytes at a time, as a socket does."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        piece = self._data[self._at : self._at + min(len(buffer), 1 + self._at % 777)]
        self._at += len(piece)
        buffer[: len(piece)] = piece
        return len(piece)


def _open(way: str, data: bytes, folder: Path) -> Sound:
    if way == "path":
        path = folder / "in.sound"
        path.write_bytes(data)
        return open_sound(str(path))
    if way == "bytes":
        return open_sound(data)
    if way == "raw":
        return open_stream(io.BytesIO(data), RATE)
    return open_stream(io.BytesIO(data) if way == "stream" else io.BufferedReader(_Pieces(data)))


def run(given: tuple[str, bytes], folder: Path) -> None:
    """Read all samples."""
    way, data = given
    sound = _open(way, data, folder)
    if sound.seconds is not None and not sound.seconds >= 0:
        raise Difference(f"a sound of {sound.seconds} seconds")
    for block in sound.blocks():
        if block.ndim != 1 or block.dtype != np.float32 or not np.isfinite(block).all():
            raise Difference(f"a block of {block.shape} {block.dtype}, or with numbers that are none")

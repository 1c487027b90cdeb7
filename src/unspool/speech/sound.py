"""Sounds: arrays, files and streams of any rate and number of channels, as mono blocks at the model's rate."""

from __future__ import annotations

import io
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from unspool.errors import InputError, LoadError, MissingExtraError, ModelNotFoundError, SettingError, UnspoolError
from unspool.shortage import is_out_of_memory
from unspool.small_files import open_regular
from unspool.speech.resample import Resampler
from unspool.speech.wav import BLOCK_FRAMES, MOST_CHANNELS, UnknownEncodingError, read_blocks, read_header

RATE = 16_000  # samples a second that Whisper's features are made from
EXTRA = "audio"
LEAST_RATE, MOST_RATE = 1_000, 768_000
MOST_SECONDS = 48 * 3600
MOST_LOUD = 100.0  # where 1 is full scale: files of floats may go beyond, but not so far
MOST_STREAM_BYTES = 1 << 30  # of a compressed stream, which is decoded from memory

Blocks = Iterator[np.ndarray]


@dataclass(frozen=True)
class Sound:
    """A sound at the model's rate: where its blocks come from, and its length if that is known before reading."""

    name: str
    make_blocks: Callable[[], Blocks]  # mono float32
    seconds: float | None
    can_repeat: bool = True  # a stream is read once

    def blocks(self) -> Blocks:
        """The samples, checked: NaN and infinities are refused."""
        num_samples = 0
        if self.can_repeat and self.seconds is not None and self.seconds > MOST_SECONDS:
            raise self._make_length_error()
        for block in self.make_blocks():
            if not np.isfinite(block).all():
                raise InputError(f"{self.name} holds NaN or infinite samples; a sound's lie between -1 and 1")
            if len(block) and (loudest := float(np.abs(block).max())) > MOST_LOUD:
                raise InputError(
                    f"{self.name} has samples of up to {loudest:g}, and a sound's lie between -1 and 1; divide those "
                    "of 16 bits by 32768, or give them as whole numbers, which are scaled by their type"
                )
            num_samples += len(block)
            if self.can_repeat and num_samples > MOST_SECONDS * RATE:
                raise self._make_length_error()
            yield block
        if num_samples == 0:
            raise InputError(f"{self.name} is empty: it holds no samples")

    def _make_length_error(self) -> InputError:
        return InputError(f"{self.name} is longer than {MOST_SECONDS // 3600} hours; cut it into parts")


def open_sound(source: Any, sampling_rate: int | None = None) -> Sound:
    """A sound from a path, an array or tensor, a mapping of an array and its rate, a binary stream or the bytes of a
    file."""
    if isinstance(source, Sound):
        return source
    if isinstance(source, str | os.PathLike):
        if sampling_rate is not None:
            raise SettingError("`sampling_rate` is an array's; a file has its own rate, so leave it out")
        return _open_file(Path(source))
    if isinstance(source, Mapping):
        array = next((source[name] for name in ("array", "raw") if name in source), None)
        if array is None or "sampling_rate" not in source:
            raise InputError("audio given as a mapping needs an `array` (or `raw`) and its `sampling_rate`")
        return _open_array(array, source["sampling_rate"])
    if isinstance(source, bytes | bytearray):
        source = io.BytesIO(source)
    if hasattr(source, "read"):
        return open_stream(source, sampling_rate)
    return _open_array(source, RATE if sampling_rate is None else sampling_rate)


def open_stream(stream: BinaryIO, raw_rate: int | None = None, name: str = "the stream") -> Sound:
    """A sound from a binary stream that is read once: WAV as it arrives, or, with `raw_rate`, mono 16-bit samples.

    Other formats are decoded when the stream has ended.
    """
    if raw_rate is not None:
        rate = _read_rate(raw_rate)
        return Sound(name, lambda: _convert(_read_raw(stream), rate), None, can_repeat=False)
    head = stream.read(4)
    if not isinstance(head, bytes | bytearray):
        raise InputError(f"{name} gives {type(head).__name__}, and a sound is bytes; open the file with 'rb'")
    whole = io.BufferedReader(_Joined(head, stream))
    if head == b"RIFF":
        seen = _Recorder(whole)
        try:
            shape = read_header(seen, name)
        except UnknownEncodingError:  # its samples are compressed
            whole = io.BufferedReader(_Joined(bytes(seen.content), whole))
        else:
            rate = _read_rate(shape.rate, name)
            return Sound(name, lambda: _convert(read_blocks(whole, shape, name), rate), None, can_repeat=False)
    content = whole.read(MOST_STREAM_BYTES + 1)
    if not content:
        raise InputError(f"{name} is empty: nothing came from it")
    if len(content) > MOST_STREAM_BYTES:
        raise InputError(f"{name} has more than {MOST_STREAM_BYTES >> 20} MiB in a format that is not WAV; use a file")
    return _open_with_soundfile(lambda: io.BytesIO(content), name)


def measure_sound(sound: Sound, longest: float) -> Sound:
    """The sound with its length, if that is at most `longest` seconds: what has none is read so far, and kept."""
    if sound.seconds is not None:
        return sound
    blocks, rest, num_samples = list[np.ndarray](), sound.blocks(), 0
    for block in rest:
        blocks.append(block)
        num_samples += len(block)
        if num_samples > longest * RATE:
            return Sound(sound.name, lambda: itertools.chain(blocks, rest), None, can_repeat=False)
    return Sound(sound.name, lambda: iter(blocks), num_samples / RATE)


def _open_file(path: Path) -> Sound:
    name = str(path)
    path = path.expanduser()
    if path.is_dir():
        raise InputError(f"{name} is a folder; give the sound files in it")

    def open_content() -> BinaryIO:
        try:
            return open_regular(path)
        except ModelNotFoundError:
            raise InputError(f"there is no file {name}") from None
        except LoadError as error:  # a pipe, too, from which nothing may ever come
            raise InputError(
                f"{error}. For what arrives bit by bit give an open stream; the program reads one as -"
            ) from error

    try:
        with open_content() as stream:
            head = stream.read(4)
            if not head:
                raise InputError(f"{name} is an empty file")
            stream.seek(0)
            shape = read_header(stream, name) if head == b"RIFF" else None
    except UnknownEncodingError:
        shape = None
    except (OSError, ValueError) as error:
        if isinstance(error, UnspoolError):
            raise
        raise InputError(f"{name} can't be read: {error}") from error
    if shape is None:
        return _open_with_soundfile(open_content, name)

    def make_blocks() -> Blocks:
        with open_content() as stream:
            yield from _convert(read_blocks(stream, read_header(stream, name), name), rate)

    rate = _read_rate(shape.rate, name)
    return Sound(name, make_blocks, None if shape.num_frames is None else shape.num_frames / rate)


def _open_with_soundfile(open_content: Callable[[], Any], name: str) -> Sound:
    """What is not plain WAV: FLAC, Ogg, MP3 and whatever else libsndfile reads."""
    try:
        import soundfile
    except ImportError as error:
        what = f"{name} is not an uncompressed WAV file; reading FLAC, Ogg, MP3 or another kind of sound"
        raise MissingExtraError("soundfile", EXTRA, what) from error
    with _explaining_damage(name), open_content() as content, soundfile.SoundFile(content) as file:
        rate, channels, num_frames = int(file.samplerate), int(file.channels), int(file.frames)
    rate = _read_rate(rate, name)
    if channels > MOST_CHANNELS:
        raise InputError(f"{name} has {channels} channels; 1 to {MOST_CHANNELS} can be read")

    def read() -> Blocks:
        with _explaining_damage(name), open_content() as content, soundfile.SoundFile(content) as file:
            while len(block := file.read(BLOCK_FRAMES, dtype="float32", always_2d=True)):
                yield block

    # What a header says before the samples were read: none, or more than there can be, if it is not known.
    is_known = 0 < num_frames < 1 << 62
    return Sound(name, lambda: _convert(read(), rate), num_frames / rate if is_known else None)


@contextmanager
def _explaining_damage(name: str) -> Iterator[None]:
    """Whatever libsndfile, or the package around it, makes of a damaged file, also past its header."""
    try:
        yield
    except UnspoolError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        why = getattr(error, "error_string", str(error)).rstrip(".")  # without the object that it was read from
        raise InputError(f"{name} is not sound that can be read: {why}. Give WAV, FLAC, Ogg or MP3") from error


def _open_array(source: Any, rate: Any) -> Sound:
    """An array (samples), or (channels, samples) or (samples, channels): the shorter side is the channels."""
    rate = _read_rate(rate)
    if isinstance(source, torch.Tensor):
        source = source.detach().cpu()
        source = (source.float() if source.is_floating_point() else source).numpy()
    elif isinstance(source, Sequence):
        try:
            source = np.asarray(source)
        except (TypeError, ValueError) as error:
            raise InputError(f"a sound given as a list holds numbers: {error}") from error
    if not isinstance(source, np.ndarray) or source.dtype.kind not in "fiu":
        kind = f"an array of {source.dtype}" if isinstance(source, np.ndarray) else f"a {type(source).__name__}"
        raise InputError(
            f"a sound is a path, the bytes of a file, an array or tensor of samples, or a mapping of one and its "
            f"sampling_rate, not {kind}"
        )
    if source.size == 0:
        raise InputError("the sound is empty: it holds no samples")
    if source.ndim not in (1, 2):
        raise InputError(f"a sound of the shape {source.shape} can't be read; give (samples) or (channels, samples)")
    if source.ndim == 2 and source.shape[0] < source.shape[1]:
        source = source.T
    frames = source if source.ndim == 2 else source[:, None]
    if frames.shape[1] > MOST_CHANNELS:
        raise InputError(f"a sound has 1 to {MOST_CHANNELS} channels, and this array has {frames.shape[1]}")
    limit = np.iinfo(frames.dtype) if frames.dtype.kind in "iu" else None

    def read() -> Blocks:
        for first in range(0, len(frames), BLOCK_FRAMES):
            block = frames[first : first + BLOCK_FRAMES]
            if limit is None:
                yield block.astype(np.float32)
            else:
                middle = 0 if limit.min < 0 else (limit.max + 1) / 2
                yield ((block.astype(np.float64) - middle) / (limit.max + 1 - middle)).astype(np.float32)

    return Sound("the sound", lambda: _convert(read(), rate), len(frames) / rate)


def _convert(blocks: Blocks, rate: int) -> Blocks:
    """Frames of any number of channels at their rate, as mono blocks at the model's."""
    resampler = Resampler(rate, RATE)
    for block in blocks:
        mono = block[:, 0] if block.shape[1] == 1 else block.mean(axis=1)
        yield resampler.push(np.ascontiguousarray(mono, np.float32))
    rest = resampler.finish()
    if len(rest):
        yield rest


def _read_raw(stream: BinaryIO) -> Blocks:
    odd = b""
    while content := stream.read(2 * BLOCK_FRAMES):
        content = odd + content
        odd = content[len(content) - len(content) % 2 :]
        yield np.frombuffer(content[: len(content) - len(odd)], "<i2").astype(np.float32)[:, None] / 32768


def _read_rate(rate: Any, name: str = "the sound") -> int:
    if isinstance(rate, bool) or not isinstance(rate, int | np.integer) or not LEAST_RATE <= rate <= MOST_RATE:
        raise InputError(
            f"{name} has the sampling rate {rate!r:.40}; give a whole number from {LEAST_RATE} to {MOST_RATE} a second"
        )
    return int(rate)


class _Recorder:
    """A stream that remembers what was read from it."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.content = bytearray()

    def read(self, size: int) -> bytes:
        """So many bytes, or fewer."""
        part = self._stream.read(size)
        self.content += part
        return part


class _Joined(io.RawIOBase):
    """A stream whose beginning was read already."""

    def __init__(self, head: bytes, rest: BinaryIO) -> None:
        self._head, self._rest = head, rest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        content = self._head or self._rest.read(len(buffer))
        self._head = content[len(buffer) :]
        content = content[: len(buffer)]
        buffer[: len(content)] = content
        return len(content)

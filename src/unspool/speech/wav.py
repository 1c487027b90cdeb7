"""WAV files and streams: PCM of 8 to 32 bits and floats, of any rate, read block by block."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Protocol

import numpy as np

from unspool.errors import InputError

BLOCK_FRAMES = 1 << 16
MOST_CHANNELS = 64
_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
_UNKNOWN_SIZE = (0, 0x7FFFFFFF, 0xFFFFFFFF)  # what programs write that don't know the length yet
_MOST_CHUNK = 1 << 20  # bytes of a chunk before the samples
_MOST_CHUNKS = 256


class Readable(Protocol):
    """A stream of bytes."""

    def read(self, size: int, /) -> bytes:
        """So many bytes, or fewer; none at the end."""
        ...


class UnknownEncodingError(InputError):
    """A WAV file whose samples are compressed."""


@dataclass(frozen=True, slots=True)
class WavFormat:
    """What a WAV file's header says."""

    rate: int
    channels: int
    bits: int
    is_float: bool
    data_bytes: int | None  # None: to the end of the stream

    @property
    def frame_bytes(self) -> int:
        """Bytes of one sample of every channel."""
        return self.channels * self.bits // 8

    @property
    def num_frames(self) -> int | None:
        """Samples of each channel, if the header says so."""
        return None if self.data_bytes is None else self.data_bytes // self.frame_bytes


def read_header(stream: Readable, name: str) -> WavFormat:
    """Read up to the first sample; raises InputError for what is no WAV file."""
    head = _read(stream, 12)
    if head[:4] not in (b"RIFF", b"RF64") or head[8:] != b"WAVE":
        raise InputError(f"{name} is not a WAV file")
    found: tuple[int, int, int, int] | None = None
    for _ in range(_MOST_CHUNKS):
        head = _read(stream, 8)
        if len(head) < 8:
            break
        kind, size = head[:4], struct.unpack("<I", head[4:])[0]
        if kind == b"data":
            if found is None:
                break
            tag, channels, rate, bits = found
            shape = WavFormat(rate, channels, bits, tag == _FLOAT, None if size in _UNKNOWN_SIZE else size)
            _check(shape, tag, name)
            return shape
        if size > _MOST_CHUNK:
            raise InputError(f"{name} is a WAV file with a chunk of {size} bytes before its samples; it is damaged")
        content = _read(stream, size + size % 2)
        if kind == b"fmt " and len(content) >= 16:
            tag, channels, rate, _, _, bits = struct.unpack("<HHIIHH", content[:16])
            if tag == _EXTENSIBLE and len(content) >= 26:
                tag = struct.unpack("<H", content[24:26])[0]
            found = tag, channels, rate, bits
    raise InputError(f"{name} is a WAV file without samples: it has no format, or no data after it")


def read_blocks(stream: BinaryIO, shape: WavFormat, name: str) -> Iterator[np.ndarray]:
    """The samples (frames, channels) as float32 between -1 and 1, in blocks."""
    left = shape.data_bytes
    while left is None or left > 0:
        wanted = BLOCK_FRAMES * shape.frame_bytes
        content = _read(stream, wanted if left is None else min(wanted, left))
        if left is not None:
            left -= len(content)
        whole = len(content) - len(content) % shape.frame_bytes
        if whole:
            yield _decode(content[:whole], shape).reshape(-1, shape.channels)
        if len(content) < wanted and left != 0:
            if left is not None and left > 0 and shape.num_frames is not None:
                raise InputError(
                    f"{name} ends {left} bytes before its header says; it was cut off, or is still being written"
                )
            return


def _check(shape: WavFormat, tag: int, name: str) -> None:
    bits = (32, 64) if shape.is_float else (8, 16, 24, 32)
    if tag not in (_PCM, _FLOAT) or shape.bits not in bits:
        raise UnknownEncodingError(f"{name} is a WAV file in encoding {tag} with {shape.bits} bits a sample")
    if not 0 < shape.channels <= MOST_CHANNELS:
        raise InputError(f"{name} has {shape.channels} channels; 1 to {MOST_CHANNELS} can be read")


def _decode(content: bytes, shape: WavFormat) -> np.ndarray:
    values: np.ndarray
    if shape.is_float:
        values = np.frombuffer(content, f"<f{shape.bits // 8}")
    elif shape.bits == 8:
        values = np.frombuffer(content, np.uint8).astype(np.float32) / 128 - 1
    elif shape.bits == 24:
        wide = np.zeros((len(content) // 3, 4), np.uint8)
        wide[:, 1:] = np.frombuffer(content, np.uint8).reshape(-1, 3)
        values = wide.view("<i4")[:, 0] / 2.0**31
    else:
        values = np.frombuffer(content, f"<i{shape.bits // 8}") / 2.0 ** (shape.bits - 1)
    return values.astype(np.float32)


def _read(stream: Readable, size: int) -> bytes:
    """So many bytes, or all that are left: a pipe gives fewer at a time."""
    parts: list[bytes] = []
    while size > 0:
        part = stream.read(size)
        if not part:
            break
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def encode_wav(samples: np.ndarray, rate: int) -> bytes:
    """A WAV file of 16-bit samples from floats (channels, samples); what lies beyond full scale is cut."""
    channels = samples.shape[0]
    if not 0 < channels <= MOST_CHANNELS or not samples.size or not np.isfinite(samples).all():
        raise InputError("a sound to write has 1 to 64 channels of finite samples")
    whole: bytes = np.round(np.clip(samples.T, -1.0, 1.0) * 32767).astype("<i2").tobytes()
    if len(whole) >= 1 << 32:
        raise InputError("a WAV file has at most 4 GiB; write a shorter sound")
    shape = struct.pack("<HHIIHH", _PCM, channels, rate, rate * channels * 2, channels * 2, 16)
    head = b"WAVEfmt " + struct.pack("<I", len(shape)) + shape + b"data" + struct.pack("<I", len(whole))
    return b"RIFF" + struct.pack("<I", len(head) + len(whole)) + head + whole

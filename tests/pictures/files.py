"""Pictures for tests, made here."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from typing import Any

import numpy as np


def make_picture(seed: int = 0, height: int = 40, width: int = 60) -> np.ndarray:
    """Random colours."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def encode_picture(picture: np.ndarray, kind: str = "PNG", **more: Any) -> bytes:
    """A picture's file."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(picture).save(file, kind, **more)
    return file.getvalue()


def make_uri(content: bytes) -> str:
    """A data: URI of a PNG."""
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def make_bomb(side: int = 60_000) -> bytes:
    """A PNG of few bytes whose header states a huge size."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    body = chunk(b"IDAT", zlib.compress(bytes(1000)))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + body + chunk(b"IEND", b"")

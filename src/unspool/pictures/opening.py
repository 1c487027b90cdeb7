"""Opening pictures: their files come from anyone, so the sizes that a header states are looked at before any pixel is
decoded, and few formats are."""

from __future__ import annotations

import base64
import binascii
import io
import os
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from unspool.errors import InputError, MissingExtraError, ModelNotFoundError, UnspoolError, excerpt
from unspool.pictures.fetching import fetch_picture
from unspool.shortage import is_out_of_memory
from unspool.small_files import open_regular

EXTRA: Final = "pictures"
FORMATS: Final = ("JPEG", "PNG", "WEBP", "GIF")
HOSTS: Final = "UNSPOOL_PICTURE_HOSTS"  # the variable that names hosts whose pictures are fetched
_DATA = re.compile(r"data:([^,;]{0,100})((?:;[^,;]{0,100}){0,4}),", re.ASCII)
_SHOWN: Final = 60
_MOST_RATIO: Final = 100


@dataclass(frozen=True)
class Limits:
    """What is taken of the pictures of one request."""

    num_bytes: int = 32 << 20  # of a file
    num_pixels: int = 1 << 26  # of a picture, as its header states them: 200 MB of colours
    num_pictures: int = 64
    hosts: frozenset[str] = frozenset()  # from which pictures are fetched


@lru_cache(maxsize=1)
def default_limits() -> Limits:
    """The limits of a program's own calls: hosts are those of the environment."""
    named = os.environ.get(HOSTS, "")
    return Limits(hosts=frozenset(name.strip().lower() for name in named.split(",") if name.strip()))


def open_picture(source: Any, limits: Limits | None = None, name: str = "the picture") -> Any:
    """A picture (an RGB image of Pillow's) from a path, bytes, a binary file, a `data:` URI, an address on a host that
    is allowed, an array or tensor (height, width, 3) of bytes, or an image of Pillow's."""
    limits = default_limits() if limits is None else limits
    pillow = _import_pillow()
    if isinstance(source, pillow.Image.Image):
        _check_size(source.size, limits, name)
        return _finish(source, name)
    if isinstance(source, np.ndarray | torch.Tensor):
        return _read_array(pillow, source, limits, name)
    return _decode(pillow, _read_bytes(source, limits, name), limits, name)


def _import_pillow() -> Any:
    try:
        import PIL
        import PIL.Image
        import PIL.ImageOps
    except ImportError as error:
        raise MissingExtraError("pillow", EXTRA, "a prompt with pictures") from error
    return PIL


def _read_bytes(source: Any, limits: Limits, name: str) -> bytes:
    """A picture's file."""
    if isinstance(source, str):
        if source.startswith("data:"):
            return read_data(source, limits, name)
        if re.match(r"[a-zA-Z][a-zA-Z0-9+.-]+://", source):
            return fetch_picture(source, limits.hosts, limits.num_bytes, name)
    if isinstance(source, str | os.PathLike):
        return _read_file(source, limits, name)
    if isinstance(source, bytes | bytearray | memoryview):
        return _check_bytes(bytes(source), limits, name)
    if hasattr(source, "read"):
        found = source.read(limits.num_bytes + 1)
        if not isinstance(found, bytes | bytearray):
            raise InputError(f"{name} gives {type(found).__name__}, and a picture is bytes; open the file with 'rb'")
        return _check_bytes(bytes(found), limits, name)
    raise InputError(
        f"{name} is a {type(source).__name__}; give a path, the bytes of a file, a data: URI, an array (height, width, "
        "3) or an image of Pillow's"
    )


def _read_file(source: str | os.PathLike[str], limits: Limits, name: str) -> bytes:
    shown = excerpt(os.fsdecode(source), _SHOWN)
    try:
        with open_regular(Path(source)) as file:
            return _check_bytes(file.read(limits.num_bytes + 1), limits, name)
    except InputError:
        raise
    except ModelNotFoundError as error:
        raise InputError(f"{name} is to be the file {shown}, and there is none. Check the path") from error
    except (OSError, ValueError) as error:
        raise InputError(f"{name} can't be read from {shown}: {error}") from error


def read_data(uri: str, limits: Limits, name: str) -> bytes:
    """The bytes of a `data:` URI."""
    head = _DATA.match(uri)
    if head is None or not head[2].endswith(";base64"):
        raise InputError(f"{name} is {excerpt(uri, _SHOWN)}, and a data: URI reads data:image/png;base64,…")
    if head[1] and not head[1].startswith("image/"):
        raise InputError(f"{name} is of the kind {excerpt(head[1])} and no picture; give image/png or image/jpeg")
    return decode_base64(uri[head.end() :], limits, name)


def decode_base64(text: str, limits: Limits, name: str) -> bytes:
    """The bytes that base64 stands for."""
    if len(text) > limits.num_bytes * 4 // 3 + 4:
        raise _make_size_error(name, limits)
    try:
        return _check_bytes(base64.b64decode(text, validate=True), limits, name)
    except (binascii.Error, ValueError) as error:
        if isinstance(error, UnspoolError):
            raise
        raise InputError(f"{name} is {excerpt(text, 40)}, which is not base64 of a picture's file: {error}") from error


def _check_bytes(content: bytes, limits: Limits, name: str) -> bytes:
    if not content:
        raise InputError(f"{name} is empty: it has no bytes")
    if len(content) > limits.num_bytes:
        raise _make_size_error(name, limits)
    return content


def _make_size_error(name: str, limits: Limits) -> InputError:
    return InputError(f"{name} has more than {limits.num_bytes >> 20} MiB; make it smaller")


def _check_size(size: tuple[int, int], limits: Limits, name: str) -> None:
    width, height = size
    if width * height > limits.num_pixels:
        raise InputError(
            f"{name} is {width} × {height} pixels, {width * height / 1e6:.0f} million, and at most "
            f"{limits.num_pixels / 1e6:.0f} million are decoded; make it smaller"
        )
    if not width or not height:
        raise InputError(f"{name} is {width} × {height} pixels: there is nothing in it")
    if max(width, height) > _MOST_RATIO * min(width, height):  # models enlarge the shorter side
        raise InputError(
            f"{name} is {width} × {height} pixels, and one side may be at most {_MOST_RATIO} times as long as the "
            "other; cut it into parts"
        )


def _decode(pillow: Any, content: bytes, limits: Limits, name: str) -> Any:
    """The first frame of a file of a known format, whose header states a size within bounds."""
    try:
        image = pillow.Image.open(io.BytesIO(content), formats=FORMATS)
        _check_size(image.size, limits, name)
        image.load()
        return _finish(image, name)
    except UnspoolError:
        raise
    except (pillow.Image.DecompressionBombError, pillow.Image.DecompressionBombWarning) as error:
        raise InputError(f"{name} has too many pixels: {str(error).split(',')[0]}; make it smaller") from error
    except pillow.UnidentifiedImageError as error:
        raise InputError(
            f"{name} is no picture in a format that is read ({', '.join(FORMATS)}); its file begins with "
            f"{excerpt(content[:16])}"
        ) from error
    except Exception as error:  # decoders fail in many ways at damaged files
        if is_out_of_memory(error):
            raise
        raise InputError(f"{name} is damaged: {type(error).__name__}: {str(error)[:200]}") from error


def _finish(image: Any, name: str) -> Any:
    """The picture upright, in three colours."""
    from PIL import ImageOps

    try:
        return ImageOps.exif_transpose(image).convert("RGB")
    except Exception as error:  # what a file says of its turning may be damaged
        if is_out_of_memory(error):
            raise
        raise InputError(f"{name} is damaged: {type(error).__name__}: {str(error)[:200]}") from error


def _read_array(pillow: Any, source: Any, limits: Limits, name: str) -> Any:
    array = source.detach().cpu().numpy() if isinstance(source, torch.Tensor) else source
    if array.ndim != 3 or array.shape[2] != 3 or array.dtype != np.uint8:
        raise InputError(
            f"{name} is an array of {array.dtype} with the shape {list(array.shape)}; a picture's is (height, width, "
            "3) of uint8"
        )
    _check_size((array.shape[1], array.shape[0]), limits, name)
    return pillow.Image.fromarray(np.ascontiguousarray(array))

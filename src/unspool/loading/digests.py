"""Digests of files of any size: what a model's answers depend on, known again by the content of its files."""

from __future__ import annotations

import hashlib
import os
import time
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from functools import lru_cache, partial
from pathlib import Path
from typing import Final

from unspool.errors import LoadError
from unspool.loading.hub import ALLOWED_PATTERNS, IGNORED_PATTERNS
from unspool.loading.pickled import find_pickles
from unspool.small_files import open_regular
from unspool.text.folder import TEMPLATES

_PART: Final = 32 << 20  # bytes that a thread reads and hashes at once
_PIECE: Final = 1 << 20
_MOST_THREADS: Final = 8
_WHOLE: Final = 16 << 20  # bytes of a file of which no sample is taken
_SAMPLES: Final = 4096  # of a larger one
_SAMPLE: Final = 4096  # bytes of each
_SECONDS_OF_TIMES: Final = 2.0  # within which a file system may give two writes one time
_READ: Final = (*ALLOWED_PATTERNS, "merges.txt", "vocab.txt")  # of a folder, by whoever reads it


def digest_file(path: Path) -> str:
    """A digest of a file's whole content, by as many threads as there are processors."""
    try:
        with open_regular(path) as file:
            state = os.fstat(file.fileno())
        # A file that was written a moment ago may be written again without another time.
        is_old = time.time() - max(state.st_ctime, state.st_mtime) > _SECONDS_OF_TIMES
        key = (state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns)
        return _digest_known(path, key) if is_old else _digest(path, state.st_size)
    except LoadError:
        raise
    except OSError as error:
        raise LoadError(f"{path} can't be read: {error.strerror or error}") from error


@lru_cache(maxsize=1024)
def _digest_known(path: Path, key: tuple[int, ...]) -> str:
    """The digest of a file, once for each state of it that this process sees."""
    return _digest(path, key[2])


def _digest(path: Path, size: int) -> str:
    try:
        parts = range(0, size, _PART)
        digest = hashlib.sha256(str(size).encode())
        threads = min(os.cpu_count() or 1, _MOST_THREADS, max(1, len(parts)))
        with ThreadPoolExecutor(threads) as pool:
            for few in range(0, len(parts), threads):  # a file of terabytes is no list of futures
                for one in pool.map(partial(_digest_part, path), parts[few : few + threads]):
                    digest.update(one)
        if path.stat().st_size != size:
            raise LoadError(f"{path} was changed while it was read; start again once it is whole")
    except LoadError:
        raise
    except OSError as error:
        raise LoadError(f"{path} can't be read: {error.strerror or error}") from error
    return digest.hexdigest()


def _digest_part(path: Path, first: int) -> bytes:
    digest, left = hashlib.sha256(), _PART
    with open_regular(path) as file:
        file.seek(first)
        while left and (piece := file.read(min(_PIECE, left))):
            digest.update(piece)
            left -= len(piece)
    return digest.digest()


def digest_model(location: Path) -> str:
    """A digest of all that is read of a model: a file, or a folder's weights, settings, tokenizer and templates."""
    if not location.is_dir():
        return digest_file(location)
    digest = hashlib.sha256()
    for path in sorted([*list_read(location), *find_pickles(location)]):
        if path.is_file():
            name = path.relative_to(location).as_posix()
            digest.update(f"{name}\0{digest_file(path)}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


def list_read(folder: Path) -> list[Path]:
    """What is read of a model's folder: weights that are no pickles, settings, tokenizer and templates."""
    return [*(path for path in folder.iterdir() if _is_read(path.name)), *folder.glob(TEMPLATES)]


def sample_weights(location: Path) -> str:
    """A digest of a model's config and of pieces of its weights: quick, and another one after any training."""
    if not location.is_dir():
        return _sample_file(location)
    digest = hashlib.sha256()
    for path in sorted([*location.glob("*.safetensors"), *location.glob("config.json"), *find_pickles(location)]):
        if path.is_file():
            digest.update(f"{path.name}\0{_sample_file(path)}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


def _sample_file(path: Path) -> str:
    """A digest of a small file's content, or of a large one's size, its beginning and pieces of the rest."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size <= _WHOLE:
                return digest_file(path)
            digest = hashlib.sha256(str(size).encode())
            digest.update(file.read(_PIECE))
            for place in range(_PIECE, size, max(_SAMPLE, size // _SAMPLES)):
                file.seek(place)
                digest.update(file.read(_SAMPLE))
    except LoadError:
        raise
    except OSError as error:
        raise LoadError(f"{path} can't be read: {error.strerror or error}") from error
    return digest.hexdigest()


def _is_read(name: str) -> bool:
    is_ignored = any(fnmatch(name, pattern) for pattern in IGNORED_PATTERNS)
    return not is_ignored and any(fnmatch(name, pattern) for pattern in _READ)

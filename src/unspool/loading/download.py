"""Resumable HTTP downloads: a file continues where an earlier attempt, in this process or another, was cut off."""

from __future__ import annotations

import hashlib
import http.client
import json
import re
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from unspool.errors import LoadError
from unspool.small_files import read_json_object, write_text

Report = Callable[[int, int], None]  # bytes done, bytes in all

_CHUNK_BYTES = 1 << 20
_SECONDS = 30.0  # without a byte
_MOST_TRIES = 5  # in a row without a byte
_RANGE = re.compile(r"bytes (\d{1,18})-\d{1,18}/(\d{1,18})")
_NETWORK = (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError, ssl.SSLError)


class CutOffError(LoadError):
    """The connection ended before the file did; what was received is kept."""


def read_url(url: str, most_bytes: int, accept: str = "*/*") -> tuple[bytes, str]:
    """The content of a small page, and its type; raises LoadError if it can't be read."""
    try:
        with _open(url, {"Accept": accept}) as response:
            data = response.read(most_bytes + 1)
            kind = str(response.headers.get("Content-Type", ""))
    except (*_NETWORK, OSError, ValueError) as error:
        raise LoadError(f"{url} can't be read: {error}") from error
    if len(data) > most_bytes:
        raise LoadError(f"{url} is longer than {most_bytes} bytes")
    return data, kind


def download(url: str, part: Path, *, most_bytes: int, sha256: str | None, report: Report) -> None:
    """Download the file at `url` to `part`, from where `part` ends if the server supports ranges, else from its start.

    A note beside `part` has the address it is from, so that no two files are mixed.
    """
    note = part.with_suffix(".json")
    tries = 0
    while True:
        before = _size_of(part)
        try:
            if _continue(url, part, note, most_bytes, report):
                break
        except urllib.error.HTTPError as error:
            raise LoadError(f"{url} can't be downloaded: the server said {error.code} {error.reason}") from error
        except _NETWORK as error:
            tries = 0 if _size_of(part) > before else tries + 1
            if tries >= _MOST_TRIES:
                raise CutOffError(
                    f"{url} was cut off after {_size_of(part)} bytes ({error}). They are kept: run it again to go on"
                ) from error
    if sha256 is not None:
        with part.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != sha256:
            remove_part(part)
            raise LoadError(f"{url} has the sha256 {found}; its index says {sha256}. Nothing was kept")


def remove_part(part: Path) -> None:
    """Remove what was received of a file."""
    part.unlink(missing_ok=True)
    part.with_suffix(".json").unlink(missing_ok=True)


def _continue(url: str, part: Path, note: Path, most_bytes: int, report: Report) -> bool:
    """One request; returns True once the file is complete, raises a network error if it was cut off."""
    tag = _read_tag(note, url)
    done = _size_of(part) if tag is not None else 0
    headers = {"Range": f"bytes={done}-"} if done else {}
    if done and tag:
        headers["If-Range"] = tag
    try:
        response = _open(url, headers)
    except urllib.error.HTTPError as error:
        if error.code != 416:  # nothing follows what is here: it is complete, or another file
            raise
        total = re.fullmatch(r"bytes \*/(\d{1,18})", error.headers.get("Content-Range", ""))
        if total is not None and int(total[1]) == done:
            return True
        remove_part(part)
        return False
    with response:
        start, total_bytes = _read_extent(response)
        if start != done:  # the whole file comes, as the server has no ranges or the file is another one
            if start != 0:
                remove_part(part)
                return False
            done = 0
        if done == 0:
            remove_part(part)
            write_text(note, json.dumps({"url": url, "tag": _find_tag(response)}))
        with part.open("ab") as out:
            while block := response.read(_CHUNK_BYTES):
                done += len(block)
                if done > most_bytes:
                    break
                out.write(block)
                report(done, total_bytes or done)
    if done > most_bytes:
        remove_part(part)
        raise LoadError(f"{url} is longer than {most_bytes} bytes, more than it should be. Nothing was kept")
    if total_bytes is not None and done < total_bytes:
        raise http.client.IncompleteRead(b"", total_bytes - done)
    return True


def _open(url: str, headers: dict[str, str]) -> Any:
    if not url.startswith(("http://", "https://")):
        raise LoadError(f"{url!r:.200} is not an address of the web")
    # A compressed transfer could not be resumed at a byte offset.
    request = urllib.request.Request(url, headers={"User-Agent": "unspool", "Accept-Encoding": "identity", **headers})
    return urllib.request.urlopen(request, timeout=_SECONDS)


def _read_extent(response: Any) -> tuple[int, int | None]:
    """The offset at which a response starts, and the length of the file, if it is given."""
    if response.status == 206:
        match = _RANGE.fullmatch(response.headers.get("Content-Range", ""))
        if match is None:
            raise http.client.HTTPException("a part came without saying which")
        return int(match[1]), int(match[2])
    length = response.headers.get("Content-Length", "")
    return 0, int(length) if length.isdecimal() and len(length) < 16 else None


def _find_tag(response: Any) -> str:
    """The entity tag, which changes with the file at an address; empty if the server gives none."""
    tag = str(response.headers.get("ETag", ""))
    return tag if tag.startswith('"') and len(tag) < 500 else ""  # a weak one does not promise equal bytes


def _read_tag(note: Path, url: str) -> str | None:
    """The tag of what was received; None if it is from another address, or there is nothing."""
    try:
        said = read_json_object(note, 1 << 16)
    except LoadError:
        return None
    return str(said.get("tag", "")) if said.get("url") == url else None


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0

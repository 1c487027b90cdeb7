"""Finding a package's wheel on the Python registry: its address and its sha256, by the simple repository API."""

from __future__ import annotations

import html
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urldefrag, urljoin

from unspool.errors import LoadError
from unspool.loading.download import read_url
from unspool.small_files import parse_json_object

_USUAL_INDEX = "https://pypi.org/simple"
_ACCEPT = "application/vnd.pypi.simple.v1+json, text/html;q=0.1"
_MAX_PAGE_BYTES = 16 << 20
_LINK = re.compile(r'<a\b[^>]*?\bhref\s*=\s*"([^"]*)"[^>]*>([^<]*)</a>', re.IGNORECASE)
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class WheelLink:
    """A wheel on an index."""

    url: str
    sha256: str | None


def find_wheel(package: str, version: str) -> WheelLink | None:
    """The wheel of a package for any system; None if the index can't be queried here.

    The index is $PIP_INDEX_URL or the usual one. What pip alone knows (its files of settings, credentials, other
    sources) is left to pip.
    """
    if any(os.environ.get(name) for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS", "PIP_CONFIG_FILE", "PIP_CERT")):
        return None
    index = os.environ.get("PIP_INDEX_URL") or _USUAL_INDEX
    page = f"{index.rstrip('/')}/{package}/"
    start = f"{package.replace('-', '_')}-{version}-"
    try:
        data, kind = read_url(page, _MAX_PAGE_BYTES, _ACCEPT)
        for name, address, sha256 in _list_files(data, kind, page):
            if name.startswith((start, f"{package}-{version}-")) and name.endswith("-none-any.whl"):
                return WheelLink(address, sha256) if address.startswith(("http://", "https://")) else None
    except LoadError:
        return None
    return None


def _list_files(data: bytes, kind: str, page: str) -> Iterator[tuple[str, str, str | None]]:
    """Name, address and sha256 of each file that a page lists."""
    if "json" in kind:
        files = parse_json_object(data, page).get("files")
        for file in files if isinstance(files, list) else []:
            if isinstance(file, dict) and isinstance(file.get("filename"), str) and isinstance(file.get("url"), str):
                hashes = file.get("hashes")
                found = hashes.get("sha256") if isinstance(hashes, dict) else None
                yield file["filename"], urljoin(page, file["url"]), _check_sha256(found)
        return
    for link, name in _LINK.findall(data.decode("utf-8", "replace")):
        address, fragment = urldefrag(urljoin(page, html.unescape(link)))
        yield html.unescape(name).strip(), address, _check_sha256(fragment.removeprefix("sha256="))


def _check_sha256(text: object) -> str | None:
    return text if isinstance(text, str) and _SHA256.fullmatch(text) else None

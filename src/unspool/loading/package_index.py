"""Finding a package's file on the Python registry: its address and its sha256, by the simple repository API."""

from __future__ import annotations

import html
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from urllib.parse import urldefrag, urljoin

from unspool.errors import LoadError
from unspool.loading.download import read_url
from unspool.small_files import parse_json_object

_USUAL_INDEX = "https://pypi.org/simple"
_ACCEPT = "application/vnd.pypi.simple.v1+json, text/html;q=0.1"
_MAX_PAGE_BYTES = 16 << 20
_LONGEST_LINK = 4096  # characters of a link in a page
_MOST_LINKS = 100_000
_LINK = re.compile(r"<a\s", re.IGNORECASE)
_ADDRESS = re.compile(r'\shref\s{0,9}=\s{0,9}"([^"]*)"', re.IGNORECASE)
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class PackageLink:
    """A wheel or a source archive on an index."""

    url: str
    sha256: str | None


def name_index() -> str:
    """The address of the index: $PIP_INDEX_URL, or the usual one."""
    return (os.environ.get("PIP_INDEX_URL") or _USUAL_INDEX).rstrip("/")


def find_link(package: str, version: str, *, is_source: bool = False) -> PackageLink | None:
    """The wheel of a package for any system, or its source archive; None if the index can't be queried here.

    What pip alone knows (its files of settings, credentials, other sources) is left to pip, which fetches wheels. A
    source archive is never given to pip, because pip runs code in it.
    """
    names = ("PIP_NO_INDEX",) if is_source else ("PIP_NO_INDEX", "PIP_FIND_LINKS", "PIP_CONFIG_FILE", "PIP_CERT")
    if any(os.environ.get(name) for name in names):
        return None
    page = f"{name_index()}/{package}/"
    starts = tuple(f"{name}-{version}" for name in {package.replace("-", "_"), package})
    try:
        data, kind = read_url(page, _MAX_PAGE_BYTES, _ACCEPT)
        for name, address, sha256 in _list_files(data, kind, page):
            if is_source:
                is_wanted = name in {f"{start}.tar.gz" for start in starts}
            else:
                is_wanted = name.startswith(tuple(f"{start}-" for start in starts)) and name.endswith("-none-any.whl")
            if is_wanted:
                return PackageLink(address, sha256) if address.startswith(("http://", "https://")) else None
    except (LoadError, ValueError):  # the second: an address that is none
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
    for link, name in _list_links(data.decode("utf-8", "replace")):
        address, fragment = urldefrag(urljoin(page, html.unescape(link)))
        yield html.unescape(name).strip(), address, _check_sha256(fragment.removeprefix("sha256="))


def _list_links(page: str) -> Iterator[tuple[str, str]]:
    """The address and the text of each link; a page is read once, whatever stands in it."""
    for start in islice(_LINK.finditer(page), _MOST_LINKS):
        end = page.find("<", start.end(), start.end() + _LONGEST_LINK)
        head, sign, name = page[start.end() - 1 : max(end, start.end())].partition(">")
        address = _ADDRESS.search(head)
        if sign and address is not None and page.startswith(("</a>", "</A>"), end):
            yield address[1], name


def _check_sha256(text: object) -> str | None:
    return text if isinstance(text, str) and _SHA256.fullmatch(text) else None

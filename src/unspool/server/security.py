"""Who may ask: keys, the Host header, and pages in browsers."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from unspool.errors import SettingError
from unspool.server.options import ServerOptions
from unspool.server.refusals import RequestError
from unspool.small_files import read_bytes

_OPEN: Final = ("/health", "/ready", "/")  # routes that need no key; the page asks for one itself
_LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")
_LEAST_KEY: Final = 8  # characters


class Keys:
    """The keys that may ask; compared in a time that does not depend on them."""

    def __init__(self, keys: Sequence[str]) -> None:
        for key in keys:
            if not _LEAST_KEY <= len(key) <= 512 or not key.isascii() or not key.isprintable() or " " in key:
                raise SettingError(f"an API key has {_LEAST_KEY} to 512 printable characters and no spaces")
        self._digests = [_digest(key) for key in dict.fromkeys(keys)]

    def __len__(self) -> int:
        return len(self._digests)

    def find(self, headers: Mapping[str, str]) -> int:
        """The number of the key that a request has, from 1; 0 where none is needed. Raises 401."""
        if not self._digests:
            return 0
        kind, _, given = headers.get("authorization", "").partition(" ")
        given = given.strip() if kind.lower() == "bearer" else headers.get("x-api-key", "")
        digest, found = _digest(given), 0
        for number, known in enumerate(self._digests, start=1):  # all of them, so that time says nothing
            found = number if hmac.compare_digest(digest, known) else found
        if not found:
            raise RequestError(401, "a valid API key is needed, as `Authorization: Bearer KEY`", code="invalid_api_key")
        return found

    def make_tenant(self, number: int, salt: str) -> str:
        """Whose prompts may share what was read: requests of one key, with one salt."""
        owner = self._digests[number - 1].hex()[:32] if number else ""
        return f"{owner}:{salt}"


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def read_key_file(path: Path | str) -> list[str]:
    """The keys of a file: one per line; empty lines and lines that begin with # are left out."""
    lines = read_bytes(Path(path), 1 << 20).decode("utf-8", "replace").splitlines()
    keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not keys:
        raise SettingError(f"{path} holds no API key; write one on a line of its own")
    return keys


def check_host(headers: Mapping[str, str], options: ServerOptions) -> None:
    """Raise for a Host header that is none of this server's names: a page could have had its name point here."""
    host = split_host(headers.get("host", ""))
    if options.hosts:
        if "*" in options.hosts or host in options.hosts or host in _LOOPBACK:
            return
    elif not options.is_loopback or host in _LOOPBACK or _is_address(host):
        return
    raise RequestError(
        403, "the Host header is not a name of this server; start it with --allowed-host NAME", code="host"
    )


def check_origin(headers: Mapping[str, str], options: ServerOptions) -> str | None:
    """The origin of a page that may call; None without one. Raises for others."""
    origin = headers.get("origin")
    if origin is None:
        return None
    if "*" in options.origins or origin in options.origins:
        return origin
    scheme, _, name = origin.partition("://")
    if scheme in ("http", "https") and name and name == headers.get("host"):
        return None  # a page of this server's own
    raise RequestError(
        403, "pages of this origin may not call this server; start it with --allow-origin", code="origin"
    )


def is_open(path: str) -> bool:
    """Whether a path needs no key: health, and the page with its files, which say nothing of this server."""
    return path in _OPEN or path.startswith("/studio/")


def split_host(host: str) -> str:
    """A Host header without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower()


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether an address to listen on is this machine's own alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False

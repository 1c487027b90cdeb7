"""Fetching pictures from hosts that were allowed by name."""

from __future__ import annotations

import http.client
from collections.abc import Collection
from urllib.parse import urlsplit

from unspool.errors import InputError, excerpt

_SECONDS = 10.0


def fetch_picture(address: str, hosts: Collection[str], most_bytes: int, name: str) -> bytes:
    """The bytes at an https address of an allowed host; redirects are not followed."""
    try:
        parts = urlsplit(address)
        host, port = (parts.hostname or "").lower(), parts.port
    except ValueError as error:
        raise InputError(f"{name} is {excerpt(address)}, which is no address: {error}") from error
    if host not in hosts or parts.scheme != "https" or parts.username is not None:
        raise InputError(
            f"{name} is at {excerpt(address)}, and nothing is fetched from there: give the picture itself (a data: "
            "URI, bytes, a path). Whoever runs the program can allow https hosts: UNSPOOL_PICTURE_HOSTS=name,name"
        )
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    connection = http.client.HTTPSConnection(host, port, timeout=_SECONDS)
    try:
        connection.request("GET", target, headers={"Accept": "image/*"})
        response = connection.getresponse()
        if response.status != 200:
            raise InputError(f"{name}: {excerpt(host)} answered {response.status} for {excerpt(target)}")
        content = response.read(most_bytes + 1)
    except (OSError, http.client.HTTPException, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{name} can't be fetched from {excerpt(host)}: {str(error)[:200]}") from error
    finally:
        connection.close()
    return content

"""What a web page in one file may do: run the scripts and styles that stand in it, and ask nobody for anything."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable


def build_policy(*, scripts: Iterable[str] = (), styles: Iterable[str] = (), images: str | None = None) -> str:
    """The page's Content-Security-Policy: scripts and styles are allowed by their hashes, images by their sources."""
    parts = (
        ("default-src", ["'none'"]),
        ("script-src", [_hash(one) for one in scripts]),
        ("style-src", [_hash(one) for one in styles]),
        ("img-src", [] if images is None else [images]),
        ("base-uri", ["'none'"]),
        ("form-action", ["'none'"]),
    )
    return "; ".join(f"{name} {' '.join(values)}" for name, values in parts if values)


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"

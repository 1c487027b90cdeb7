"""What the page may do: run its own scripts, ask its own server, and nothing else."""

from __future__ import annotations

from typing import Final

_POLICY: Final = (
    "default-src 'none'",
    "script-src 'self'",
    "style-src 'self'",
    "connect-src 'self'",
    "img-src 'self' data:",
    "base-uri 'none'",
    "form-action 'none'",
    "frame-ancestors 'none'",
    "require-trusted-types-for 'script'",  # text can't become markup, even by mistake
    "trusted-types 'none'",
)

PAGE_HEADERS: Final = {
    "content-security-policy": "; ".join(_POLICY),
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "cache-control": "no-cache",  # asked for again each time, and answered 304 while nothing has changed
}

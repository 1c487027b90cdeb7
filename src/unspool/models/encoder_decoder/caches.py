"""The caches that an encoder-decoder reads."""

from __future__ import annotations

from unspool.cache import Cache, EncoderDecoderCache
from unspool.errors import UnsupportedError


def check_pair(cache: Cache) -> EncoderDecoderCache:
    """The cache, if it is an encoder-decoder's."""
    if not isinstance(cache, EncoderDecoderCache):
        raise UnsupportedError(
            f"an encoder-decoder can't decode with a {type(cache).__name__}; use the EncoderDecoderCache of new_cache()"
        )
    return cache

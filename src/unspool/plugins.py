"""What a plug-in is made of: an entry for each kind of part, and what parts are given. docs/plugins.md shows each."""

from __future__ import annotations

from unspool.lazy import find_lazily

HOMES = {
    "CacheKindEntry": "unspool.cache.kinds",
    "DecoderFamily": "unspool.models.families.base",
    "FamilyEntry": "unspool.models.families.entry",
    "Parameter": "unspool.config.parameter",
    "ProcessorEntry": "unspool.logits.entry",
    "StopEntry": "unspool.stopping.entry",
    "make_count": "unspool.config.parameter",
    "make_flag": "unspool.config.parameter",
    "make_number": "unspool.config.parameter",
    "make_other": "unspool.config.parameter",
    "make_token": "unspool.config.parameter",
    "register": "unspool.registry",
    "unregister": "unspool.registry",
}
"""Where each name is; `plugins.pyi` says the same to type checkers (`python tools/make_stubs.py`)."""

__all__ = sorted(HOMES)
__getattr__ = find_lazily(__name__, HOMES)

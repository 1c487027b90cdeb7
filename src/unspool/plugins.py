"""What a plug-in is made of: an entry for each kind of part, and what parts are given. docs/plugins.md shows each."""

from __future__ import annotations

from unspool.lazy import find_lazily

HOMES = {
    "CacheKindEntry": "unspool.cache.entry",
    "CallFormat": "unspool.grammar.call_forms",
    "DecoderFamily": "unspool.models.families.base",
    "Draft": "unspool.decoding.speculative.drafters.base",
    "Drafter": "unspool.decoding.speculative.drafters.base",
    "DrafterContext": "unspool.decoding.speculative.making",
    "DrafterEntry": "unspool.plan.drafters",
    "FamilyEntry": "unspool.models.families.entry",
    "Parameter": "unspool.config.parameter",
    "ParameterFormat": "unspool.grammar.call_forms",
    "ProcessorEntry": "unspool.logits.entry",
    "Rows": "unspool.decoding.rows",
    "StopContext": "unspool.stopping.entry",
    "StopEntry": "unspool.stopping.entry",
    "StrategyContext": "unspool.decoding.strategies.token_strategy",
    "StrategyEntry": "unspool.plan.strategies",
    "ThoughtEntry": "unspool.thoughts.entry",
    "TokenStrategy": "unspool.decoding.strategies.token_strategy",
    "ToolFormatEntry": "unspool.grammar.tool_kinds",
    "fixed": "unspool.models.families.base",
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

"""`cache_implementation="pruned"`: prompts of which keys are let go before the first token is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from unspool.api.prefix import Prefix, read_prefix
from unspool.api.pruning import Pruning
from unspool.api.speaker import Speaker
from unspool.cache import Cache
from unspool.errors import InputError, SettingError, excerpt

PRUNED: Final = "pruned"
_OPTIONS: Final = ("ratio", "rule", "window", "seed")


def take_pruning(settings: dict[str, Any]) -> Pruning | None:
    """What a call's settings say of keys that are let go, taken out of them; None if nothing."""
    if settings.get("cache_implementation") != PRUNED:
        return None
    if settings.get("past_key_values") is not None or settings.get("prefix") is not None:
        raise SettingError(
            "cache_implementation='pruned' lets keys go of a prompt that this call reads, and its beginning was read "
            "before; use prefix.compress(), and leave it out"
        )
    del settings["cache_implementation"]
    return read_pruning(settings.pop("cache_config", None))


def read_pruning(config: Any) -> Pruning:
    """The options in a `cache_config`."""
    given = {} if config is None else config
    if not isinstance(given, Mapping) or set(given) - set(_OPTIONS):
        raise SettingError(f"`cache_config` of a 'pruned' cache takes {', '.join(_OPTIONS)}; got {excerpt(config)}")
    return Pruning(**{"ratio": 0.5, **given})


def read_pruned(lm: Speaker, rows: Sequence[Sequence[int]], asked: Pruning) -> tuple[list[list[int]], Cache]:
    """Prompts with a token for each key that was kept, and the cache of all. Every row's last token is still unread."""
    prefixes = [_read_row(lm, list(row), asked) for row in rows]
    cache = prefixes[0].cache
    for other in prefixes[1:]:
        cache.join(other.cache)
    made = [[*prefix.token_ids, row[-1]] for prefix, row in zip(prefixes, rows, strict=True)]
    return made, cache


def _read_row(lm: Speaker, row: list[int], asked: Pruning) -> Prefix:
    if len(row) < 2:
        raise InputError("a prompt of one token has no keys to let go; leave cache_implementation='pruned' out")
    prefix = read_prefix(lm, row[:-1], chat=False, tools=None, settings={})
    return prefix.compress(asked.ratio, asked.rule, window=asked.window, seed=asked.seed)

"""Adding parts from outside: by a call, or by a package's entry point, which is loaded when a table is first read."""

from __future__ import annotations

import os
import sys
import warnings
from importlib.metadata import EntryPoint, entry_points
from threading import RLock
from typing import Any, Final

from unspool.errors import PluginError
from unspool.forks import make_lock
from unspool.registry.references import resolve

GROUP: Final = "unspool.plugins"
SWITCH: Final = "UNSPOOL_PLUGINS"  # "off" leaves all packages' parts out

_lock = make_lock(sys.modules[__name__], "_lock", RLock)
_is_loaded = False


def register(*entries: Any) -> None:
    """Add parts to unspool: entries of `unspool.plugins`. If one of them can't be added, none is."""
    added: list[Any] = []
    with _lock:
        try:
            for entry in entries:
                _find_table(entry).add(entry)
                added.append(entry)
        except BaseException:
            unregister(*reversed(added))
            raise


def unregister(*entries: Any) -> None:
    """Take back parts that were registered."""
    with _lock:
        for entry in entries:
            _find_table(entry).remove(entry)


def load_plugins() -> None:
    """Register what installed packages offer in the entry point group `unspool.plugins`, once.

    A package that fails is left out with a warning, so that it does not keep everything else from working.
    """
    global _is_loaded
    with _lock:
        if _is_loaded:
            return
        _is_loaded = True  # before they run, because they read tables themselves
        if os.environ.get(SWITCH, "").strip().lower() in ("off", "0", "false", "no"):
            return
        for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
            _load(point)


def _load(point: EntryPoint) -> None:
    try:
        offered = point.load()
        entries = offered() if callable(offered) else offered
        register(*(entries if isinstance(entries, (list, tuple)) else (entries,)))
    except Exception as error:  # whatever a foreign package raises
        package = "" if point.dist is None else f" of {point.dist.name} {point.dist.version}"
        warnings.warn(
            f"the unspool plug-in {point.name!r}{package} was left out: {type(error).__name__}: {error} "
            f"(mend or uninstall it, or set {SWITCH}=off to load none)",
            RuntimeWarning,
            stacklevel=2,
        )


def _find_table(entry: Any) -> Any:
    table = getattr(type(entry), "table", None)
    if not isinstance(table, str):
        raise PluginError(
            f"unspool.register takes entries of unspool.plugins (ProcessorEntry, StopEntry, …), not a "
            f"{type(entry).__name__}"
        )
    return resolve(table)

"""When a row stops. The stops that settings switch on are listed in `order`."""

from __future__ import annotations

from unspool.lazy import find_lazily
from unspool.registry import find_home, find_name
from unspool.stopping.order import STOPS

PUBLIC = {
    **{find_name(entry.stop): find_home(entry.stop) for entry in STOPS.built_in},
    "StoppingCriteria": "unspool.stopping.base",
    "StoppingCriteriaList": "unspool.stopping.lists",
}
HOMES = {
    **PUBLIC,
    "as_criteria_list": "unspool.stopping.lists",
    "as_row_flags": "unspool.stopping.lists",
    "validate_stopping_criteria": "unspool.stopping.lists",
}
"""Where each name is; `__init__.pyi` says the same to type checkers (`python tools/make_stubs.py`)."""

__all__ = sorted(HOMES)
__getattr__ = find_lazily(__name__, HOMES)

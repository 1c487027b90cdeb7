"""One cache of every kind."""

from __future__ import annotations

import pytest
from tests.cache.plain_cache import IN_ORDER, KINDS

from unspool.cache import Cache


@pytest.fixture(params=KINDS)
def cache(request: pytest.FixtureRequest) -> Cache:
    return KINDS[request.param]()


@pytest.fixture(params=IN_ORDER)
def in_order(request: pytest.FixtureRequest) -> Cache:
    return IN_ORDER[request.param]()

"""A short share of the server's fuzz, and schemathesis over our own page."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings

from tests.server.fuzz import ALLOWED, run, start_server
from tests.server.running import RunningServer
from unspool.server.openapi import describe_routes

QUICK = settings(max_examples=4, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))


def test_random_requests_are_answered_or_refused() -> None:
    counts = run(150)
    assert counts[200] > 10 and counts[400] > 10


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with start_server() as running:
        yield running
        running.wait_until_idle()


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/apply-template", "/v1/systemone", "/api/show"])
def test_our_page_describes_what_is_there(server: RunningServer, path: str) -> None:
    schema = schemathesis.openapi.from_dict(describe_routes())
    operation = schema[path]["POST"]
    with httpx.Client(base_url=server.address, timeout=60) as client:

        @QUICK
        @given(case=operation.as_strategy())
        def attack(case: schemathesis.Case) -> None:
            answer = client.post(path, json=case.body)
            assert answer.status_code in ALLOWED, (case.body, answer.text)

        attack()


def test_every_page_is_there(server: RunningServer) -> None:
    paths = describe_routes()["paths"]
    for path, methods in paths.items():
        answer = server.get(path) if "get" in methods else server.post(path, {})
        assert answer.status_code in (200, 400), (path, answer.text)

"""One small cluster on this machine for all tests that need one."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import cli, tiny  # noqa: F401 - fixtures

ROOT = Path(__file__).parents[2]
STORE = 100 << 20  # bytes of a node's objects


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """A cluster of one node, to which a test may add others; this process is connected to it."""
    pytest.importorskip("ray", reason="ray is not installed: pip install 'unspool[ray]'")
    before = dict(os.environ)
    os.environ |= {
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",  # workers import the models of these tests
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
        "OMP_NUM_THREADS": "1",
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ray's own
        import ray
        from ray.cluster_utils import Cluster

        node = {"num_cpus": 4, "object_store_memory": STORE, "include_dashboard": False}
        try:
            made = Cluster(initialize_head=True, head_node_args=node)
        except Exception:  # its own processes wait 30 s for each other, which a busy machine may need longer for
            made = Cluster(initialize_head=True, head_node_args=node)
        ray.init(address=made.address, log_to_driver=False, logging_level="ERROR")
        yield made
        ray.shutdown()
        made.shutdown()
    os.environ.clear()
    os.environ.update(before)

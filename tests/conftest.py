"""What all tests share."""

from __future__ import annotations

import gc
import os
import random
import signal
import ssl
import zlib
from contextlib import suppress
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch


def pytest_configure() -> None:
    """Two threads in all: for one process, or shared out by those that pytest-xdist starts.

    Said before tests are collected, for the CPU library asks once, when it is first looked for.
    """
    num_threads = max(1, 2 // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
    torch.set_num_threads(num_threads)
    os.environ.setdefault("OMP_NUM_THREADS", str(num_threads))  # for the processes that tests start
    with suppress(ImportError):  # GPU tests need nothing but pytest
        from hypothesis import settings

        settings.register_profile("busy", deadline=None)  # the machine may do other things
        settings.load_profile("busy")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what runs in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)  # tests of Ctrl-C, and what they start, must see it
    ssl.create_default_context = cache(ssl.create_default_context)  # httpx's clients would each read all certificates


def pytest_collection_finish() -> None:
    """What was collected stays to the end: garbage collections need not look through it again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def numbers_drawn_alike(request: pytest.FixtureRequest) -> None:
    """What a test draws without a seed of its own is the same in every run, whatever ran before it."""
    seed = zlib.crc32(request.node.nodeid.encode())
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@pytest.fixture(scope="session")
def default_model_file() -> Path:
    """The GGUF file of the default model."""
    from unspool.loading.catalogue import find_model

    path = find_model("smollm2-135m")
    assert path is not None, "run `unspool pull smollm2-135m` (make test does)"
    return path

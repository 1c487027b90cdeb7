"""Triton is imported beside the reading of weights, by one thread alone."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from unspool.models.paths import captured_ahead

FILES = {
    "__init__.py": "import time\ntime.sleep(0.05)\nfrom . import runtime\nfrom . import backends\n",
    "runtime/__init__.py": "import time\ntime.sleep(0.05)\nfrom . import cache\n",
    "runtime/cache.py": "import time\ntime.sleep(0.05)\ndef triton_key():\n    return 'key'\n",
    "backends/__init__.py": "import time\ntime.sleep(0.05)\nfrom . import compiler, driver\n",
    "backends/compiler.py": "",
    "backends/driver.py": "",
}


@pytest.fixture
def triton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package whose parts import each other as Triton's do, slowly."""
    for name, text in FILES.items():
        path = tmp_path / "triton" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "triton"}
    for name in before:
        del sys.modules[name]
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(captured_ahead, "has_triton", lambda: True)
    monkeypatch.setattr(captured_ahead, "has_cached_kernels", lambda: True)
    monkeypatch.setattr(captured_ahead, "_importing", [])
    monkeypatch.setattr(captured_ahead, "_is_imported", threading.Event())
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "triton"]:
        del sys.modules[name]
    sys.modules.update(before)


@pytest.mark.usefixtures("triton")
def test_no_part_is_imported_before_the_whole() -> None:
    captured_ahead.start_triton(torch.device("cuda"))
    captured_ahead.await_triton()
    cache = importlib.import_module("triton.runtime.cache")
    for thread in captured_ahead._importing:
        thread.join(10)
        assert not thread.is_alive()
    whole = sys.modules["triton"]
    assert whole.runtime.cache is cache
    assert whole.backends is sys.modules["triton.backends"]
    assert whole.backends.compiler is sys.modules["triton.backends.compiler"]


def test_nobody_waits_where_nothing_was_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured_ahead, "_importing", [])
    monkeypatch.setattr(captured_ahead, "_is_imported", threading.Event())
    captured_ahead.start_triton(torch.device("cpu"))
    captured_ahead.await_triton()
    assert not captured_ahead._importing

"""`unspool studio`: a server on a free port, its page, and the browser."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from typing import Any

import httpx
import pytest

from unspool.cli import studio
from unspool.cli.main import main


def test_it_serves_until_it_is_ended(tiny: str) -> None:
    program = [sys.executable, "-m", "unspool", "studio", f"small={tiny}", "--no-browser", "--memory", "64M"]
    with subprocess.Popen(program, stderr=subprocess.PIPE, text=True) as running:
        assert running.stderr is not None
        found = re.fullmatch(
            r"the studio is at (http://127\.0\.0\.1:\d+)/ \(Ctrl-C ends it\)\n", running.stderr.readline()
        )
        assert found
        page = httpx.get(found[1])
        assert page.status_code == 200 and "unspool studio" in page.text
        assert httpx.get(f"{found[1]}/v1/models").json()["data"][0]["id"] == "small"
        running.send_signal(signal.SIGINT)
        assert running.wait(60) == 0


def test_it_opens_the_browser_once_it_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    opened, was_opened, served = [], threading.Event(), {}
    monkeypatch.setattr("webbrowser.open", lambda address: (opened.append(address), was_opened.set()))

    def serve(models: Any, **options: Any) -> None:
        served.update(options, models=models)
        options["on_ready"]("http://127.0.0.1:1")

    monkeypatch.setattr("unspool.server.serving.serve", serve)
    assert main(["studio", "a.gguf", "--threads", "1"]) == 0
    assert was_opened.wait(10) and opened == ["http://127.0.0.1:1/"]
    assert served["models"] == ["a.gguf"] and served["port"] == 0 and served["threads"] == 1
    assert "host" not in served  # this machine alone
    opened.clear()
    studio.show_page("http://127.0.0.1:1", opens=False)
    assert opened == []

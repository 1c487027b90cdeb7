"""`unspool serve --ray`, from the command to its end by a signal."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("cluster")]
PORT = 18724


def test_the_command_serves_until_a_signal(cli: Callable[..., Any], tiny: str) -> None:
    found: list[Any] = []

    def ask() -> None:
        until = time.monotonic() + 240
        while time.monotonic() < until and not found:
            try:
                body = {"prompt": "abc", "max_tokens": 5, "ignore_eos": True}
                answer = httpx.post(f"http://127.0.0.1:{PORT}/v1/completions", json=body, timeout=60)
                if answer.status_code == 200:
                    found.append(answer.json())
            except httpx.HTTPError:
                pass
            time.sleep(0.5)
        time.sleep(2)  # the command says that it is ready
        os.kill(os.getpid(), signal.SIGTERM)

    asking = threading.Thread(target=ask)
    asking.start()
    ended = cli("serve", tiny, "--ray", "--replicas", "1:2", "--port", str(PORT), "--drain-seconds", "2")
    asking.join()
    from ray import serve

    serve.shutdown()
    assert ended.code == 0 and f"http://127.0.0.1:{PORT}" in ended.err, ended.err
    assert found and found[0]["usage"]["completion_tokens"] == 5


def test_options_of_a_cluster_need_it(cli: Callable[..., Any], tiny: str) -> None:
    for words in (("--replicas", "2"), ("--route", "session"), ("--replica-gpus", "0.5")):
        ended = cli("serve", tiny, *words)
        assert ended.code == 2 and "use it with --ray" in ended.err
    for words in (("--replicas", "two"), ("--on-demand",), ("--ready-file", "x"), ("--route", "magic")):
        ended = cli("serve", tiny, "--ray", *words)
        assert ended.code == 2, (words, ended.err)

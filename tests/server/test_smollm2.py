"""The default model behind a real server: the README's example, the strategies, and long contexts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

import unspool
from tests.server.running import RunningServer


@pytest.fixture(scope="module")
def server(default_model_file: Path) -> Iterator[RunningServer]:
    lm = unspool.load(default_model_file)
    with RunningServer({"smollm2-135m": lm}, max_rows=8, memory=400 << 20, block_size=64) as running:
        yield running
        running.wait_until_idle()


@pytest.mark.parametrize("asked", [{}, {"num_beams": 4}, {"penalty_alpha": 0.6, "top_k": 4}, {"dola_layers": "high"}])
def test_the_example_of_the_readme(server: RunningServer, asked: dict[str, Any]) -> None:
    lm = server.state.models.find(None).lm
    assert lm is not None
    messages: Any = [{"role": "user", "content": "What is the capital of Japan?"}]
    expected = lm.generate(messages, max_new_tokens=8, **asked)
    with openai.OpenAI(base_url=f"{server.address}/v1", api_key="none") as client:
        extra = asked or {"temperature": 0}
        answer = client.chat.completions.create(model="smollm2-135m", messages=messages, max_tokens=8, extra_body=extra)
        assert answer.choices[0].message.content == expected.text
        assert answer.usage is not None and answer.usage.prompt_tokens == len(expected.prompt_token_ids[0])


def test_a_prompt_past_the_context(server: RunningServer) -> None:
    answer = server.chat("word " * 9000)
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"
    assert answer.json()["error"]["param"] == "messages"
    answer = server.chat("word " * 8000, max_tokens=1000)
    assert answer.status_code == 400 and "at most" in answer.json()["error"]["message"]
    for path, field in (("/v1/completions", "prompt"), ("/v1/responses", "input")):
        answer = httpx.post(server.address + path, json={"model": "smollm2-135m", field: "word " * 9000})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == field


def test_a_prompt_far_past_the_context_is_refused_by_its_length(server: RunningServer) -> None:
    """Though there are no tokens for some control characters, which stand for nothing."""
    told = "which are at least"
    assert told in server.chat("word " * 700_000).json()["error"]["message"]
    assert told not in server.chat("\x04" * 700_000).text

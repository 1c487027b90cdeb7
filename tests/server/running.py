"""Real servers in threads, over fake models and real ones."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import httpx
import torch

from tests.engine.fakes import BLOCK_BYTES, Fake, FakeWithLayers, make_lm
from tests.fakes import make_tokenizer
from unspool.api import LanguageModel
from unspool.server.app import make_app
from unspool.server.serving import listen, make_server, make_state, run_server
from unspool.server.state import ServerState

# What the tests ask.
HELLO: Any = [{"role": "user", "content": "hello world"}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"enum": ["rome", "oslo"]}},
            "required": ["place"],
            "additionalProperties": False,
        },
    },
}

# In the manner of Qwen and Hermes.
TOOL_TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{% for call in message.tool_calls or [] %}<call>"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</call>{% endfor %}'
    "</s>\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


class Slow(Fake):
    """A model that takes its time."""

    seconds = 0.01

    def forward(self, *args: Any, **named: Any) -> Any:
        time.sleep(self.seconds)
        return super().forward(*args, **named)


class Broken(Fake):
    """A model that ends the engine's thread when it is asked to, and goes on after."""

    breaks = False

    def forward(self, *args: Any, **named: Any) -> Any:
        if type(self).breaks:
            type(self).breaks = False
            raise KeyboardInterrupt("a fault that no request can be blamed for")
        return super().forward(*args, **named)


class Reciting(Fake):
    """A model that says one text over and over, by the position alone."""

    def __init__(self, ids: Sequence[int]) -> None:
        super().__init__(vocab=160, max_context=2048)
        self._ids = torch.tensor(ids)

    def _attend(self, values: torch.Tensor, cache: Any, counts: Sequence[int] | None) -> Any:
        _, weight, spans = super()._attend(values, cache, counts)
        said = self._ids[weight.argmax(-1) % len(self._ids)]  # (rows, new): a token's own weight is the largest
        return torch.nn.functional.one_hot(said, self.info.vocab_size) * 50.0, weight, spans


def make_fake_lm(model: Any = None, *, has_tools: bool = False) -> LanguageModel:
    """A fake model of 160 tokens whose texts are letters."""
    torch.manual_seed(0)
    lm = make_lm(Fake(vocab=160, max_context=2048) if model is None else model, has_tokenizer=True)
    lm.generation_config.eos_token_id = 2
    if has_tools:
        lm.tokenizer = make_tokenizer()
        lm.tokenizer.chat_template = TOOL_TEMPLATE
    return lm


def make_layered_lm() -> LanguageModel:
    """The same, for methods that read layers."""
    return make_lm(FakeWithLayers(vocab=160, max_context=2048), has_tokenizer=True)


class RunningServer:
    """A server in a thread of this process; `with` starts and stops it."""

    def __init__(self, models: Any, *, has_engine: bool = True, parser: Any = None, **options: Any) -> None:
        engine = {"memory": BLOCK_BYTES * 4000, "block_size": 16} if has_engine else {}
        self.state: ServerState = make_state(models, {**engine, "log": "none", **options})
        self.address, self.parser = "", parser
        self._listening = listen("127.0.0.1", 0)
        self._ready = threading.Event()
        self.server = make_server(
            make_app(self.state), self.state, self._listening, None, self._note_ready, parser=parser
        )
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _note_ready(self, address: str) -> None:
        self.address = address
        self._ready.set()

    def _run(self) -> None:
        run_server(self.server, self._listening)

    def __enter__(self) -> RunningServer:
        self.state.models.open_all()
        self._thread.start()
        assert self._ready.wait(120)
        return self

    def __exit__(self, *_: object) -> None:
        self.server.should_exit = True
        self._thread.join(120)
        self._listening.close()
        self.state.models.close()
        assert not self._thread.is_alive()

    def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        """Send a JSON body."""
        return httpx.post(f"{self.address}{path}", json=body, timeout=60, **more)

    def get(self, path: str, **more: Any) -> httpx.Response:
        """Ask for a page."""
        return httpx.get(f"{self.address}{path}", timeout=60, **more)

    def chat(self, text: str = "hello", **fields: Any) -> httpx.Response:
        """Send a chat of one message."""
        return self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **fields})

    def wait_until_idle(self, seconds: float = 10.0) -> None:
        """Wait until nothing is at work, and check that no block is held."""
        until = time.monotonic() + seconds
        engines = [one.engine for one in self.state.models.all if one.engine is not None]
        while time.monotonic() < until:
            stats = [engine.stats for engine in engines]
            idle = all(not (one.requests_running or one.requests_waiting or one.blocks_used) for one in stats)
            if idle and not self.state.gate.num_active:
                return
            time.sleep(0.01)
        raise AssertionError(f"still at work: {stats}, {self.state.gate.num_active} requests")

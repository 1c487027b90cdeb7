"""A model and the work that the engine's benchmark gives it, timed."""

from __future__ import annotations

import argparse
import gc
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_step import build_native, make_config, make_weights  # benchmarks/gpu_step.py

import unspool
from unspool.api import LanguageModel
from unspool.loading.model import LoadedParts

COMMON = {"eos_token_id": None, "pad_token_id": 0}
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


class Setting:
    """A model, and how large the work is."""

    def __init__(self, lm: LanguageModel, options: argparse.Namespace, name: str) -> None:
        self.lm, self.name, self.options = lm, name, options
        self.device, self._num_renewals = lm.device, 0
        self.clock = time.process_time if options.processor_time else time.perf_counter
        order = random.Random(0)
        self.vocab = min(lm.model.info.vocab_size, 100_000)
        self.prompts = [
            self.make_prompt(order, order.randint(*options.prompt_tokens)) for _ in range(options.num_requests)
        ]
        self.mixed = [
            {
                "max_new_tokens": order.randint(*options.mixed_tokens),
                "do_sample": True,
                "temperature": round(order.uniform(0.5, 1.5), 3),
                "top_p": round(order.uniform(0.7, 0.99), 3),
                "repetition_penalty": round(order.uniform(1.01, 1.3), 3),
                "seed": order.randrange(1 << 30),
            }
            for _ in self.prompts
        ]

    def make_prompt(self, order: random.Random, length: int) -> list[int]:
        return [order.randrange(3, self.vocab) for _ in range(length)]

    def renew(self) -> None:
        """Let every prompt begin with another token: no engine finds what it has read before."""
        self._num_renewals += 1
        for prompt in self.prompts:
            prompt[0] = 3 + self._num_renewals % (self.vocab - 3)

    def make_engine(self, lm: LanguageModel | None = None, **more: Any) -> unspool.Engine:
        options = self.options
        longest = options.prompt_tokens[1] + max(options.num_new, options.mixed_tokens[1]) + 64
        per_position = self.lm.model.key_shape
        size = 2 * per_position.num_layers * per_position.num_kv_heads * per_position.head_dim
        memory = size * per_position.dtype.itemsize * longest * options.max_rows
        given = {"max_rows": options.max_rows, "memory": memory, "tokens_per_pass": options.tokens_per_pass}
        return unspool.Engine(lm or self.lm, **{**given, **more})

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def time(self, function: Callable[[], Any]) -> float:
        """Seconds of the fastest of several calls, after one that warms up."""
        seconds = []
        for _ in range(self.options.rounds + 1):
            gc.collect()
            self.renew()
            self.synchronize()
            started = self.clock()
            function()
            self.synchronize()
            seconds.append(self.clock() - started)
        return min(seconds[1:])


def run_all(engine: unspool.Engine, prompts: list[list[int]], asked: list[dict[str, Any]]) -> None:
    requests = [engine.submit(prompt, **one) for prompt, one in zip(prompts, asked, strict=False)]
    for request in requests:
        request.result()


def run_static(setting: Setting, size: int, asked: dict[str, Any]) -> None:
    for first in range(0, len(setting.prompts), size):
        setting.lm.generate(setting.prompts[first : first + size], **asked)


def free(setting: Setting) -> None:
    gc.collect()
    if setting.device.type == "cuda":
        torch.cuda.empty_cache()


def make_settings(options: argparse.Namespace) -> list[tuple[Setting, Any]]:
    if options.model is not None:
        lm = unspool.load(options.model, device=options.device)
        return [(Setting(lm, options, options.model), None)]
    settings = []
    for shape in options.shapes:
        config = {**make_config("1B"), **TINY, "vocab_size": 1000} if shape == "tiny" else make_config(shape)
        if shape == "tiny":
            config["num_key_value_heads"] = 2
        dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
        weights = make_weights(config, options.device, dtype)
        model = build_native(config, weights, options.device, dtype)
        lm = LanguageModel(LoadedParts(shape, Path(), model, None, unspool.GenerationConfig()))
        settings.append((Setting(lm, options, shape), (config, weights)))
    return settings

"""Requests of one kind in an engine beside one `generate` call with the same settings, and what readers cost: part of
benchmarks/engine.py.

- kinds: requests of each kind at once, then the same in one call: tokens per second of the last round (warm), and how
  much of the call's rate the engine has
- late: what a stop string, log-probabilities and a green list leave of greedy's rate in a fuller engine, what a stop
  string leaves of it in one call, and its cost late in a text beside early
- crowd: 48 requests of six kinds in one engine, beside the same kinds as static batches, one after the other
- readers: tokens per second to as many callers as there are rows, who wait for results, or read token by token in
  threads or in tasks of one event loop
- rush: requests that arrive 60 times a second (Poisson): the median time of a whole one, whose caller waits for its
  result, or reads token by token in a thread
"""

from __future__ import annotations

import asyncio
import gc
import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from engine_setting import COMMON, Setting, free  # benchmarks/engine_setting.py
from gpu_step import build_native, make_config, make_weights  # benchmarks/gpu_step.py

import unspool
from unspool.api import LanguageModel
from unspool.loading.model import LoadedParts
from unspool.text import Tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 40, "maxLength": 400},
        "tags": {"type": "array", "items": {"type": "string"}, "minItems": 4, "maxItems": 12},
        "counts": {"type": "array", "items": {"type": "integer"}, "minItems": 4, "maxItems": 12},
    },
    "required": ["name", "tags", "counts"],
    "additionalProperties": False,
}
DRAWN: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "top_k": 50, "seed": 1}
NEVER = " this never comes, for nobody writes it "
SYNTHID = {"ngram_len": 5, "keys": [654, 400, 836, 123, 340, 443, 597, 160, 57]}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": DRAWN,
    "sampling, processors": {**DRAWN, "repetition_penalty": 1.2, "no_repeat_ngram_size": 4, "min_p": 0.02},
    "stop string": {"stop_strings": [NEVER]},
    "logprobs=5": {"logprobs": 5},
    "green list": {**DRAWN, "watermarking_config": {"bias": 2.0}},
    "SynthID": {**DRAWN, "watermarking_config": SYNTHID},
    "schema": {**DRAWN, "json_schema": SCHEMA, "eos_token_id": 2},
    "schema, drafter=False": {**DRAWN, "json_schema": SCHEMA, "eos_token_id": 2, "drafter": False},
    "4 beams": {"num_beams": 4},
    "lookup": {"prompt_lookup_num_tokens": 4},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 4},
    "DoLa": {"dola_layers": "high"},
    "guidance": {"guidance_scale": 1.5},
    "draft model": {},
}
SHORT = ("4 beams", "lookup", "contrastive", "DoLa", "guidance", "draft model")  # 64 new tokens
CROWD = ("greedy", "sampling", "stop string", "logprobs=5", "4 beams", "lookup")
_PATIENCE = 8.0  # seconds: after a longer round there is no other


def with_tokenizer(lm: LanguageModel) -> LanguageModel:
    """The same model with a byte-level vocabulary of made-up words, if it came without one."""
    if lm.tokenizer is not None:
        return lm
    parts = LoadedParts(lm.name, Path(), lm.model, make_tokenizer(lm.model.info.vocab_size), unspool.GenerationConfig())
    return LanguageModel(parts)


def make_tokenizer(size: int) -> Tokenizer:
    """A tokenizer of so many tokens: every byte, and words that nothing is merged to."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in plain]
    letters = [*map(chr, plain), *(chr(256 + place) for place in range(len(hidden)))]
    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2}
    for letter in letters:
        vocab.setdefault(letter, len(vocab))
    order = random.Random(3)
    while len(vocab) < size:
        word = "".join(order.choices("abcdefghijklmnopqrstuvwxyz", k=order.randint(2, 9)))
        vocab.setdefault(("\u0120" if order.random() < 0.6 else "") + word, len(vocab))
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    return Tokenizer(backend, special_tokens={"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"})


def make_drafter(setting: Setting) -> LanguageModel:
    """A model of two narrow layers over the same vocabulary."""
    vocab, (dtype, device) = setting.lm.model.info.vocab_size, (setting.lm.model.dtype, setting.device)
    config = make_config("1B") | {"num_hidden_layers": 2, "hidden_size": 512, "intermediate_size": 1024}
    config |= {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": vocab}
    model = build_native(config, make_weights(config, str(device), dtype), str(device), dtype)
    return LanguageModel(LoadedParts("drafter", Path(), model, None, unspool.GenerationConfig()))


class Timer:
    """Runs ways to write tokens, and says how many a second they wrote."""

    def __init__(self, setting: Setting, prompts: Sequence[list[int]]) -> None:
        self._setting, self._prompts, self._number = setting, prompts, 0

    def rate(self, way: Callable[[], int]) -> float:
        """Tokens per second in the last round."""
        rounds, found = 1 + self._setting.options.rounds, 0.0
        for _ in range(rounds):
            gc.collect()
            self._number += 1
            for prompt in self._prompts:
                prompt[0] = 3 + self._number % (self._setting.vocab - 3)  # nothing is found that was read before
            self._setting.synchronize()
            started = time.perf_counter()
            count = way()
            seconds = time.perf_counter() - started
            found = count / seconds
            if seconds > _PATIENCE:
                break
        return found


def count_tokens(results: Sequence[Any]) -> int:
    return sum(len(row) for result in results for row in result.token_ids)


def run_engine(engine: unspool.Engine, prompts: Sequence[list[int]], asked: dict[str, Any]) -> int:
    requests = [engine.submit(prompt, **asked) for prompt in prompts]
    return count_tokens([request.result() for request in requests])


def make_prompts(setting: Setting, count: int, lengths: tuple[int, int], seed: int = 5) -> list[list[int]]:
    order = random.Random(seed)
    return [setting.make_prompt(order, order.randint(*lengths)) for _ in range(count)]


def make_asked(setting: Setting, num_new: int) -> dict[str, dict[str, Any]]:
    asked = {
        name: {**COMMON, **kind, "max_new_tokens": min(64, num_new) if name in SHORT else num_new}
        for name, kind in KINDS.items()
    }
    asked["draft model"]["assistant_model"] = make_drafter(setting)
    return asked


def measure_kinds(setting: Setting) -> dict[str, float]:
    lm, results = with_tokenizer(setting.lm), {}
    prompts = make_prompts(setting, 32, (64, 256))
    timer = Timer(setting, prompts)
    asked = make_asked(setting, 128)
    with setting.make_engine(share_prefixes=False, lm=lm) as engine:
        for name, one in asked.items():
            some = prompts[: 16 if name == "contrastive" else len(prompts)]
            try:
                call = timer.rate(lambda one=one, some=some: count_tokens([lm.generate(some, **one)]))
                many = timer.rate(lambda one=one, some=some: run_engine(engine, some, one))
            except unspool.errors.UnspoolError as error:
                print(f"{name}: {error}", flush=True)
                continue
            results |= {f"{name}, one call": call, f"{name}, engine": many, f"{name}, engine of call": many / call}
            print(f"{name:>24}  one call {call:>9,.0f}  engine {many:>9,.0f}  {many / call:.2f}", flush=True)
    free(setting)
    return results


def measure_late(setting: Setting) -> dict[str, float]:
    lm, results = with_tokenizer(setting.lm), {}
    kinds = {name: {**KINDS[name], **COMMON} for name in ("greedy", "stop string", "logprobs=5", "green list")}
    prompts = make_prompts(setting, 128, (64, 256))
    timer = Timer(setting, prompts)
    with setting.make_engine(share_prefixes=False, lm=lm) as engine:
        rates = {
            name: timer.rate(lambda one=one: run_engine(engine, prompts, {**one, "max_new_tokens": 256}))
            for name, one in kinds.items()
        }
    for name, rate in rates.items():
        results[f"128 x 256, {name}"] = rate
        results[f"128 x 256, {name}, of greedy"] = rate / rates["greedy"]
    some = prompts[:32]
    calls = {
        name: timer.rate(lambda one=kinds[name]: count_tokens([lm.generate(some, **one, max_new_tokens=512)]))
        for name in ("greedy", "stop string")
    }
    results["one call, stop string, of greedy"] = calls["stop string"] / calls["greedy"]
    shares = []
    for length in (100, 4000):
        texts = make_prompts(setting, 8, (length, length))
        timer = Timer(setting, texts)
        with setting.make_engine(share_prefixes=True, lm=lm, max_rows=16) as engine:
            seconds = []
            for name in ("greedy", "stop string"):
                one = {**kinds[name], "max_new_tokens": 128}
                run_engine(engine, texts, one)
                started = time.perf_counter()
                run_engine(engine, texts, one)  # what was read before is found: the time is of new tokens
                seconds.append(time.perf_counter() - started)
        shares.append(seconds[1] / seconds[0])
        free(setting)
    results["stop string, a late token over an early one"] = shares[1] / shares[0]
    return results


def measure_crowd(setting: Setting) -> dict[str, float]:
    lm, asked = with_tokenizer(setting.lm), make_asked(setting, 128)
    prompts = make_prompts(setting, 48, (64, 256))
    timer, total = Timer(setting, prompts), 0

    def run_static() -> int:
        return sum(count_tokens([lm.generate(prompts[place::6], **asked[name])]) for place, name in enumerate(CROWD))

    static = timer.rate(run_static)
    with setting.make_engine(share_prefixes=False, lm=lm) as engine:

        def run_mixed() -> int:
            nonlocal total
            requests = [engine.submit(prompt, **asked[CROWD[place % 6]]) for place, prompt in enumerate(prompts)]
            total = count_tokens([request.result() for request in requests])
            return total

        mixed = timer.rate(run_mixed)
    free(setting)
    return {"static batches": static, "engine": mixed, "engine, of static": mixed / static}


def measure_readers(setting: Setting) -> dict[str, float]:
    lm, count = with_tokenizer(setting.lm), min(256, setting.options.max_rows)
    prompts = make_prompts(setting, count, (32, 64))
    timer, asked = Timer(setting, prompts), {**COMMON, "max_new_tokens": setting.options.num_new}
    with setting.make_engine(share_prefixes=False, lm=lm) as engine:
        ways = {
            "results": lambda: run_engine(engine, prompts, asked),
            "threads": lambda: read_in_threads(engine, prompts, asked),
            "one event loop": lambda: asyncio.run(read_in_tasks(engine, prompts, asked)),
        }
        results = {f"{count} callers, {name}": timer.rate(way) for name, way in ways.items()}
    free(setting)
    return results


def read_in_threads(engine: unspool.Engine, prompts: Sequence[list[int]], asked: dict[str, Any]) -> int:
    counts = [0] * len(prompts)

    def read(place: int, request: Any) -> None:
        for piece in request:
            counts[place] += len(piece.token_ids)

    threads = []
    for place, prompt in enumerate(prompts):
        threads.append(threading.Thread(target=read, args=(place, engine.submit(prompt, **asked))))
        threads[-1].start()
    for thread in threads:
        thread.join()
    return sum(counts)


async def read_in_tasks(engine: unspool.Engine, prompts: Sequence[list[int]], asked: dict[str, Any]) -> int:
    async def read(request: Any) -> int:
        return sum([len(piece.token_ids) async for piece in request])

    requests = [engine.submit(prompt, **asked) for prompt in prompts]
    return sum(await asyncio.gather(*map(read, requests)))


def measure_rush(setting: Setting, rate: float = 60.0, seconds: float = 5.0) -> dict[str, float]:
    lm, order = with_tokenizer(setting.lm), random.Random(7)
    arrivals, at = [], 0.0
    while at < seconds:
        arrivals.append(at)
        at += order.expovariate(rate)
    asked, medians = {**COMMON, "max_new_tokens": 200}, {}
    with setting.make_engine(share_prefixes=False, lm=lm) as engine:
        for name in ("result()", "result()", "token by token"):  # the first warms up
            prompts = make_prompts(setting, len(arrivals), (1000, 1000), seed=len(medians) + 11)
            took: list[float] = []

            def call(prompt: list[int], reads: bool, took: list[float] = took) -> None:
                started = time.perf_counter()
                request = engine.submit(prompt, **asked)
                if reads:
                    for _ in request:
                        pass
                request.result()
                took.append(time.perf_counter() - started)

            threads, begun = [], time.perf_counter()
            for when, prompt in zip(arrivals, prompts, strict=True):
                time.sleep(max(0.0, begun + when - time.perf_counter()))
                threads.append(threading.Thread(target=call, args=(prompt, name != "result()")))
                threads[-1].start()
            for thread in threads:
                thread.join()
            medians[name] = statistics.median(took) * 1e3
    free(setting)
    results = {f"{rate:.0f} a second, {name}, p50 ms": value for name, value in medians.items()}
    return results | {"token by token, of result()": medians["token by token"] / medians["result()"]}

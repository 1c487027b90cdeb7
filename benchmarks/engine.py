"""The engine beside static batches and transformers' `generate_batch`: `python benchmarks/engine.py`.

On a GPU: shapes with random weights in bfloat16, whose speed does not depend on their values. Elsewhere, or with
`--model`: a model of that name. Every figure is of whole requests, prompts' reading included; each way runs once to
warm up and then `--rounds` times, of which the fastest counts. No round's prompts begin as another's do, or an engine
would find what it has read in the round before.

- greedy: 256 requests at once, prompts of 64 to 1,024 tokens, 128 new ones each
- mixed: the same prompts, 16 to 512 new tokens, and a temperature, top-p, penalty and seed of their own
- host: the driving thread's time a step at 64 running rows, and how long it waits for the device
- strategies: 16 requests of every strategy at once, beside what their passes cost: every request's passes are listed
  while it runs alone, the first passes of all are merged into one, the second ones, and so on, and each merged pass is
  timed by itself
- chats: 32 requests with one beginning of 2,000 tokens: time to the first token with shared blocks and without
- arrivals: 8 requests whose arrivals are spread, beside a static batch of 8 (for a CPU)
- peer: transformers' `generate_batch` beside the engine over the first of the greedy requests. It takes a minute, half
  of it imports and what its manager prepares: best run by itself (`--shapes 1B --only peer`)
"""

from __future__ import annotations

import argparse
import gc
import inspect
import json
import os
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from gpu_step import make_config, make_reference, make_weights  # benchmarks/gpu_step.py

import unspool
from unspool.api import LanguageModel
from unspool.cache import BlockPool, PagedCache
from unspool.decoding.reader import answer_at_once
from unspool.engine import plain
from unspool.loading.model import LoadedParts
from unspool.models.registry import build_model
from unspool.models.weights import MemorySource
from unspool.protocols import Ask

COMMON = {"eos_token_id": None, "pad_token_id": 0}
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
WORKS = ("greedy", "mixed", "host", "strategies", "chats", "arrivals", "peer")
STRATEGIES: tuple[dict[str, Any], ...] = (
    {},
    {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "seed": 1},
    {"do_sample": True, "top_k": 0, "top_p": 0.9, "seed": 2, "repetition_penalty": 1.2},
    {"num_beams": 4},
    {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    {"num_beams": 2, "do_sample": True, "seed": 3},
    {"penalty_alpha": 0.6, "top_k": 4},
    {"dola_layers": "high"},
    {"guidance_scale": 1.5},
    {"prompt_lookup_num_tokens": 4},
    {"do_sample": True, "seed": 4, "watermarking_config": {"bias": 2.0}},
    {"num_return_sequences": 4, "do_sample": True, "seed": 5},
    {"no_repeat_ngram_size": 3},
    {"logprobs": 2},
    {"min_new_tokens": 8, "presence_penalty": 0.5},
    {"do_sample": True, "min_p": 0.05, "seed": 6},
)


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

    def make_engine(self, **more: Any) -> unspool.Engine:
        options = self.options
        longest = options.prompt_tokens[1] + max(options.num_new, options.mixed_tokens[1]) + 64
        per_position = self.lm.model.key_shape
        size = 2 * per_position.num_layers * per_position.num_kv_heads * per_position.head_dim
        memory = size * per_position.dtype.itemsize * longest * options.max_rows
        given = {"max_rows": options.max_rows, "memory": memory, "tokens_per_pass": options.tokens_per_pass}
        return unspool.Engine(self.lm, **{**given, **more})

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


def measure_greedy(setting: Setting) -> dict[str, float]:
    num_new = setting.options.num_new
    total = len(setting.prompts) * num_new
    asked = {"max_new_tokens": num_new, **COMMON}
    results = {}
    with setting.make_engine() as engine:
        results["engine"] = total / setting.time(
            lambda: run_all(engine, setting.prompts, [asked] * len(setting.prompts))
        )
        results["engine, first token s"] = engine.stats.first_token_seconds
        results["engine, between tokens ms"] = engine.stats.token_seconds * 1e3
    free(setting)
    for size in setting.options.batches:
        results[f"static {size}"] = total / setting.time(lambda size=size: run_static(setting, size, asked))
        free(setting)
    return results


def measure_mixed(setting: Setting) -> dict[str, float]:
    total = sum(asked["max_new_tokens"] for asked in setting.mixed)
    results = {}
    with setting.make_engine() as engine:
        requests = [{**asked, **COMMON} for asked in setting.mixed]
        results["engine"] = total / setting.time(lambda: run_all(engine, setting.prompts, requests))
    free(setting)
    size = setting.options.batches[0]

    def run() -> None:
        for first in range(0, len(setting.prompts), size):
            rows = setting.mixed[first : first + size]
            asked = {
                name: [row[name] for row in rows] for name in ("temperature", "top_p", "repetition_penalty", "seed")
            }
            longest = max(row["max_new_tokens"] for row in rows)
            setting.lm.generate(
                setting.prompts[first : first + size], max_new_tokens=longest, do_sample=True, **asked, **COMMON
            )

    results[f"static {size}"] = total / setting.time(run)
    free(setting)
    return results


def measure_host(setting: Setting) -> dict[str, float]:
    """Milliseconds a step at 64 rows: the whole turn, and how much of it the driving thread waits for the device."""
    waited: list[float] = []
    stepped: list[float] = []
    wait, launch = torch.cuda.Event.synchronize, plain.PlainRows.launch

    def timed_wait(event: torch.cuda.Event) -> None:
        started = time.perf_counter()
        wait(event)
        waited.append(time.perf_counter() - started)

    def timed_launch(rows: plain.PlainRows, forward: Any) -> Any:
        stepped.append(time.perf_counter())
        return launch(rows, forward)

    count = min(64, len(setting.prompts), setting.options.max_rows)
    asked = {"max_new_tokens": setting.options.num_new, **COMMON}
    torch.cuda.Event.synchronize, plain.PlainRows.launch = timed_wait, timed_launch
    try:
        with setting.make_engine() as engine:
            for _ in range(2):
                setting.renew()
                waited.clear()
                stepped.clear()
                run_all(engine, setting.prompts[:count], [asked] * count)
    finally:
        torch.cuda.Event.synchronize, plain.PlainRows.launch = wait, launch
    free(setting)
    half = len(stepped) // 2  # all are running then
    turns = [later - earlier for earlier, later in zip(stepped[half:], stepped[half + 1 :], strict=False)]
    turn, idle = statistics.median(turns) * 1e3, statistics.median(waited[half:] or [0.0]) * 1e3
    return {"turn ms": turn, "host ms": turn - idle, "host part": (turn - idle) / turn}


def measure_strategies(setting: Setting) -> dict[str, float]:
    if find_spec("greenlet") is None:
        return {}
    prompts = [prompt[:256] for prompt in setting.prompts[: len(STRATEGIES)]]
    asked = [{"max_new_tokens": min(64, setting.options.num_new), **one, **COMMON} for one in STRATEGIES]
    given = list(zip(prompts, asked, strict=True))
    alone = setting.time(lambda: [setting.lm.generate(prompt, **one) for prompt, one in given])
    with setting.make_engine(share_prefixes=False) as engine:
        together = setting.time(lambda: run_all(engine, prompts, asked))
    free(setting)
    merged = merge_passes([list_passes(setting.lm, prompt, one) for prompt, one in given])
    costs = {shape: time_pass(setting, *shape) for shape in set(merged)}
    passes = sum(costs[shape] for shape in merged)
    free(setting)
    return {
        "one after the other s": alone,
        "engine s": together,
        "merged passes": len(merged),
        "merged passes s": passes,
        "engine, of merged passes": passes / together,
    }


def list_passes(lm: LanguageModel, prompt: list[int], asked: dict[str, Any]) -> list[tuple[Any, int, int, int]]:
    """What a request asks for: of every pass what it wants, its rows, its tokens per row and the keys before them."""
    passes: list[tuple[Any, int, int, int]] = []
    run = lm.start(prompt, **asked).run
    pool = BlockPool()

    def answer(ask: Ask) -> Any:
        want = replace(ask.want, epilogue=None, is_brief=False)
        rows, columns = ask.tokens.shape
        passes.append((want, rows, columns, max(ask.cache.lengths, default=0)))
        return answer_at_once(ask)

    run.answer, run.open_cache = answer, lambda: PagedCache(pool)
    with torch.no_grad():
        for _ in run:
            pass
    return passes


def merge_passes(requests: list[list[tuple[Any, int, int, int]]]) -> list[tuple[Any, int, int, int]]:
    """Passes that come at the same time and want the same as one: steps of one token, and others by themselves."""
    merged: list[tuple[Any, int, int, int]] = []
    for number in range(max(map(len, requests))):
        steps: dict[Any, list[tuple[int, int]]] = {}
        reads: dict[Any, list[tuple[int, int, int]]] = {}
        for want, rows, columns, held in (passes[number] for passes in requests if number < len(passes)):
            if columns == 1:
                steps.setdefault(want, []).append((rows, held))
            else:
                reads.setdefault(want, []).append((rows, columns, held))
        for want, parts in steps.items():
            merged.append((want, sum(rows for rows, _ in parts), 1, _round(max(held for _, held in parts))))
        for want, longer in reads.items():  # as one row after the other: their lengths differ
            tokens = sum(rows * columns for rows, columns, _ in longer)
            rows = sum(rows for rows, _, _ in longer)
            merged.append((want, rows, -(-tokens // rows), _round(max(held for _, _, held in longer))))
    return merged


def _round(count: int) -> int:
    return -(-count // 64) * 64


def time_pass(setting: Setting, want: Any, rows: int, columns: int, held: int) -> float:
    """Seconds of a pass of a shape over blocks: the fastest of several."""
    model, size = setting.lm.model, 64
    cache = PagedCache(BlockPool(size, rows * (2 + (held + columns) // size)))
    tokens = torch.randint(3, setting.vocab, (rows, max(held, columns)), device=setting.device)
    seconds = []
    with torch.no_grad():
        if held:
            answer_at_once(Ask(model, cache, tokens[:, :held]))
        for _ in range(5):
            setting.synchronize()
            started = setting.clock()
            answer_at_once(Ask(model, cache, tokens[:, :columns], None, want))
            setting.synchronize()
            seconds.append(setting.clock() - started)
            cache.truncate([held] * rows)
    return min(seconds)


def measure_chats(setting: Setting) -> dict[str, float]:
    order = random.Random(1)
    room = setting.lm.model.info.max_context or 4096
    begin = setting.make_prompt(order, min(2000, room - 200))
    prompts = [begin + setting.make_prompt(order, 32) for _ in range(32)]
    asked = [{"max_new_tokens": 16, **COMMON}] * 32
    results = {}
    for name, shares in (("shared", True), ("not shared", False)):
        with setting.make_engine(share_prefixes=shares) as engine:
            run_all(engine, prompts, asked)  # in the first round the beginning is read by all at once
            requests = [engine.submit(prompt, **one) for prompt, one in zip(prompts, asked, strict=True)]
            firsts = [request.result().stats.first_token_seconds for request in requests]
            results[f"{name}, first token s"] = statistics.median(firsts)
        free(setting)
    results["times"] = results["not shared, first token s"] / results["shared, first token s"]
    return results


def measure_arrivals(setting: Setting) -> dict[str, float]:
    """8 requests at once, and 8 of which each comes when a 64th of a static batch's time has passed since the last."""
    prompts, num_new = setting.prompts[:8], setting.options.num_new
    asked = {"max_new_tokens": num_new, **COMMON}
    seconds: dict[str, list[float]] = {"static 8": [], "at once": [], "spread": []}
    with setting.make_engine() as engine:

        def spread() -> None:
            requests = []
            for prompt in prompts:
                requests.append(engine.submit(prompt, **asked))
                time.sleep(seconds["static 8"][-1] / 64)
            for request in requests:
                request.result()

        ways = {
            "static 8": lambda: setting.lm.generate(prompts, **asked),
            "at once": lambda: run_all(engine, prompts, [asked] * 8),
            "spread": spread,
        }
        for _ in range(setting.options.rounds + 1):  # in turns: a machine's speed changes with time
            for name, way in ways.items():
                setting.renew()
                started = setting.clock()
                way()
                seconds[name].append(setting.clock() - started)
    free(setting)
    best = {name: min(values[1:]) for name, values in seconds.items()}
    figures = {name: 8 * num_new / value for name, value in best.items()}
    return figures | {f"{name}, of static": best["static 8"] / best[name] for name in ("at once", "spread")}


def measure_peer(setting: Setting, reference: Any) -> dict[str, float]:
    """The engine and transformers' `generate_batch` over the first of the greedy requests.

    Its manager is kept from one call to the next, so that what it prepares (graphs, blocks) counts in the first call
    alone. The fastest of the calls that came back in time counts.
    """
    import transformers

    num_new, limit = setting.options.num_new, setting.options.peer_seconds
    prompts = setting.prompts[: setting.options.peer_requests]
    total = len(prompts) * num_new
    asked = {"max_new_tokens": num_new, **COMMON}
    with setting.make_engine() as engine:
        own = total / setting.time(lambda: run_all(engine, prompts, [asked] * len(prompts)))
    free(setting)
    results = {f"engine, {len(prompts)} requests": own}
    config = transformers.GenerationConfig(
        max_new_tokens=num_new, do_sample=False, eos_token_id=-1, pad_token_id=0, use_cache=True
    )
    keeps = "persistent_manager" in inspect.signature(reference.generate_batch).parameters
    more = {"persistent_manager": True} if keeps else {}
    rates: list[float] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            for _ in range(1 + setting.options.rounds):
                setting.renew()
                started = time.perf_counter()
                outputs = reference.generate_batch(inputs=prompts, generation_config=config, **more)
                setting.synchronize()
                found = sum(len(output.generated_tokens) for output in outputs.values())
                if found < total:
                    raise RuntimeError(f"it gave {found} of {total} tokens")
                rates.append(total / (time.perf_counter() - started))
                print(f"transformers' generate_batch, call {len(rates)}: {rates[-1]:,.1f} tokens/s", flush=True)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)  # where its own thread dies, it waits for ever
    thread.start()
    thread.join(limit)
    if not rates:
        error = failures[0] if failures else "it did not come back in time"
        print(f"transformers' generate_batch, within {limit:.0f} s: {error!r:.300}", flush=True)
        return results
    best = max(rates)
    return results | {"transformers generate_batch": best, "engine, times generate_batch": own / best}


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
        model = build_model(
            config, MemorySource(weights), is_gguf=False, device=torch.device(options.device), dtype=dtype
        )
        lm = LanguageModel(LoadedParts(shape, Path(), model, None, unspool.GenerationConfig()))
        settings.append((Setting(lm, options, shape), (config, weights)))
    return settings


def main() -> None:
    """Print a line for each shape, work and way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shapes", nargs="+", default=["1B", "8B"], choices=["1B", "8B", "tiny"])
    parser.add_argument("--model", help="a model of this name or path instead of shapes with random weights")
    parser.add_argument("--only", nargs="+", default=["greedy", "mixed", "host", "strategies", "chats"], choices=WORKS)
    parser.add_argument("--num-requests", type=int, default=256)
    parser.add_argument("--prompt-tokens", nargs=2, type=int, default=[64, 1024])
    parser.add_argument("--num-new", type=int, default=128)
    parser.add_argument("--mixed-tokens", nargs=2, type=int, default=[16, 512])
    parser.add_argument("--batches", nargs="+", type=int, default=[64, 256])
    parser.add_argument("--max-rows", type=int, default=256)
    parser.add_argument("--tokens-per-pass", type=int)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="count what this process computes instead of what goes by, on a machine that others use too",
    )
    parser.add_argument("--peer-seconds", type=float, default=300.0, help="after which generate_batch is given up")
    parser.add_argument("--peer-requests", type=int, default=64, help="how many of the requests both get")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    name = torch.cuda.get_device_name() if options.device == "cuda" else f"{torch.get_num_threads()} threads"
    print(
        f"{name}, torch {torch.__version__}, {options.num_requests} requests, {options.num_new} new tokens", flush=True
    )
    measures = {
        "greedy": measure_greedy,
        "mixed": measure_mixed,
        "host": measure_host,
        "strategies": measure_strategies,
        "chats": measure_chats,
        "arrivals": measure_arrivals,
    }
    kept: dict[str, Any] = {}
    if "peer" in options.only:
        from transformers import LlamaForCausalLM  # noqa: F401 - before kernels are compiled: both import Triton
    settings = make_settings(options)
    gc.collect()
    gc.freeze()  # as the program does once a model is loaded: a collection would look at all that was imported
    for setting, parts in settings:
        for work in options.only:
            if work == "peer":
                figures = measure_peer(setting, make_reference(*parts))
            else:
                figures = measures[work](setting)
            kept[f"{setting.name} {work}"] = figures
            for way, value in figures.items():
                print(f"{setting.name:>14} {work:>11}  {way:<44}{value:>12,.3f}", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(kept, indent=1))
    if "peer" in options.only:
        sys.stdout.flush()
        os._exit(0)  # its manager's threads would be waited for


if __name__ == "__main__":
    main()

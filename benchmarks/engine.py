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
- kinds, late, crowd, readers, rush: every kind of request beside one `generate` call, and what readers cost: see
  benchmarks/engine_kinds.py (`--shapes 1B --only kinds late crowd readers rush --rounds 2` takes some four minutes)
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
from pathlib import Path
from typing import Any

import torch
from engine_kinds import (  # benchmarks/engine_kinds.py
    measure_crowd,
    measure_kinds,
    measure_late,
    measure_readers,
    measure_rush,
)
from engine_setting import COMMON, Setting, free, make_settings, run_all, run_static  # benchmarks/engine_setting.py
from engine_strategies import measure_strategies  # benchmarks/engine_strategies.py
from gpu_step import make_reference  # benchmarks/gpu_step.py

from unspool.engine import plain

KINDS = ("kinds", "late", "crowd", "readers", "rush")
WORKS = ("greedy", "mixed", "host", "strategies", "chats", "arrivals", *KINDS, "peer")


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
        "kinds": measure_kinds,
        "late": measure_late,
        "crowd": measure_crowd,
        "readers": measure_readers,
        "rush": measure_rush,
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

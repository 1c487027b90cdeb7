"""Random requests, cancellations, deadlines and faults for a while: `make soak MINUTES=60`, or with `--seed`.

It ends with every block free, no growth of memory and no lost request, or says what is wrong and exits with 1. One
answer in eight is compared with `lm.generate` alone; the real model's weights are in blocks, so that every pass gives
the same bits (in float32 one answer in some thousand differs, where a draw falls within rounding of a bound).
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import random
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import unspool
from tests.conformance.cases import GOLDENS
from tests.engine.fakes import BLOCK_BYTES, Fake, FakeWithLayers, make_lm
from tests.engine.test_mixes import LAYERED, REQUESTS, check, make_pair, try_call
from unspool.engine.request import Request

NUM_THREADS = 8
NUM_BLOCKS = 20  # so few that requests are preempted all the time
NUM_LOOKS = 20  # at the memory
WAIT, NUM_WAITS = 5.0, 24  # seconds, and how often, before a request is lost
LONG = 300  # seconds after which growth would show
GROWTH_ALLOWED = (
    48 << 20
)  # bytes, in the second half: what is kept by shape (packed weights, kernels of torch) is there by then


class Faulty:
    """A processor that raises sooner or later."""

    def __init__(self, calls: int) -> None:
        self.left = calls

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self.left -= 1
        if self.left <= 0:
            raise ZeroDivisionError("a caller's processor")
        return scores


@dataclass
class Tally:
    """What became of the requests."""

    submitted: int = 0
    answered: int = 0
    refused: int = 0
    cancelled: int = 0
    failed: int = 0
    compared: int = 0
    problems: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, **what: int) -> None:
        with self.lock:
            for name, number in what.items():
                setattr(self, name, getattr(self, name) + number)


def read_memory() -> int:
    """Bytes of memory that the process has, without what its allocator keeps for later."""
    gc.collect()
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def wait(request: Request) -> Any:
    """Its result; TimeoutError if it does not come in many looks: a process that was stopped for a while loses none."""
    for look in range(NUM_WAITS):
        try:
            return request.result(WAIT)
        except TimeoutError:
            if look == NUM_WAITS - 1:
                raise
    return None


def ask(engine: unspool.Engine, lm: unspool.LanguageModel, kinds: Any, order: random.Random, tally: Tally) -> None:
    """One request, and what becomes of it."""
    vocab = lm.model.info.vocab_size
    name = order.choice(sorted(kinds))
    settings = {"max_new_tokens": order.randint(1, 24), **kinds[name]}
    row = [order.randint(3, min(22, vocab - 1)) for _ in range(order.randint(1, 40))]
    begin = [3, 4, 5, 6, 7, 8, 9, 10] * 3 if order.random() < 0.4 else []
    prompt: Any = begin + row if order.random() < 0.8 else [row, row[:1] + begin]
    does = order.choices(["wait", "cancel", "deadline", "fault"], [6, 2, 1, 1])[0]
    if does == "fault":
        settings["logits_processor"] = [Faulty(order.randint(1, 10))]
    deadline = order.uniform(0.001, 0.1) if does == "deadline" else None
    request = try_call(
        engine.submit,
        prompt,
        deadline=deadline,
        priority=order.randint(-2, 2),
        tenant=order.choice(["", "b"]),
        **settings,
    )
    if isinstance(request, Exception):
        tally.count(refused=1)
        return
    tally.count(submitted=1)
    if does == "cancel":
        time.sleep(order.choice([0, 0.002, 0.02]))
        request.cancel()
    try:
        if order.random() < 0.3:
            for _ in request:
                pass
        result = wait(request)
    except TimeoutError:
        tally.problems.append(f"a request was lost: {name} {prompt} {settings} {does}")
        return
    except (unspool.UnspoolError, ZeroDivisionError) as error:
        tally.count(failed=1)
        if does != "fault" and order.random() < 0.5:
            alone = try_call(lm.generate, prompt, **settings)
            if type(alone) is not type(error):
                tally.problems.append(
                    f"{name} {prompt} {settings} failed with {error!r}, and alone gives {alone!r:.200}"
                )
        return
    is_cut = any(reason in ("cancelled", "deadline") for reason in result.finish_reasons)
    tally.count(answered=not is_cut, cancelled=is_cut)
    if not is_cut and does != "fault" and order.random() < 0.125:
        tally.count(compared=1)
        try:
            check(result, try_call(lm.generate, prompt, **settings))
        except AssertionError as error:
            tally.problems.append(f"{name} {prompt} {settings} differs from alone: {str(error)[:300]}")


def soak(seconds: float, seed: int) -> int:
    """Run for so long; the number of problems."""
    fake, pair = make_lm(FakeWithLayers()), make_pair()
    real = unspool.load(GOLDENS / "models" / "llama", quantize="int8")
    kinds = {name: asked for name, asked in REQUESTS.items() if name not in ("long", "forced words")}
    drafts = {"assistant_model": make_lm(Fake())}  # its scores are among the fake's own: it is right more or less often
    drafted: dict[str, Any] = {"drafted": drafts, "drafted and drawn": {**drafts, "do_sample": True, "seed": 3}}
    size = 2 * real.model.key_shape.num_layers * real.model.key_shape.num_kv_heads * real.model.key_shape.head_dim * 4
    engines = [
        (
            unspool.Engine(fake, memory=BLOCK_BYTES * NUM_BLOCKS, block_size=16, max_rows=16, tokens_per_pass=64),
            fake,
            LAYERED | drafted,
        ),
        (
            unspool.Engine(real, memory=size * 16 * NUM_BLOCKS, block_size=16, max_rows=16, tokens_per_pass=64),
            real,
            kinds,
        ),
        (unspool.Engine(pair, memory=BLOCK_BYTES * NUM_BLOCKS, block_size=16, max_rows=16), pair, REQUESTS),
    ]
    tally, stop = Tally(), time.monotonic() + seconds

    def work(number: int) -> None:
        order = random.Random(seed * 1000 + number)
        while time.monotonic() < stop and len(tally.problems) < 5:
            engine, lm, own = order.choice(engines)
            try:
                ask(engine, lm, own, order, tally)
            except BaseException as error:
                tally.problems.append(f"thread {number}: {type(error).__name__}: {error}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    began = time.monotonic()
    early, looks = 0, 0
    while any(thread.is_alive() for thread in threads):
        time.sleep(min(5.0, seconds / 20))
        if time.monotonic() - began > seconds * (looks + 1) / NUM_LOOKS:
            looks, memory = looks + 1, read_memory()
            early = memory if looks == NUM_LOOKS // 2 else early
            if seconds >= LONG:  # growth of memory without growth of objects is the allocator's
                minutes = (time.monotonic() - began) / 60
                print(
                    f"{minutes:5.1f} min: {memory >> 20} MiB, {len(gc.get_objects())} objects, "
                    f"{threading.active_count()} threads, {tally.submitted} requests",
                    flush=True,
                )
    for thread in threads:
        thread.join()
    late = read_memory()
    if seconds >= LONG and early and late - early > GROWTH_ALLOWED:
        tally.problems.append(f"memory grew by {(late - early) >> 20} MiB, from {early >> 20}")
    for engine, lm, _ in engines:
        stats = engine.stats
        print(f"{lm.name}: {stats}")
        if stats.rows_running or stats.requests_running or stats.requests_waiting or stats.blocks_used:
            tally.problems.append(f"{lm.name}: something is left: {stats}")
        pool = engine._memory.pool
        engine.close()
        if pool is not None and pool.num_free != NUM_BLOCKS:
            tally.problems.append(f"{lm.name}: blocks leaked: {pool.num_free} of {NUM_BLOCKS} are free")
    ended = tally.answered + tally.cancelled + tally.failed
    if ended != tally.submitted:
        tally.problems.append(f"{tally.submitted} were submitted and {ended} ended")
    print(
        f"{tally.submitted} requests in {time.monotonic() - began:.0f} s: {tally.answered} answered ({tally.compared} "
        f"compared), {tally.cancelled} cancelled, {tally.failed} failed, {tally.refused} refused at submit; memory "
        f"{early >> 20} -> {late >> 20} MiB"
    )
    for problem in tally.problems:
        print(f"PROBLEM: {problem}")
    return len(tally.problems)


def main() -> None:
    """Read the options, soak, and say how it went."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=int(time.time()) % 100_000)
    options = parser.parse_args()
    print(f"seed {options.seed}, {options.minutes:g} minutes", flush=True)
    sys.exit(1 if soak(options.minutes * 60, options.seed) else 0)


if __name__ == "__main__":
    main()

"""Decoding and reading with a Mamba beside transformers, in one interleaved run on this machine.

    python benchmarks/mamba.py [--rounds 3] [--new 64] [--batches 1 8] [--device cuda --dtype bfloat16] [--json FILE]

The shape is that of mamba-130m, the weights are random and the same for both; greedy decoding, no end token. What
transformers runs is its plain torch path, for the kernels that it can use are not installed. Rounds alternate, so that
a slow minute of the machine hits both. Reported is the median time of a decode step, and of reading a prompt.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

import unspool
from unspool.models.registry import build_model
from unspool.models.weights import MemorySource


class Clock:
    """A streamer that only notes when tokens arrive."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, _value: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


Engine = Callable[[Clock, torch.Tensor, int], None]


def make_engines(options: argparse.Namespace) -> dict[str, Engine]:
    """Both engines over one set of random weights."""
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    dtype = getattr(torch, options.dtype)
    config = transformers.MambaConfig(
        vocab_size=options.vocab, hidden_size=options.hidden, num_hidden_layers=options.layers, architectures=["x"]
    )
    reference = transformers.MambaForCausalLM(config).eval()
    settings = {**config.to_dict(), "architectures": ["MambaForCausalLM"]}
    native = build_model(settings, MemorySource(reference.state_dict()), device=options.device, dtype=dtype)
    reference = reference.to(options.device, dtype)
    reference.generation_config.eos_token_id = None

    def ours(clock: Clock, prompt: torch.Tensor, new: int) -> None:
        unspool.generate(native, prompt, max_new_tokens=new, streamer=clock)

    def theirs(clock: Clock, prompt: torch.Tensor, new: int) -> None:
        mask = torch.ones_like(prompt)
        # A streamer of theirs takes one row: the clock is read by a criterion, which every step asks.
        timer = transformers.StoppingCriteriaList([lambda *_, **__: _tick(clock, prompt.shape[0], prompt.device)])
        reference.generate(prompt, attention_mask=mask, max_new_tokens=new, do_sample=False, stopping_criteria=timer)

    return {"unspool": ours, "transformers": theirs}


def _tick(clock: Clock, rows: int, device: torch.device) -> torch.Tensor:
    clock.put(None)
    return torch.zeros(rows, dtype=torch.bool, device=device)


def main() -> None:
    """Run and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--prefill", type=int, default=512)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--vocab", type=int, default=50280)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    engines = make_engines(options)
    ids = torch.randint(3, options.vocab, (1, max(options.prompt, options.prefill))).to(options.device)
    for engine in engines.values():  # warm both
        engine(Clock(), ids[:, : options.prompt], 4)

    results: dict[str, dict[str, float]] = {name: {} for name in engines}
    for batch in options.batches:
        prompt = ids[:, : options.prompt].repeat(batch, 1)
        gathered: dict[str, list[float]] = {name: [] for name in engines}
        for _ in range(options.rounds):
            for name, engine in engines.items():
                clock = Clock()
                engine(clock, prompt, options.new)
                times = clock.times[1:]  # the first is the prompt's
                gathered[name] += [(b - a) * 1e3 for a, b in pairwise(times)]
        for name, steps in gathered.items():
            results[name][f"batch {batch}, ms a step"] = statistics.median(steps)
    gathered = {name: [] for name in engines}
    for _ in range(options.rounds):
        for name, engine in engines.items():
            started = time.perf_counter()
            engine(Clock(), ids[:, : options.prefill], 1)
            gathered[name].append((time.perf_counter() - started) * 1e3)
    for name, times in gathered.items():
        results[name][f"prefill {options.prefill}, ms"] = statistics.median(times)

    import transformers

    where = f"{platform.machine()}, {options.threads} threads" if options.device == "cpu" else options.device
    print(
        f"{date.today()} · {where} · torch {torch.__version__} · unspool {unspool.__version__} · transformers "
        f"{transformers.__version__} · Mamba {options.layers} x {options.hidden}, {options.dtype} · prompt "
        f"{options.prompt}, {options.new} new tokens, {options.rounds} interleaved rounds, medians"
    )
    print(f"{'':28}{'unspool':>10}{'transformers':>14}{'ratio':>8}")
    for label, value in results["unspool"].items():
        other = results["transformers"][label]
        print(f"{label:28}{value:>10.1f}{other:>14.1f}{other / value:>7.2f}x")
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Contrastive search beside our own greedy search and transformers' contrastive search, in one interleaved run.

    python benchmarks/contrastive.py [--reference-python /path/to/venv-with-4.52.4/bin/python]

On the CPU the default model in float32; on CUDA, where there is one, the 1B shape with random weights in bfloat16.
transformers removed contrastive search after 4.52, so the reference runs in its own interpreter, on random
weights of the same shape (speed does not depend on their values), round by round between ours.
Times are those of whole calls over their new tokens, the reading of the prompt included.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
from gpu_step import make_config, make_model  # benchmarks/gpu_step.py

import unspool


class Reference:
    """A process that runs transformers' rounds on demand."""

    def __init__(self, python: str, asked: dict[str, Any]) -> None:
        script = Path(__file__).with_name("contrastive_reference.py")
        self._process = subprocess.Popen(
            [python, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        print(f"reference: {self._ask(json.dumps(asked))}")

    def _ask(self, line: str) -> str:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline().strip()
        if not answer:
            raise SystemExit("the reference's interpreter ended; its message stands above")
        return answer

    def measure(self, method: str) -> float:
        """Milliseconds a token of one round."""
        return float(self._ask(method))

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def measure_ours(model: Any, ids: torch.Tensor, new: int, **settings: Any) -> float:
    """Milliseconds a token of one call."""
    started = time.perf_counter()
    unspool.generate(model, ids, max_new_tokens=new, eos_token_id=None, **settings)
    if ids.device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - started) / new * 1e3


def load_models(options: argparse.Namespace) -> list[tuple[str, Any, dict[str, Any]]]:
    """Names, models, and the config that a reference of the same shape is made from."""
    found: list[tuple[str, Any, dict[str, Any]]] = []
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    names += ("num_key_value_heads", "max_position_embeddings", "tie_word_embeddings")
    if "cpu" in options.devices:
        model = unspool.load("smollm2-135m", quantize=None).model
        found.append(("SmolLM2-135M, float32, CPU", model, {name: getattr(model.config, name) for name in names}))
    if "cuda" in options.devices and torch.cuda.is_available():
        config, model = make_config("1B"), make_model("1B")
        shape = {name: config[name] for name in names}
        found.append((f"1B shape, bfloat16, {torch.cuda.get_device_name()}", model, shape))
    return found


def compare(model: Any, shape: dict[str, Any], batch: int, options: argparse.Namespace) -> None:
    """Print a row for every method."""
    ids = torch.randint(0, 1000, (batch, options.prompt), device=model.device)
    contrastive = {"penalty_alpha": 0.6, "top_k": options.top_k}
    methods: dict[str, Callable[[], float]] = {
        "greedy": lambda: measure_ours(model, ids, options.new),
        "contrastive": lambda: measure_ours(model, ids, options.new, **contrastive),
        "contrastive, low_memory": lambda: measure_ours(model, ids, options.new, **contrastive, low_memory=True),
    }
    reference = None
    if options.reference_python:
        asked = {"config": shape, "device": model.device.type, "dtype": str(model.dtype).removeprefix("torch.")}
        asked |= {"batch": batch, "threads": options.threads}
        asked |= {"prompt": options.prompt, "new": options.new, "top_k": options.top_k}
        reference = Reference(options.reference_python, asked)
        measure = reference.measure
        methods["transformers greedy"] = lambda: measure("greedy")
        methods["transformers contrastive"] = lambda: measure("contrastive")
    times: dict[str, list[float]] = {name: [] for name in methods}
    for number in range(options.rounds + 1):
        for name, method in methods.items():
            took = method()
            if number:  # the first round warms up
                times[name].append(took)
    if reference is not None:
        reference.close()
    medians = {name: statistics.median(each) for name, each in times.items()}
    for name, took in medians.items():
        print(f"{batch:>6}  {name:<26}{took:>10.2f}{took / medians['greedy']:>10.2f}x")


def main() -> None:
    """Run and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference-python", help="an interpreter that has transformers 4.52.4 and torch")
    parser.add_argument("--devices", nargs="+", choices=["cpu", "cuda"], default=["cpu", "cuda"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(
        f"{date.today()} · {platform.machine()}, {options.threads} threads · torch {torch.__version__}, Python "
        f"{sys.version.split()[0]} · k = {options.top_k}, prompt {options.prompt}, {options.new} new tokens, "
        f"{options.rounds} interleaved rounds, medians"
    )
    for name, model, shape in load_models(options):
        print(f"\n{name}\n{'batch':>6}  {'method':<26}{'ms/token':>10}{'of greedy':>11}")
        for batch in options.batches:
            compare(model, shape, batch, options)


if __name__ == "__main__":
    main()

"""Two source trees beside each other, in one run: `python benchmarks/trees.py --before ../base/src --after src`.

Each tree runs in a process of its own that stays alive; works are timed in turns, so that what changes on the machine
changes for both. A step's time is the difference between a long and a short call over the difference of their tokens;
a prompt's is a call of one new token. `--device cuda` takes random weights of the 1B and 8B shapes of `gpu_step.py`,
a CPU the default model.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STRATEGIES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 0.8, "top_k": 50, "top_p": 0.9},
    "beams": {"num_beams": 4},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 4},
    "prompt": {},
}
WORKS = {
    "cpu": [
        ("default", "greedy", 1, 64),
        ("default", "greedy", 8, 64),
        ("default", "sampling", 1, 64),
        ("default", "beams", 1, 64),
        ("default", "contrastive", 1, 64),
        ("default", "prompt", 1, 512),
    ],
    "cuda": [
        *((shape, "greedy", rows, 256) for shape in ("1B", "8B") for rows in (1, 8, 64)),
        *((shape, name, 1, 256) for shape in ("1B", "8B") for name in ("sampling", "beams", "contrastive")),
        ("1B", "prompt", 8, 1024),
    ],
}


# --- one tree, in its own process -------------------------------------------------------------------------
def serve(device: str, threads: int) -> None:
    """Read works from standard input, one JSON list a line, and answer with seconds."""
    import torch

    torch.set_num_threads(threads)
    models: dict[str, Any] = {}
    for line in sys.stdin:
        shape, name, rows, prompt, few, many = json.loads(line)
        if shape not in models:
            models[shape] = _load(shape, device)
        print(json.dumps(_time(models[shape], name, rows, prompt, few, many, device)), flush=True)


def _load(shape: str, device: str) -> Any:
    import torch

    import unspool

    if shape == "default":
        return unspool.load("smollm2-135m").model
    sys.path.insert(0, str(Path(__file__).parent))
    from gpu_step import make_model

    torch.manual_seed(0)
    return make_model(shape, device=device)


def _time(model: Any, name: str, rows: int, prompt: int, few: int, many: int, device: str) -> float:
    import torch

    import unspool

    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, 1000, (rows, prompt), generator=generator).to(device)

    def call(num_new: int) -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        unspool.generate(
            model,
            ids,
            max_new_tokens=num_new,
            eos_token_id=None,
            pad_token_id=0,
            seed=1 if STRATEGIES[name].get("do_sample") else None,
            **STRATEGIES[name],
        )
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started

    if name == "prompt":
        return call(1)
    return (call(many) - call(few)) / (many - few)


# --- both of them -------------------------------------------------------------------------------------------
class Tree:
    """A source tree at work in a process."""

    def __init__(self, source: str, device: str, threads: int) -> None:
        command = [sys.executable, __file__, "--serve", "--device", device, "--threads", str(threads)]
        env = {**os.environ, "PYTHONPATH": str(Path(source).resolve())}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)

    def time(self, *work: Any) -> float:
        """Seconds of one work."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(work) + "\n")
        self._process.stdin.flush()
        return float(json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def compare(trees: dict[str, Tree], works: list[tuple[Any, ...]], rounds: int, say: Callable[[str], None]) -> None:
    """Time every work in turns and print a Markdown table."""
    say("| model | work | rows | prompt | " + " | ".join(f"{name}, ms" for name in trees) + " | ratio |")
    say("|---|---|---|---|" + "---|" * (len(trees) + 1))
    for work in works:
        found: dict[str, list[float]] = {name: [] for name in trees}
        for number in range(rounds + 1):
            for name in list(trees) if number % 2 else list(reversed(trees)):
                seconds = trees[name].time(*work)
                if number:  # the first round compiles and captures
                    found[name].append(seconds * 1000)
        before, after = (statistics.median(found[name]) for name in trees)
        shape, name, rows, prompt = work[:4]
        say(f"| {shape} | {name} | {rows} | {prompt} | {before:.2f} | {after:.2f} | {after / before:.3f} |")


def main() -> None:
    """Compare two trees."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", help="a source folder")
    parser.add_argument("--after", default="src")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--few", type=int, default=16)
    parser.add_argument("--many", type=int, default=80)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.device, options.threads)
        return
    if options.before is None:
        parser.error("--before names the other tree's source folder")
    trees = {name: Tree(getattr(options, name), options.device, options.threads) for name in ("before", "after")}
    works = [(*work, options.few, options.many) for work in WORKS[options.device]]
    try:
        compare(trees, works, options.rounds, lambda line: print(line, flush=True))
    finally:
        for tree in trees.values():
            tree.close()


if __name__ == "__main__":
    main()

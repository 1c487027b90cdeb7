"""What drafting wins: accepted tokens a pass and the time beside plain decoding, in one interleaved run.

    python benchmarks/speculation.py [--new 128] [--rounds 3] [--tasks edit summarise answer story] [--json FILE]
    python benchmarks/speculation.py --device cuda [--shape 8B] [--batches 1 8 32] [--drafts 4 8] [--context 1024]

On a CPU the default model writes greedily from the prompts in benchmarks/prompts: a text to edit, one to summarise, a
passage to answer from, and a story, where there is nothing to look up. Every way takes its turn in every round, so
that a slow minute of the machine hits all; reported is the median time after the first token, over that of plain
decoding. The text must be the same in all ways, or the run fails.

On a GPU it is the cost of a check: a pass over so many drafted tokens a row beside a plain step, random weights.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch

import unspool
from unspool.protocols import Want

PROMPTS = Path(__file__).parent / "prompts"
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "lookup": {"prompt_lookup_num_tokens": 10, "max_matching_ngram_size": 3},
    "early exit": {"assistant_early_exit": 20, "num_assistant_tokens": 3},
    "auto": {"speculate": "auto"},
    "auto, early exit": {"speculate": "auto", "assistant_early_exit": 20, "num_assistant_tokens": 3},
}


def write(lm: unspool.LanguageModel, task: str, num_new: int, way: str) -> dict[str, Any]:
    """One text: its tokens, the seconds after the first token, and what was drafted."""
    prompt = [{"role": "user", "content": (PROMPTS / f"{task}.txt").read_text().strip()}]
    answer = lm.generate(prompt, max_new_tokens=num_new, **WAYS[way])
    stats, speculation = answer.stats, answer.speculation
    return {
        "tokens": answer.token_ids[0],
        "seconds": stats.total_seconds - stats.first_token_seconds,
        "passes": stats.forward_passes,
        "drafted": sum(speculation.drafted) if speculation else 0,
        "accepted": sum(speculation.accepted) if speculation else 0,
    }


def compare_ways(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A line for every task and way."""
    lm = unspool.load(options.model, device="cpu", quantize=None if options.quantize == "none" else options.quantize)
    lines = []
    for task in options.tasks:
        runs: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
        for way in WAYS:
            write(lm, task, 8, way)  # what is made once is not to be measured
        for _ in range(options.rounds):
            for way in WAYS:
                runs[way].append(write(lm, task, options.new, way))
        plain = statistics.median(run["seconds"] for run in runs["plain"])
        expected = runs["plain"][0]["tokens"]
        for way, made in runs.items():
            if any(run["tokens"] != expected for run in made):
                raise SystemExit(f"{task}: {way} wrote another text than plain decoding")
            seconds = statistics.median(run["seconds"] for run in made)
            first = made[0]
            lines.append(
                {
                    "task": task,
                    "way": way,
                    "tokens": len(expected),
                    "passes": first["passes"],
                    "tokens_per_pass": len(expected) / first["passes"],
                    "drafted": first["drafted"],
                    "accepted": first["accepted"],
                    "speed": plain / seconds if seconds else 1.0,
                }
            )
    return lines


def print_ways(lines: list[dict[str, Any]]) -> None:
    """The table of a CPU run."""
    print(f"{date.today()}, {platform.processor() or platform.machine()}, {torch.get_num_threads()} threads")
    print(f"{'task':<11}{'way':<18}{'tokens':>7}{'passes':>8}{'a pass':>8}{'drafted':>9}{'accepted':>10}{'speed':>8}")
    for line in lines:
        print(
            f"{line['task']:<11}{line['way']:<18}{line['tokens']:>7}{line['passes']:>8}{line['tokens_per_pass']:>8.2f}"
            f"{line['drafted']:>9}{line['accepted']:>10}{line['speed']:>7.2f}x"
        )


@torch.no_grad()
def compare_checks(options: argparse.Namespace) -> list[dict[str, Any]]:
    """What checking costs on a GPU, beside a plain step: a line for every batch and length."""
    from gpu_step import make_model, measure  # benchmarks/gpu_step.py: the same shapes and clock

    model = make_model(options.shape)
    lines = []
    for batch in options.batches:
        room = options.context + max(options.drafts) + 1
        cache = model.new_cache("static", batch, room)
        model.forward(torch.randint(0, 1000, (batch, options.context), device="cuda"), cache)
        lengths = list(cache.lengths)

        def check(num_drafted: int, cache: Any = cache, lengths: Any = lengths, batch: int = batch) -> float:
            tokens = torch.randint(0, 1000, (batch, num_drafted + 1), device="cuda")
            want = Want(logits="all") if num_drafted else Want()

            def run() -> None:
                model.forward(tokens, cache, want=want)
                cache.truncate(lengths)

            return measure(run)

        plain = check(0)
        for num_drafted in options.drafts:
            took = check(num_drafted)
            lines.append(
                {"batch": batch, "drafts": num_drafted, "plain_ms": plain, "check_ms": took, "ratio": took / plain}
            )
    return lines


def main() -> None:
    """Run what the options name, print a table, and write it down where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--quantize", default="auto", help="int8, int4, none, or as the file has them")
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tasks", nargs="+", default=["edit", "summarise", "answer", "story"])
    parser.add_argument("--shape", default="8B")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--drafts", nargs="+", type=int, default=[4, 8])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    started = time.perf_counter()
    if options.device == "cpu":
        lines = compare_ways(options)
        print_ways(lines)
    else:
        lines = compare_checks(options)
        print(f"{torch.cuda.get_device_name()}, {options.shape} shape, bf16, {options.context} tokens held")
        print(f"{'batch':>6}{'drafts':>8}{'plain ms':>10}{'check ms':>10}{'ratio':>8}")
        for line in lines:
            print(
                f"{line['batch']:>6}{line['drafts']:>8}{line['plain_ms']:>10.2f}{line['check_ms']:>10.2f}"
                f"{line['ratio']:>7.2f}x"
            )
    print(f"in {time.perf_counter() - started:.0f} s")
    if options.json is not None:
        options.json.write_text(json.dumps(lines, indent=1) + "\n")


if __name__ == "__main__":
    main()

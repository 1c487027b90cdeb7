"""Reading prompts of different lengths: `python benchmarks/ragged_prefill.py --device cuda --shapes 1B 8B --peer`.

Each way reads the same batch of prompts and gives one token (`generate`, `max_new_tokens=1`): rows filled to the
longest, real tokens alone, and transformers on left-padded rows. Rounds alternate, the smallest time of each counts.
The figure is real tokens per second: padding does not count. Random weights: speed does not depend
on them.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from typing import Any

import torch
from gpu_step import SHAPES, build_native, make_config, make_reference, make_weights

import unspool

SMALL = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
COMMON = {"eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 1, "do_sample": False}


def describe(shape: str) -> dict[str, Any]:
    """A Llama config of the given size; "135M" is SmolLM2's shape, for a CPU."""
    if shape in SHAPES:
        return make_config(shape)
    sizes = {"vocab_size": 49_152, "num_key_value_heads": 3, "tie_word_embeddings": True, **SMALL}
    return {**make_config("1B"), **sizes}


def read_lengths(run: str) -> list[int]:
    """Lengths as a run names them: one by one ("64,48,40"), or rows x shortest-longest ("8x64-1024").

    The latter grow by one factor from the shortest to the longest, and stand in an order of chance.
    """
    if "x" not in run:
        return [int(length) for length in run.split(",")]
    rows, shortest, longest = (int(number) for number in run.replace("x", "-").split("-"))
    lengths = [round(shortest * (longest / shortest) ** (row / max(rows - 1, 1))) for row in range(rows)]
    random.Random(0).shuffle(lengths)
    return lengths


def make_prompts(lengths: list[int], vocab: int, device: str) -> dict[str, torch.Tensor]:
    """Left-padded random prompts, as both engines take them."""
    longest = max(lengths)
    ids = torch.randint(1, vocab, (len(lengths), longest), generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[0] * (longest - length) + [1] * length for length in lengths])
    return {"input_ids": (ids * mask).to(device), "attention_mask": mask.to(device)}


def measure(ways: dict[str, Callable[[], Any]], rounds: int, device: str) -> dict[str, tuple[float, float]]:
    """The smallest seconds of each way, and the GB it took at most beyond what was there."""
    seconds, memory = dict.fromkeys(ways, float("inf")), dict.fromkeys(ways, 0.0)
    is_gpu = device.startswith("cuda")
    for turn in range(rounds + 1):
        for name, run in ways.items():
            if is_gpu:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                held = torch.cuda.memory_allocated()
            started = time.perf_counter()
            run()
            if is_gpu:
                torch.cuda.synchronize()
                memory[name] = max(memory[name], (torch.cuda.max_memory_allocated() - held) / 1e9)
            if turn or rounds == 1:  # the first round warms up
                seconds[name] = min(seconds[name], time.perf_counter() - started)
    return {name: (seconds[name], memory[name]) for name in ways}


def make_ways(model: Any, reference: Any, prompts: dict[str, torch.Tensor]) -> dict[str, Callable[[], Any]]:
    """What is compared, by name."""

    def read(flattens: bool) -> None:
        model.flattens_rows = flattens
        unspool.generate(model, **prompts, **COMMON)

    ways: dict[str, Callable[[], Any]] = {"filled": lambda: read(False), "packed": lambda: read(True)}
    if reference is not None:
        ways["transformers"] = lambda: reference.generate(**prompts, **COMMON)
    return ways


@torch.no_grad()
def main() -> None:
    """Print a row for each shape, batch and way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="bfloat16 on a GPU, else float32")
    parser.add_argument("--shapes", nargs="+", default=["135M"], choices=["135M", *SHAPES])
    parser.add_argument(
        "--runs", nargs="+", default=["8x64-1024"], help="8x64-1024: rows x shortest-longest; or 64,48,40"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer", action="store_true", help="time transformers on left-padded rows too")
    options = parser.parse_args()
    is_gpu = options.device.startswith("cuda")
    dtype = getattr(torch, options.dtype or ("bfloat16" if is_gpu else "float32"))
    print(f"{torch.cuda.get_device_name() if is_gpu else 'CPU'}, torch {torch.__version__}, {dtype}")
    columns = ("real", "filled", "way", "seconds", "tokens/s", "of filled", "GB")
    print(f"{'shape':>6}{'run':>20}" + "".join(f"{name:>13}" for name in columns))
    for shape in options.shapes:
        config = describe(shape)
        weights = make_weights(config, options.device, dtype)
        model = build_native(config, weights, options.device, dtype)
        reference = make_reference(config, weights) if options.peer else None
        for run in options.runs:
            lengths = read_lengths(run)
            prompts = make_prompts(lengths, config["vocab_size"], options.device)

            ways = make_ways(model, reference, prompts)
            measured = measure(ways, options.rounds, options.device)
            real, filled = sum(lengths), len(lengths) * max(lengths)
            for name, (seconds, memory) in measured.items():
                speed, ratio = real / seconds, measured["filled"][0] / seconds
                numbers = (f"{seconds:.3f}", f"{speed:,.0f}", f"{ratio:.2f}x", f"{memory:.2f}" if is_gpu else "")
                columns = (real, filled, name, *numbers)
                print(f"{shape:>6}{run[:18]:>20}" + "".join(f"{value:>13}" for value in columns), flush=True)


if __name__ == "__main__":
    main()

"""DoLa and guidance beside greedy search, a row at a time, and beside transformers.

    python benchmarks/readouts.py [--new 128] [--prompt 64] [--rounds 3] [--reference-python PATH]

SmolLM2-135M's shape in float32 on the CPU, and the 1B shape in bfloat16 on the GPU where there is one (`--device`).
Random weights for both libraries. transformers 5.x has guidance; its DoLa is that of 4.52.4, in an environment of its
own: `--reference-python /path/to/its/bin/python`. Guidance is measured with a negative prompt of another length, too:
rows of different lengths read their keys through a mask.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

import torch
from families import SHAPES  # benchmarks/families.py
from gpu_step import make_model  # benchmarks/gpu_step.py

from unspool.api.starting import start

SMOLLM2 = {**SHAPES["SmolLM2-135M"][1], "max_position_embeddings": 8192, "rms_norm_eps": 1e-5}
ONE_BILLION = {
    **SMOLLM2,
    "vocab_size": 128_256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
TINY = {**SMOLLM2, "vocab_size": 512, "num_hidden_layers": 4}


def list_methods(ids: torch.Tensor) -> dict[str, dict[str, Any]]:
    """The settings of every line of the table."""
    half = ids[:, : ids.shape[1] // 2]
    return {
        "greedy": {},
        "guidance": {"guidance_scale": 1.5},
        "guidance, as long": {"guidance_scale": 1.5, "negative_prompt_ids": ids.flip(1)},
        "guidance, half": {"guidance_scale": 1.5, "negative_prompt_ids": half},
        "dola low": {"dola_layers": "low"},
        "dola high": {"dola_layers": "high"},
    }


def measure(model: Any, ids: torch.Tensor, num_new: int, settings: dict[str, Any]) -> float:
    """Milliseconds a token after the first."""
    run = start(model, ids, max_new_tokens=num_new, eos_token_id=None, **settings)
    for _ in run:
        pass
    return (run.stats.total_seconds - run.stats.first_token_seconds) / (num_new - 1) * 1e3


def ask_reference(python: str, methods: list[str], config: dict[str, Any], options: argparse.Namespace) -> Any:
    """The same measured with transformers, in another process; None where it can't run."""
    task = {
        "config": config,
        "device": options.device,
        "dtype": options.dtype,
        "prompt": options.prompt,
        "new": options.new,
        "rounds": options.rounds,
        "threads": options.threads,
        "methods": methods,
    }
    script = Path(__file__).with_name("readouts_reference.py")
    ended = subprocess.run([python, str(script), json.dumps(task)], capture_output=True, text=True, check=False)
    if ended.returncode:
        print(f"{python}: {ended.stderr.strip().splitlines()[-1]}", file=sys.stderr)
        return None
    return json.loads(ended.stdout.splitlines()[-1])


def read_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tiny", action="store_true", help="a shape that only shows that this runs")
    parser.add_argument("--reference-python", help="the Python of an environment with transformers 4.52.4, for DoLa")
    parser.add_argument("--no-reference", action="store_true")
    options = parser.parse_args()
    options.dtype = "bfloat16" if options.device == "cuda" else "float32"
    return options


def main() -> None:
    """Run and print the table."""
    options = read_options()
    torch.set_num_threads(options.threads)
    config = TINY if options.tiny else ONE_BILLION if options.device == "cuda" else SMOLLM2
    dtype = getattr(torch, options.dtype)
    described = {**config, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    model = make_model(described, device=options.device, dtype=dtype)
    ids = torch.randint(3, 500, (1, options.prompt), generator=torch.Generator().manual_seed(0)).to(options.device)
    methods = list_methods(ids)
    times: dict[str, list[float]] = {name: [] for name in methods}
    for round_number in range(options.rounds + 1):
        for name, settings in methods.items():
            took = measure(model, ids, options.new, settings)
            times[name] += [took] if round_number else []  # the first round warms up
    where = (
        torch.cuda.get_device_name() if options.device == "cuda" else f"{platform.machine()}, {options.threads} threads"
    )
    print(
        f"{date.today()} · {where} · torch {torch.__version__} · {config['num_hidden_layers']} layers of "
        f"{config['hidden_size']}, {options.dtype} · prompt {options.prompt}, {options.new} new tokens, batch 1, "
        f"{options.rounds} interleaved rounds, medians"
    )
    print(f"{'method':<20}{'ms a token':>12}{'of greedy':>11}")
    greedy = statistics.median(times["greedy"])
    for name, values in times.items():
        took = statistics.median(values)
        print(f"{name:<20}{took:>12.3f}{took / greedy:>10.2f}x")
    if options.no_reference:
        return
    asked = [(sys.executable, ["greedy", "guidance"])]
    asked += [(options.reference_python, ["greedy", "dola"])] if options.reference_python else []
    for python, names in asked:
        theirs = ask_reference(python, names, config, options)
        if theirs is not None:
            for name in names:
                label = f"transformers {theirs['version']} {name}"
                print(f"{label:<32}{theirs[name]:>8.3f}{theirs[name] / theirs['greedy']:>8.2f}x its greedy")


if __name__ == "__main__":
    main()

"""What a token costs through the adapter, beside transformers' own generate and the native model, in turns.

    OMP_NUM_THREADS=2 python benchmarks/adapter.py                     # CPU: SmolLM2-135M's shape, and a quarter of it
    python benchmarks/adapter.py --device cuda --dtype bfloat16
    python benchmarks/adapter.py --tiny --rounds 1 --new 8             # a smoke run

Weights are random. Every engine writes `--new` tokens after a prompt of `--prompt` tokens, `--rounds` times in turns;
the figure is the median time per token after the first, from runs of one and of all tokens.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers

import unspool

SMOLLM = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9, "kv": 3}
SMALL = {"hidden_size": 288, "intermediate_size": 768, "num_hidden_layers": 8, "num_attention_heads": 9, "kv": 3}
TINY = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 3, "kv": 3}
WORKS: dict[str, tuple[int, dict[str, Any]]] = {
    "greedy, 1 row": (1, {}),
    "greedy, 8 rows": (8, {}),
    "greedy, 8 ragged rows": (-8, {}),
    "sampling, 1 row": (1, {"do_sample": True, "top_k": 50, "top_p": 0.9}),
    "4 beams": (1, {"num_beams": 4}),
}


def main() -> None:
    """Print a table for every shape."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    for sizes in (TINY,) if arguments.tiny else (SMALL, SMOLLM):
        measure(sizes, arguments)


def measure(sizes: dict[str, int], arguments: argparse.Namespace) -> None:
    """One shape's table."""
    settings = {name: value for name, value in sizes.items() if name != "kv"}
    config = transformers.LlamaConfig(**settings, num_key_value_heads=sizes["kv"], vocab_size=49152, eos_token_id=None)
    dtype = getattr(torch, arguments.dtype)
    model = transformers.LlamaForCausalLM(config).to(arguments.device, dtype).eval()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        native = unspool.load(folder, device=arguments.device, dtype=dtype, quantize=None).model
    engines: dict[str, Callable[..., Any]] = {
        "transformers": model.generate,
        "adapter": lambda **asked: unspool.generate(model, **asked),
        "native": lambda **asked: unspool.generate(native, **asked),
    }
    print(f"\n{settings}, {arguments.dtype}, {arguments.device}, transformers {transformers.__version__}: ms per token")
    print(f"{'':<24}" + "".join(f"{name:>14}" for name in engines) + f"{'adapter/theirs':>16}")
    for work, (rows, settings) in WORKS.items():
        inputs = draw_inputs(rows, arguments)
        times: dict[str, list[float]] = {name: [] for name in engines}
        for turn in range(arguments.rounds + 1):
            for name, generate in engines.items():
                took = [time_call(generate, inputs, num_new, settings) for num_new in (1, arguments.new)]
                if turn:  # the first is a warm-up
                    times[name].append((took[1] - took[0]) / (arguments.new - 1) * 1000)
        medians = {name: statistics.median(values) for name, values in times.items()}
        ratio = medians["adapter"] / medians["transformers"]
        print(f"{work:<24}" + "".join(f"{value:>14.2f}" for value in medians.values()) + f"{ratio:>16.2f}")


def draw_inputs(rows: int, arguments: argparse.Namespace) -> dict[str, torch.Tensor]:
    """Prompts; a negative number of rows means rows of different lengths."""
    ids = torch.randint(3, 49152, (abs(rows), arguments.prompt), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    for row in range(-rows):
        mask[row, : row * arguments.prompt // 10] = 0
    return {"input_ids": ids.to(arguments.device), "attention_mask": mask.to(arguments.device)}


def time_call(generate: Callable[..., Any], inputs: dict[str, torch.Tensor], num_new: int, settings: Any) -> float:
    """Seconds of one call."""
    defaults = {"do_sample": False, "max_new_tokens": num_new, "pad_token_id": 0}
    started = time.perf_counter()
    generate(**inputs, **{**defaults, **settings})
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()

"""What quantised weights cost in quality: perplexity of the default model on a fixed text, and their bytes.

    python benchmarks/weight_quality.py [--text FILE] [--tokens 1000] [--device cuda]

"Exact products" multiply the numbers that the blocks stand for. "4-bit products of rounded inputs" are what a GPU does
for one row of 16-bit floats: what 4-bit numbers are multiplied by is rounded to 8 bits, block by block (reckoned here
with torch, in float32). The CPU library does that for 8-bit numbers too. Floats of 8 bits are reckoned with torch as
well: in the second column rows are rounded to 8 bits too, as a GPU does in prompts.

A change is given with its standard error: on the short text of this folder it is a quarter of a per cent, so changes
below half a per cent need a longer one (4,000 tokens of any prose).
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from cache_quality import TEXT  # benchmarks/cache_quality.py

import unspool
from unspool.kernels.cpu import find_library
from unspool.kernels.cpu.blocks import BLOCK
from unspool.kernels.gpu.products.words import round_rows_plainly
from unspool.models import weights


def measure(lm: Any, text: str, num_tokens: int) -> torch.Tensor:
    """How unlikely each token of the text is (its negative log-probability), read at once: (tokens - 1,)."""
    ids = torch.tensor([lm.tokenizer.encode(text)[:num_tokens]], device=lm.model.device)
    with torch.no_grad():
        logits = lm.model(ids).logits[0, :-1].float()
    return torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none").cpu()


def describe(found: torch.Tensor, exact: torch.Tensor) -> list[str]:
    """The perplexity, and how far it is from the exact one, with the standard error of that."""
    change = found - exact
    error = float(change.std()) / math.sqrt(len(change))
    return [f"{math.exp(found.mean()):.3f}", f"{100 * math.expm1(change.mean()):+.2f} ± {100 * error:.2f} %"]


def round_blocks(x: torch.Tensor) -> torch.Tensor:
    """Blocks of 32 numbers as whole numbers from -127 to 127 of their greatest."""
    blocks = x.reshape(-1, BLOCK)
    step = (blocks.abs().amax(1, keepdim=True) / 127).clamp(min=1e-30)
    return ((blocks / step).round() * step).view(x.shape)


def multiply_rounded(linear: Any, x: torch.Tensor) -> torch.Tensor:
    """A product as a GPU makes it for one row."""
    return torch.nn.functional.linear(round_blocks(x) if linear.kind == "int4" else x, linear.weight, linear.bias)


def measure_floats(lm: Any, text: str, num_tokens: int) -> list[torch.Tensor]:
    """A plain model with its layers' matrices as floats of 8 bits: with exact rows, and with rounded ones."""
    matrices = [getattr(layer, part) for layer in lm.model.weights.layers for part in ("qkv", "out", "up", "down")]
    for linear in matrices:
        linear.weight = weights.WordLinear.round(linear.weight).weight
    rounded, call = {id(linear) for linear in matrices}, weights.Linear.__call__

    def multiply(linear: Any, x: torch.Tensor) -> torch.Tensor:
        if id(linear) in rounded:
            numbers, scales = round_rows_plainly(x.reshape(-1, x.shape[-1]))
            dealt = numbers.float().view(len(numbers), -1, BLOCK // 4, 4).transpose(2, 3)
            x = (dealt.reshape(len(numbers), -1) * scales).view(x.shape)
        return call(linear, x)

    lm.model.paths = []
    found = [measure(lm, text, num_tokens)]
    weights.Linear.__call__ = multiply
    found.append(measure(lm, text, num_tokens))
    weights.Linear.__call__ = call
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    print(
        "| weights | MB | exact products | change | 4-bit products of rounded inputs | change | CPU library | change |",
        "|---|---|---|---|---|---|---|---|",
        sep="\n",
    )
    text, exact = options.text.read_text(encoding="utf-8"), None
    call = weights.PackedLinear.__call__
    for name, quantize in (("plain", None), ("the file's blocks", "auto"), ("int8", "int8"), ("int4", "int4")):
        lm = unspool.load(device=options.device, quantize=quantize)
        cells = [name, f"{lm.model.weights_bytes / 1e6:.0f}"]
        for way in ("exact", "rounded", "library"):
            if way != "exact" and (options.device != "cpu" or quantize is None):
                continue
            if way == "library" and find_library() is None:
                continue
            paths = lm.model.paths
            if way != "library" and options.device == "cpu":
                weights.find_library, lm.model.paths = lambda: None, []
            if way == "rounded":
                weights.PackedLinear.__call__ = multiply_rounded
            found = measure(lm, text, options.tokens)
            weights.find_library, lm.model.paths, weights.PackedLinear.__call__ = find_library, paths, call
            exact = found if exact is None else exact
            cells += describe(found, exact)
        print("| " + " | ".join(cells) + " |", flush=True)
    if options.device == "cpu":
        assert exact is not None
        lm = unspool.load(device="cpu", quantize=None)
        both = [cell for found in measure_floats(lm, text, options.tokens) for cell in describe(found, exact)]
        print("| " + " | ".join(["fp8", "", *both]) + " |", flush=True)


if __name__ == "__main__":
    main()

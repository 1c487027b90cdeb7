"""What quantised weights cost in quality: perplexity of the default model on a fixed text, and their bytes.

    python benchmarks/weight_quality.py [--tokens 1000] [--device cuda]

"Exact products" multiply the numbers that the blocks stand for, as a GPU does; the CPU library also rounds what is
multiplied by them to 8 bits, block by block.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import torch
from cache_quality import TEXT  # benchmarks/cache_quality.py

import unspool
from unspool.kernels.cpu import find_library
from unspool.models import weights


def measure(lm: Any, num_tokens: int) -> float:
    """Perplexity of the text, read at once."""
    ids = torch.tensor([lm.tokenizer.encode(TEXT.read_text(encoding="utf-8"))[:num_tokens]], device=lm.model.device)
    logits = lm.model(ids).logits[0, :-1].float()
    return math.exp(float(torch.nn.functional.cross_entropy(logits, ids[0, 1:])))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    print("| weights | MB | exact products | change | CPU library | change |\n|---|---|---|---|---|---|")
    exact = 0.0
    for name, quantize in (("plain", None), ("the file's blocks", "auto"), ("int8", "int8"), ("int4", "int4")):
        lm = unspool.load(device=options.device, quantize=quantize)
        cells = [name, f"{lm.model.weights_bytes / 1e6:.0f}"]
        library = find_library()
        for has_library in (False, True):
            if has_library and (options.device != "cpu" or library is None or quantize is None):
                continue
            if not has_library and options.device == "cpu":
                weights.find_library, whole, lm.model._whole = lambda: None, lm.model._whole, None
            found = measure(lm, options.tokens)
            if not has_library and options.device == "cpu":
                weights.find_library, lm.model._whole = find_library, whole
            exact = exact or found
            cells += [f"{found:.3f}", f"{100 * (found / exact - 1):+.2f} %"]
        print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()

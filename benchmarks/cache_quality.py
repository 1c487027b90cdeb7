"""What packing costs in quality: perplexity of the default model on a fixed text, by bits.

    python benchmarks/cache_quality.py [--tokens 1000] [--piece 16] [--bits 8 4 2] [--residuals 128 0]

The text is read in pieces, each after what the cache holds of those before: so every token is predicted from packed
positions, except the last `residual_length` and those of its own piece. The first row is the exact cache.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import torch

import unspool
from unspool.protocols import Want

TEXT = Path(__file__).parent / "texts" / "harbour.txt"


def measure(model: Any, ids: torch.Tensor, piece: int, kind: str, config: dict[str, Any] | None) -> tuple[float, int]:
    """Perplexity of ids (1, length) read in pieces, and the bytes that the cache takes in the end."""
    cache = model.new_cache(kind, 1, ids.shape[1], config=config)
    loss, want = 0.0, Want("all")
    for start in range(0, ids.shape[1] - 1, piece):
        part = ids[:, start : min(start + piece, ids.shape[1] - 1)]
        logits = model.forward(part, cache, want=want).logits[0].float()
        targets = ids[0, start + 1 : start + 1 + part.shape[1]]
        loss += float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
    return math.exp(loss / (ids.shape[1] - 1)), cache.nbytes


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--piece", type=int, default=16)
    parser.add_argument("--residuals", type=int, nargs="+", default=[128, 0])
    parser.add_argument("--bits", type=int, nargs="+", default=[8, 4, 2])
    parser.add_argument("--groups", type=int, nargs="+", default=[64])
    options = parser.parse_args()
    lm = unspool.load(quantize=None)
    ids = torch.tensor([lm.tokenizer.encode(TEXT.read_text(encoding="utf-8"))[: options.tokens]])
    exact, _ = measure(lm.model, ids, options.piece, "dynamic", None)
    print(f"{ids.shape[1]} tokens in pieces of {options.piece}\n")
    print("| bits | keys | values | group | residual | perplexity | change |\n|---|---|---|---|---|---|---|")
    print(f"| {8 * torch.finfo(lm.model.dtype).bits // 8} | as they are | as they are | | | {exact:.3f} | |")
    for residual in options.residuals:
        for group in options.groups:
            for nbits in options.bits:
                for axis, keys in ((0, "by channel"), (1, "by token")):
                    config = {
                        "nbits": nbits,
                        "axis_key": axis,
                        "axis_value": 1,
                        "q_group_size": group,
                        "residual_length": residual,
                    }
                    found, _ = measure(lm.model, ids, options.piece, "quantized", config)
                    print(
                        f"| {nbits} | {keys} | by token | {group} | {residual} | {found:.3f} "
                        f"| {100 * (found / exact - 1):+.2f} % |",
                        flush=True,
                    )


if __name__ == "__main__":
    main()

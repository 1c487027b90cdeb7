"""transformers' contrastive search in its own interpreter: started by `benchmarks/contrastive.py`.

Reads a line of JSON with the model's config and the sizes, answers "ready", and for every further line runs one round
of the method it names and answers with its milliseconds per token. Releases after 4.52 have no contrastive search.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
import transformers


def main() -> None:
    """Serve rounds until the input ends."""
    asked: dict[str, Any] = json.loads(sys.stdin.readline())
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(asked["threads"])
    device, dtype = torch.device(asked["device"]), getattr(torch, asked["dtype"])
    config = transformers.LlamaConfig(**asked["config"])
    with torch.device(device):
        model = transformers.LlamaForCausalLM(config).to(dtype).eval()
    ids = torch.randint(0, 1000, (asked["batch"], asked["prompt"]), device=device)
    print(f"ready transformers {transformers.__version__}, torch {torch.__version__}", flush=True)
    for line in sys.stdin:
        how = {"penalty_alpha": 0.6, "top_k": asked["top_k"]} if line.strip() == "contrastive" else {}
        started = time.perf_counter()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            max_new_tokens=asked["new"],
            **how,
        )
        if device.type == "cuda":
            torch.cuda.synchronize()
        print((time.perf_counter() - started) / asked["new"] * 1e3, flush=True)


if __name__ == "__main__":
    main()

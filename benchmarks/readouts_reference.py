"""What transformers takes for a token, greedy, guided or with DoLa: run by benchmarks/readouts.py, in any environment.

    python benchmarks/readouts_reference.py '{"config": {…}, "device": "cpu", "prompt": 64, …}'

A Llama with random weights of the given shape: speed does not depend on their values. Prints one line of JSON.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

import torch
import transformers

METHODS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "guidance": {"guidance_scale": 1.5},
    "dola": {"dola_layers": "low"},
}


def measure(model: Any, ids: torch.Tensor, num_new: int, settings: dict[str, Any]) -> float:
    """Milliseconds a new token, by the difference of a long and a short run: the prompt's reading falls out."""

    def run(length: int) -> float:
        started = time.perf_counter()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=length,
            min_new_tokens=length,
            do_sample=False,
            **settings,
        )
        if ids.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - started

    short = max(2, num_new // 8)
    run(short)
    return (run(num_new) - run(short)) / (num_new - short) * 1e3


def main() -> None:
    """Measure the methods asked for, interleaved."""
    task = json.loads(sys.argv[1])
    torch.set_num_threads(task["threads"])
    torch.manual_seed(0)
    dtype = getattr(torch, task["dtype"])
    config = transformers.LlamaConfig(**task["config"], torch_dtype=dtype)
    with torch.device(task["device"]):
        model = transformers.LlamaForCausalLM._from_config(config, torch_dtype=dtype).eval()
    ids = torch.randint(3, 500, (1, task["prompt"]), device=task["device"])
    times: dict[str, list[float]] = {name: [] for name in task["methods"]}
    for _ in range(task["rounds"]):
        for name in task["methods"]:
            times[name].append(measure(model, ids, task["new"], METHODS[name]))
    medians = {name: statistics.median(values) for name, values in times.items()}
    print(json.dumps({"version": transformers.__version__, **medians}))


if __name__ == "__main__":
    main()

"""Beam search of large shapes on a GPU beside transformers: `python benchmarks/gpu_beams.py --shapes 1B 8B`."""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from gpu_step import make_config, make_weights  # benchmarks/gpu_step.py

import unspool
from unspool.models.registry import build_model
from unspool.models.weights import MemorySource


def measure(function: Any) -> tuple[float, float]:
    """Seconds of the second call, and the most memory it took beyond what was there, in GB."""
    function()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    started = time.perf_counter()
    function()
    torch.cuda.synchronize()
    return time.perf_counter() - started, (torch.cuda.max_memory_allocated() - before) / 1e9


@torch.no_grad()
def main() -> None:
    """Print a row for each shape, batch and prompt."""
    import transformers

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=["1B"])
    parser.add_argument("--runs", nargs="+", default=["1x512", "8x512", "1x2048"], help="batch x prompt")
    parser.add_argument("--beams", type=int, default=4)
    parser.add_argument("--new", type=int, default=128)
    options = parser.parse_args()
    common = {"num_beams": options.beams, "max_new_tokens": options.new, "eos_token_id": None, "pad_token_id": 0}
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, transformers {transformers.__version__}, bf16")
    print(f"{'shape':>6}{'run':>8}{'unspool s':>11}{'theirs s':>10}{'ratio':>8}{'peak GB':>9}{'theirs':>8}")
    for shape in options.shapes:
        config, weights = make_config(shape), make_weights(make_config(shape))
        model = build_model(
            config, MemorySource(weights), is_gguf=False, device=torch.device("cuda"), dtype=torch.bfloat16
        )
        settings = {name: value for name, value in config.items() if name not in ("architectures", "model_type")}
        with torch.device("meta"):
            reference = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings)).to(torch.bfloat16)
        reference = reference.to_empty(device="cuda").eval()
        reference.load_state_dict(weights, strict=False)
        reference.model.rotary_emb = type(reference.model.rotary_emb)(reference.config).to("cuda")
        reference.tie_weights()
        for run in options.runs:
            batch, prompt = map(int, run.split("x"))
            ids = torch.randint(1, 1000, (batch, prompt), device="cuda")
            ours, mine = measure(lambda ids=ids, model=model: unspool.generate(model, ids, **common))
            theirs, other = measure(
                lambda ids=ids, reference=reference: reference.generate(
                    ids, attention_mask=torch.ones_like(ids), do_sample=False, **common
                )
            )
            print(f"{shape:>6}{run:>8}{ours:>11.2f}{theirs:>10.2f}{theirs / ours:>7.2f}x{mine:>9.2f}{other:>8.2f}")


if __name__ == "__main__":
    main()

"""A decoding step of several families' shapes on a CPU, through `generate`, over the bytes that it reads.

    OMP_NUM_THREADS=1 UNSPOOL_NUM_THREADS=1 python benchmarks/cpu_families.py --forms float32 int8 int4

Random weights under the names and shapes that transformers' classes have; models of two sizes, a Llama among each. Time
is the processor's (`--wall`: the clock's, on an idle machine), of a step alone: a long call less a short one.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import unspool
from unspool.models.registry import build_model
from unspool.models.weights import MemorySource, iterate_tensors

_SMALL = {"vocab_size": 50_257, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
_LARGE = {"vocab_size": 64_000, "hidden_size": 1152, "num_hidden_layers": 12, "num_attention_heads": 4, "head_dim": 256}
# name: (its family, the sizes in its config.json); a Llama begins each group
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama-124M": (
        "llama",
        {**_SMALL, "intermediate_size": 2048, "num_key_value_heads": 12, "tie_word_embeddings": True},
    ),
    "GPT-2": ("gpt2", {"vocab_size": 50_257, "n_embd": 768, "n_layer": 12, "n_head": 12}),
    "Llama-wide": (
        "llama",
        {
            **_LARGE,
            "intermediate_size": 6912,
            "num_key_value_heads": 1,
            "num_attention_heads": 16,
            "head_dim": 64,
            "tie_word_embeddings": True,
        },
    ),
    "Gemma-3": ("gemma3_text", {**_LARGE, "intermediate_size": 6912, "num_key_value_heads": 1, "sliding_window": 512}),
    "Gemma-2": ("gemma2", {**_LARGE, "intermediate_size": 6912, "num_key_value_heads": 2, "sliding_window": 512}),
    "GPT-2-wide": ("gpt2", {"vocab_size": 64_000, "n_embd": 1152, "n_layer": 16, "n_head": 18}),
}


def draw_weights(family: str, sizes: dict[str, Any]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """A config, and random tensors under the names that its class has."""
    config = AutoConfig.for_model(family, **sizes)
    with torch.device("meta"):
        reference = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(0)
    tied = set(getattr(reference, "_tied_weights_keys", None) or ()) if config.tie_word_embeddings else set()
    tensors = {
        name: torch.randn(held.shape, generator=generator) * 0.02 + (1.0 if held.dim() == 1 and "norm" in name else 0.0)
        for name, held in reference.state_dict().items()
        if name not in tied
    }
    return config.to_dict(), tensors


def cut(family: str, sizes: dict[str, Any], layers: int | None) -> tuple[str, dict[str, Any]]:
    """The same shape with fewer layers, if that is asked for."""
    name = "n_layer" if "n_layer" in sizes else "num_hidden_layers"
    return family, sizes | ({name: layers} if layers else {})


def count_read(model: Any) -> int:
    """The bytes of weights that a step reads: all but an embedding that is not the head too."""
    weights, head = model.weights, {tensor.data_ptr() for tensor in iterate_tensors(model.weights.head)}
    unread = [tensor for tensor in iterate_tensors(weights.embedding) if tensor.data_ptr() not in head]
    if weights.positions is not None:
        unread.append(weights.positions)
    return int(model.weights_bytes - sum(tensor.nbytes for tensor in unread))


def time_step(call: Callable[[int], object], few: int, many: int, clock: Callable[[], float]) -> float:
    """Seconds of a step."""
    times = [clock()]
    for count in (few, many):
        call(count)
        times.append(clock())
    return (times[2] - 2 * times[1] + times[0]) / (many - few)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--forms", nargs="+", default=["float32", "int8", "int4"], choices=["float32", "int8", "int4"])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--few", type=int, default=4)
    parser.add_argument("--many", type=int, default=28)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, help="so many only")
    parser.add_argument("--wall", action="store_true")
    options = parser.parse_args()
    clock = time.perf_counter if options.wall else time.process_time
    columns = ("form", "MB read", "ms/step", "ns/kB", "of Llama")
    print(f"{'model':>12}" + "".join(f"{name:>10}" for name in columns) + "   path")
    ids = torch.randint(1, 1000, (options.batch, options.context), generator=torch.Generator().manual_seed(1))

    def run(model: Any, count: int) -> Any:
        common: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        return unspool.generate(model, ids, max_new_tokens=count, return_dict_in_generate=True, **common)

    for form in options.forms:
        packing: Any = None if form == "float32" else form
        models: dict[str, Any] = {}
        for name in options.models:
            config, tensors = draw_weights(*cut(*SHAPES[name], options.layers))
            models[name] = build_model(config, MemorySource(tensors), dtype=torch.float32, packing=packing)
        paths = {name: run(model, 2).stats.path for name, model in models.items()}
        took = dict.fromkeys(models, float("inf"))
        for _ in range(options.rounds):  # they take turns, so that what else the machine does meets all of them
            for name, model in models.items():
                found = time_step(lambda count, model=model: run(model, count), options.few, options.many, clock)
                took[name] = min(took[name], found)
        llama = 0.0
        for name, model in models.items():
            read = count_read(model)
            share = took[name] / read
            llama = share if name.startswith("Llama") else llama
            cells = (form, f"{read / 1e6:.1f}", f"{took[name] * 1e3:.3f}", f"{share * 1e12:.1f}")
            cells += (f"{share / llama:.2f}" if llama else "",)
            print(f"{name:>12}" + "".join(f"{cell:>10}" for cell in cells) + f"   {paths[name]}", flush=True)


if __name__ == "__main__":
    main()

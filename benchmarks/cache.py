"""Bytes and speed of every kind of cache, beside transformers' kinds in the same run.

    python benchmarks/cache.py                          # CPU: a small shape, contexts of 1k, 8k and 32k
    python benchmarks/cache.py --device cuda            # the 8B shape in bfloat16, up to 128k
    python benchmarks/cache.py --contexts 64,128 --batch 1 --steps 3 --tiny     # a smoke run

Weights are random. A context is read in chunks, then `--steps` tokens are decoded one by one. `ratio` is the bytes of
the cache over those of the keys and values themselves; `peak` is the GPU's allocated peak without the weights.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch

from unspool.cache import KINDS
from unspool.models.registry import build_model
from unspool.models.weights import MemorySource

TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "kv": 2}
SMALL = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 12, "num_attention_heads": 9, "kv": 3}
LARGE = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "kv": 8}
WINDOW = 1024  # of the models with windows, and of sinks
THEIRS = ("DynamicCache", "StaticCache")


def main() -> None:
    """Print a table for every context and batch."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--contexts", default=None, help="comma-separated numbers of tokens")
    parser.add_argument("--batch", default="1,8")
    parser.add_argument("--kinds", default=None, help="comma-separated; all by default")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--chunk", type=int, default=1024)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--no-reference", action="store_true")
    arguments = parser.parse_args()
    on_gpu = arguments.device.startswith("cuda")
    sizes = TINY if arguments.tiny else LARGE if on_gpu else SMALL
    dtype = torch.bfloat16 if on_gpu else torch.float32
    default = "1024,8192,32768,131072" if on_gpu else "1024,8192,32768"
    contexts = [int(n) for n in (arguments.contexts or default).split(",")]
    kinds = arguments.kinds.split(",") if arguments.kinds else [kind for kind in KINDS if kind != "mamba"]
    for batch in (int(n) for n in arguments.batch.split(",")):
        for context in contexts:
            print(f"\nbatch {batch}, context {context}, {dtype}, {arguments.device}, {sizes}")
            print(f"{'kind':<26}{'MiB':>9}{'ratio':>7}{'prefill/s':>11}{'decode/s':>10}{'peak MiB':>10}")
            for kind in kinds:
                _measure_ours(kind, sizes, dtype, batch, context, arguments)
            if not arguments.no_reference:
                for name in THEIRS:
                    _measure_theirs(name, sizes, dtype, batch, context, arguments)


def _config(sizes: dict[str, int], context: int, windowed: bool) -> dict[str, Any]:
    plain = {name: value for name, value in sizes.items() if name != "kv"}
    name = "Mistral" if windowed else "Llama"
    config: dict[str, Any] = {
        **plain,
        "num_key_value_heads": sizes["kv"],
        "model_type": name.lower(),
        "architectures": [f"{name}ForCausalLM"],
        "vocab_size": 1024,
        "max_position_embeddings": context + 256,
    }
    return {**config, "sliding_window": WINDOW} if windowed else config


def _weights(sizes: dict[str, int], dtype: torch.dtype, device: str) -> dict[str, torch.Tensor]:
    hidden, ffn = sizes["hidden_size"], sizes["intermediate_size"]
    width = hidden // sizes["num_attention_heads"]
    generator = torch.Generator(device).manual_seed(0)

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=dtype) * 0.02

    weights = {"model.embed_tokens.weight": make(1024, hidden), "lm_head.weight": make(1024, hidden)}
    weights["model.norm.weight"] = torch.ones(hidden, dtype=dtype, device=device)
    for layer in range(sizes["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        weights[at + "input_layernorm.weight"] = torch.ones(hidden, dtype=dtype, device=device)
        weights[at + "post_attention_layernorm.weight"] = torch.ones(hidden, dtype=dtype, device=device)
        for name, shape in {
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (sizes["kv"] * width, hidden),
            "self_attn.v_proj": (sizes["kv"] * width, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (ffn, hidden),
            "mlp.up_proj": (ffn, hidden),
            "mlp.down_proj": (hidden, ffn),
        }.items():
            weights[f"{at}{name}.weight"] = make(*shape)
    return weights


def _measure_ours(
    kind: str, sizes: dict[str, int], dtype: torch.dtype, batch: int, context: int, arguments: argparse.Namespace
) -> None:
    windowed = kind in ("sliding_window", "hybrid")
    model = build_model(_config(sizes, context, windowed), MemorySource(_weights(sizes, dtype, arguments.device))).to(
        arguments.device, dtype
    )
    told = {"window_length": min(WINDOW, context), "num_sink_tokens": 4} if kind == "sink" else None
    sized = KINDS[kind].is_sized
    cache = model.new_cache(kind, batch, context + arguments.steps if sized else None, config=told)

    def read(tokens: torch.Tensor) -> None:
        first = 0
        while first < tokens.shape[1]:
            size = min(tokens.shape[1] - first, cache.longest_pass or tokens.shape[1])
            model.forward(tokens[:, first : first + size], cache)
            first += size

    _report(kind, read, lambda: cache.nbytes, sizes, dtype, batch, context, arguments)


def _measure_theirs(
    name: str, sizes: dict[str, int], dtype: torch.dtype, batch: int, context: int, arguments: argparse.Namespace
) -> None:
    import transformers

    config = _config(sizes, context, windowed=False)
    theirs = transformers.LlamaConfig(**{key: value for key, value in config.items() if key != "architectures"})
    model = transformers.LlamaForCausalLM(theirs).to(arguments.device, dtype).eval()
    if name == "StaticCache":
        cache = transformers.StaticCache(config=theirs, max_cache_len=context + arguments.steps)
    else:
        cache = transformers.DynamicCache()

    def read(tokens: torch.Tensor) -> None:
        model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)

    def size() -> int:
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)

    _report(f"transformers {name}", read, size, sizes, dtype, batch, context, arguments)


@torch.no_grad()
def _report(
    label: str,
    read: Any,
    size: Any,
    sizes: dict[str, int],
    dtype: torch.dtype,
    batch: int,
    context: int,
    arguments: argparse.Namespace,
) -> None:
    on_gpu = arguments.device.startswith("cuda")
    tokens = torch.randint(0, 1024, (batch, context), device=arguments.device)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    try:
        began = _now(on_gpu)
        for first in range(0, context, arguments.chunk):
            read(tokens[:, first : first + arguments.chunk])
        middle = _now(on_gpu)
        read(tokens[:, :1])  # what a first step prepares is no part of the others
        start = _now(on_gpu)
        for _ in range(arguments.steps - 1):
            read(tokens[:, :1])
        end = _now(on_gpu)
    except torch.OutOfMemoryError:
        print(f"{label:<26} out of memory")
        return
    width = sizes["hidden_size"] // sizes["num_attention_heads"]
    own = batch * (context + arguments.steps) * 2 * sizes["kv"] * width * sizes["num_hidden_layers"] * dtype.itemsize
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20 if on_gpu else float("nan")
    print(
        f"{label:<26}{size() / 2**20:>9.1f}{size() / own:>7.2f}{batch * context / (middle - began):>11.0f}"
        f"{batch * (arguments.steps - 1) / (end - start):>10.1f}{peak:>10.0f}",
        flush=True,
    )


def _now(on_gpu: bool) -> float:
    if on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    main()

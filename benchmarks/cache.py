"""Bytes and speed of every kind of cache, beside transformers' kinds in the same run.

    python benchmarks/cache.py                          # CPU: a small shape, contexts of 1k, 8k and 32k
    python benchmarks/cache.py --device cuda --fill     # the 8B shape in bfloat16, up to 128k
    python benchmarks/cache.py --ragged --batch 8 --kinds dynamic,static,paged  # rows of different lengths
    python benchmarks/cache.py --contexts 64,128 --batch 1 --steps 3 --tiny     # a smoke run

Weights are random. A context is read in chunks, then `--steps` tokens are decoded one by one; with `--fill` random
keys are put into the cache instead of reading a text, for contexts that take long to read. `ratio` is the bytes of the
cache over those of the keys and values themselves, in the model's dtype; `peak` is the GPU's allocated peak without
the weights; `path` says how decoding steps ran. With `--ragged` the last row has the whole context, the first one its
batch's part of it, and the others what lies between; for a paged cache bytes are those that its pool has taken.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from gpu_step import make_model  # benchmarks/gpu_step.py

from unspool.cache import KINDS, Cache, PagedCache

TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "kv": 2}
SMALL = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 12, "num_attention_heads": 9, "kv": 3}
LARGE = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "kv": 8}
WINDOW = 1024  # of the models with windows, and of sinks
THEIRS = ("DynamicCache", "StaticCache", "offloaded DynamicCache")


def main() -> None:
    """Print a table for every context and batch."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--contexts", default=None, help="comma-separated numbers of tokens")
    parser.add_argument("--batch", default="1,8")
    parser.add_argument("--kinds", default=None, help="comma-separated; all by default")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--chunk", type=int, default=1024)
    parser.add_argument("--fill", action="store_true", help="fill caches with random keys instead of reading a text")
    parser.add_argument("--resident", type=int, default=0, help="layers of offloaded kinds that stay on the GPU")
    parser.add_argument("--ragged", action="store_true", help="rows of different lengths, up to the context")
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
            print(f"{'kind':<36}{'MiB':>9}{'ratio':>7}{'prefill/s':>11}{'decode/s':>10}{'peak MiB':>10}  path")
            longest = max(contexts)
            for kind in kinds:
                _measure_ours(kind, sizes, dtype, batch, context, longest, arguments)
            for name in () if arguments.no_reference or arguments.ragged else THEIRS:
                if not on_gpu and "offloaded" in name:
                    continue  # theirs needs CUDA
                try:
                    _measure_theirs(name, sizes, dtype, batch, context, longest, arguments)
                except (AttributeError, RuntimeError, TypeError, ValueError) as error:  # another version's surface
                    print(f"transformers {name:<23} {type(error).__name__}: {error}", flush=True)


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
        "tie_word_embeddings": False,
    }
    return {**config, "sliding_window": WINDOW} if windowed else config


@lru_cache(maxsize=2)
def _build_ours(windowed: bool, is_tiny: bool, longest: int, dtype: torch.dtype, device: str) -> Any:
    sizes = TINY if is_tiny else LARGE if device.startswith("cuda") else SMALL
    torch.manual_seed(0)
    return make_model(_config(sizes, longest, windowed), device=device, dtype=dtype)


def _measure_ours(
    kind: str,
    sizes: dict[str, int],
    dtype: torch.dtype,
    batch: int,
    context: int,
    longest: int,
    arguments: argparse.Namespace,
) -> None:
    model = _build_ours(kind in ("sliding_window", "hybrid"), arguments.tiny, longest, dtype, arguments.device)
    config: dict[str, Any] | None = None
    if kind == "sink":
        config = {"window_length": min(WINDOW, context), "num_sink_tokens": 4}
    elif kind in ("offloaded", "offloaded_static") and arguments.resident:
        config = {"resident_layers": arguments.resident}
    room = context + arguments.steps if KINDS[kind].is_sized else None
    caches: list[Cache] = []
    path = ""

    def read(tokens: torch.Tensor, counts: list[int] | None = None) -> None:
        nonlocal path
        if counts is not None:
            model.forward(tokens, caches[0], counts=counts)
            return
        first = 0
        while first < tokens.shape[1]:
            size = min(tokens.shape[1] - first, caches[0].longest_pass or tokens.shape[1])
            path = model.forward(tokens[:, first : first + size], caches[0]).path
            first += size

    def fill(num_new: int, counts: list[int] | None = None) -> None:
        cache, heads, width = caches[0], sizes["kv"], sizes["hidden_size"] // sizes["num_attention_heads"]
        cache.attach(model._views)  # as a pass does: a sink must know how the model enters positions
        while num_new and not (cache.is_endless and cache.seen_tokens >= 2 * WINDOW):  # it holds no more from there on
            size = min(num_new, cache.longest_pass or num_new)
            cache.begin(batch, size, counts, device=arguments.device)
            for layer in range(sizes["num_hidden_layers"]):
                kv = torch.randn(batch, size, 2, heads, width, device=arguments.device, dtype=dtype)
                cache.write(layer, kv)
            cache.end()
            num_new -= size

    def start() -> None:
        caches.append(model.new_cache(kind, batch, room, config=config))

    label = f"{kind}, {arguments.resident} resident" if config and "resident_layers" in config else kind

    def count_bytes() -> int:
        cache = caches[0]
        return cache.pool.nbytes if isinstance(cache, PagedCache) else cache.nbytes

    _report(label, start, read, fill, count_bytes, lambda: path, sizes, dtype, batch, context, arguments)


@lru_cache(maxsize=1)
def _build_theirs(is_tiny: bool, longest: int, dtype: torch.dtype, device: str) -> Any:
    import transformers

    sizes = TINY if is_tiny else LARGE if device.startswith("cuda") else SMALL
    config = _config(sizes, longest, windowed=False)
    theirs = transformers.LlamaConfig(**{key: value for key, value in config.items() if key != "architectures"})
    with torch.device(device):
        return transformers.LlamaForCausalLM(theirs).to(dtype).eval()


def _measure_theirs(
    name: str,
    sizes: dict[str, int],
    dtype: torch.dtype,
    batch: int,
    context: int,
    longest: int,
    arguments: argparse.Namespace,
) -> None:
    import transformers

    model = _build_theirs(arguments.tiny, longest, dtype, arguments.device)
    caches: list[Any] = []

    def start() -> None:
        if name == "StaticCache":
            caches.append(transformers.StaticCache(config=model.config, max_cache_len=context + arguments.steps))
        elif name == "DynamicCache":
            caches.append(transformers.DynamicCache())
        else:
            caches.append(transformers.DynamicCache(config=model.config, offloading=True))

    def read(tokens: torch.Tensor, counts: list[int] | None = None) -> None:  # noqa: ARG001 - its rows are alike
        model(tokens, past_key_values=caches[0], use_cache=True, logits_to_keep=1)

    def fill(num_new: int, counts: list[int] | None = None) -> None:  # noqa: ARG001 - likewise
        cache, width = caches[0], sizes["hidden_size"] // sizes["num_attention_heads"]
        first = cache.get_seq_length()
        extra = {"cache_position": torch.arange(first, first + num_new, device=arguments.device)}
        for layer in range(sizes["num_hidden_layers"]):
            keys, values = (
                torch.randn(batch, sizes["kv"], num_new, width, device=arguments.device, dtype=dtype) for _ in range(2)
            )
            cache.update(keys, values, layer, extra)

    def size() -> int:
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in caches[0].layers)

    label = f"transformers {name}"
    _report(label, start, read, fill, size, lambda: "", sizes, dtype, batch, context, arguments)


@torch.no_grad()
def _report(
    label: str,
    start: Callable[[], None],
    read: Callable[..., None],
    fill: Callable[..., None],
    size: Callable[[], int],
    path: Callable[[], str],
    sizes: dict[str, int],
    dtype: torch.dtype,
    batch: int,
    context: int,
    arguments: argparse.Namespace,
) -> None:
    on_gpu = arguments.device.startswith("cuda")
    tokens = torch.randint(0, 1024, (batch, context), device=arguments.device)
    lengths = [context * (row + 1) // batch if arguments.ragged else context for row in range(batch)]
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    try:
        start()
        began = _now(on_gpu)
        for first in range(0, context, arguments.chunk):
            some = tokens[:, first : first + arguments.chunk]
            counts = [min(max(0, length - first), some.shape[1]) for length in lengths] if arguments.ragged else None
            fill(some.shape[1], counts) if arguments.fill else read(some, counts)
        middle = _now(on_gpu)
        read(tokens[:, :1])  # what a first step prepares is no part of the others
        decoding = _now(on_gpu)
        for _ in range(arguments.steps - 1):
            read(tokens[:, :1])
        end = _now(on_gpu)
    except torch.OutOfMemoryError:
        print(f"{label:<36} out of memory", flush=True)
        return
    width = sizes["hidden_size"] // sizes["num_attention_heads"]
    own = (
        (sum(lengths) + batch * arguments.steps) * 2 * sizes["kv"] * width * sizes["num_hidden_layers"] * dtype.itemsize
    )
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20 if on_gpu else float("nan")
    prefill = "" if arguments.fill else f"{sum(lengths) / (middle - began):.0f}"
    print(
        f"{label:<36}{size() / 2**20:>9.1f}{size() / own:>7.2f}{prefill:>11}"
        f"{batch * (arguments.steps - 1) / (end - decoding):>10.1f}{peak:>10.0f}  {path()}",
        flush=True,
    )


def _now(on_gpu: bool) -> float:
    if on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    main()

"""Seconds from the start of a process to its first tokens on a GPU, with an empty and a full cache of kernels.

    python benchmarks/cold_start.py                    # a Llama of 1B, random weights
    python benchmarks/cold_start.py --shape tiny       # a smoke run

Every line is a process of its own, which imports unspool, loads a folder, and writes 10 greedy tokens after a prompt of
128, then 10 sampled ones. Seconds count from the end of torch's import; loading begins after "loader imported".
`TRITON_CACHE_DIR` is an empty folder for the first process, and the same folder for the second. `--watch` adds what was
compiled: a line per kernel.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 1024},
    "llama-1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 128_256},
}
HEADS = {"tiny": (4, 2), "llama-1b": (32, 8)}
NEW, PROMPT = 10, 128


def main() -> None:
    """Make a model's folder, and start the processes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="llama-1b")
    parser.add_argument("--sampled-first", action="store_true", help="sample in the first call")
    parser.add_argument("--watch", action="store_true", help="list what is compiled; importing Triton first costs time")
    parser.add_argument("--child", default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        measure(Path(arguments.child), arguments)
        return
    roomy = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=roomy if roomy.is_dir() else None) as folder:
        write_model(Path(folder), arguments.shape)
        for name in ("empty", "full"):
            call = [sys.executable, __file__, "--child", folder, *sys.argv[1:]]
            environment = {**os.environ, "TRITON_CACHE_DIR": str(Path(folder) / "kernels")}
            found = subprocess.run(call, env=environment, capture_output=True, text=True, check=False)
            print(f"{arguments.shape}, {name} cache:\n{found.stdout}{found.stderr[-2000:] if found.returncode else ''}")


def write_model(folder: Path, shape: str) -> None:
    """A Llama of random weights: a million numbers, again and again."""
    import torch

    sizes, (heads, kv_heads) = SHAPES[shape], HEADS[shape]
    hidden, inner, vocab = sizes["hidden_size"], sizes["intermediate_size"], sizes["vocab_size"]
    width = hidden // heads
    config = sizes | {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "max_position_embeddings": 8192, "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5, "dtype": "bfloat16",
    }  # fmt: skip
    shapes = {"model.embed_tokens": (vocab, hidden), "model.norm": (hidden,)}
    for layer in range(sizes["num_hidden_layers"]):
        start = f"model.layers.{layer}."
        shapes |= {start + name: (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {start + f"self_attn.{name}_proj": (rows * width, hidden) for name, rows in
                   (("q", heads), ("k", kv_heads), ("v", kv_heads))}  # fmt: skip
        shapes |= {start + "self_attn.o_proj": (hidden, hidden), start + "mlp.down_proj": (hidden, inner)}
        shapes |= {start + f"mlp.{name}_proj": (inner, hidden) for name in ("gate", "up")}
    numbers = memoryview((torch.randn(1 << 20) * 0.02).to(torch.bfloat16).view(torch.uint8).numpy())
    header: dict[str, Any] = {}
    end = 0
    for name, size in shapes.items():
        begin, end = end, end + 2 * math.prod(size)
        header[f"{name}.weight"] = {"dtype": "BF16", "shape": size, "data_offsets": [begin, end]}
    told = json.dumps(header).encode()
    told += b" " * (-len(told) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(told)) + told)
        for entry in header.values():
            begin, end = entry["data_offsets"]
            for first in range(begin, end, len(numbers)):
                file.write(numbers[: end - first])
    (folder / "config.json").write_text(json.dumps(config))


def measure(folder: Path, arguments: argparse.Namespace) -> None:
    """One process: its times, and what it compiled."""
    began = time.perf_counter()
    import torch

    started = time.perf_counter()
    print(f"  importing torch {started - began:.2f} s")
    import unspool

    device = "cuda" if torch.cuda.is_available() else "cpu"
    marks = [("unspool imported", time.perf_counter())]
    compiled: list[tuple[float, str]] = []
    if arguments.watch and device == "cuda":
        compiled = watch_compilers()
        marks.append(("triton imported", time.perf_counter()))
        torch.zeros(1, device=device)
        marks.append(("CUDA started", time.perf_counter()))
    _ = unspool.load  # it is imported when it is asked for
    marks.append(("loader imported", time.perf_counter()))
    model = unspool.load(str(folder), device=device, dtype="bfloat16", quantize=None).model
    marks.append(("loaded", time.perf_counter()))
    ids = torch.randint(3, 1000, (1, PROMPT), generator=torch.Generator().manual_seed(1)).to(device)
    manners: list[dict[str, Any]] = [{"do_sample": False}, {"do_sample": True, "temperature": 0.7, "seed": 1}]
    for settings in manners[::-1] if arguments.sampled_first else manners:
        name = "sampled" if settings["do_sample"] else "greedy"
        for number, _ in enumerate(unspool.stream(model, ids, max_new_tokens=NEW, eos_token_id=None, **settings), 1):
            if number in (1, 2, NEW):
                marks.append((f"{name} token {number}", time.perf_counter()))
    print("  " + ", ".join(f"{name} {at - started:.2f}" for name, at in marks) + " s")
    for line in sorted(compiled, key=lambda entry: entry[0]):
        print(f"    {line[0] - started:6.2f} s: {line[1]}")


def watch_compilers() -> list[tuple[float, str]]:
    """A list that gets a line for every kernel that Triton compiles, and for every launcher that a C compiler makes."""
    import triton.runtime.build as build
    from triton import knobs

    lines: list[tuple[float, str]] = []

    def listen(*, src: Any, metadata: Any, metadata_group: Any, times: Any, cache_hit: bool) -> None:  # noqa: ARG001 - Triton's own call
        stages = " ".join(f"{name} {took / 1000:.0f}" for name, took in times.lowering_stages)
        how = "from the cache" if cache_hit else f"frontend {times.ir_initialization / 1000:.0f} {stages} ms"
        lines.append((time.perf_counter(), f"{src.name}: {how}"))

    inner = build._build

    def make(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        made = inner(*args, **kwargs)
        lines.append((time.perf_counter(), f"{args[0]}: C compiler {(time.perf_counter() - began) * 1000:.0f} ms"))
        return made

    knobs.compilation.listener = listen
    build._build = make
    return lines


if __name__ == "__main__":
    main()

"""A decoding step on GGUF files of random weights, to be set beside llama.cpp's on the same files.

    python benchmarks/gguf_kinds.py --make /tmp/f16.gguf
    for kind in Q4_K_M Q5_K_M Q6_K; do llama-quantize /tmp/f16.gguf /tmp/$kind.gguf $kind; done
    python benchmarks/gguf_kinds.py /tmp/Q4_K_M.gguf /tmp/Q5_K_M.gguf /tmp/Q6_K.gguf --threads 2 --wall
    llama-bench -m /tmp/Q4_K_M.gguf -m /tmp/Q5_K_M.gguf -m /tmp/Q6_K.gguf -t 2 -p 0 -n 64 -r 5

Processor time without `--wall`; llama.cpp's: `time llama-bench -t 1 -p 0 -r 1` with `-n 80`, less that with `-n 16`.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch

import unspool

SIZES = {"hidden": 1024, "layers": 12, "ffn": 2816, "heads": 16, "kv_heads": 4, "vocab": 32_000}


def make(path: str, sizes: dict[str, int]) -> None:
    """Write a Llama of random float16 weights."""
    import gguf

    hidden, heads, kv = sizes["hidden"], sizes["heads"], sizes["kv_heads"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(sizes["layers"])
    writer.add_context_length(2048)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(sizes["ffn"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(sizes["vocab"])
    writer.add_rope_dimension_count(hidden // heads)
    writer.add_file_type(1)
    writer.add_string("tokenizer.ggml.model", "none")
    generator = np.random.default_rng(0)

    def matrix(name: str, rows: int, columns: int) -> None:
        numbers = generator.standard_normal((rows, columns), dtype=np.float32) * 0.02
        writer.add_tensor(f"{name}.weight", numbers.astype(np.float16))

    def norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(hidden, dtype=np.float32))

    for name in ("token_embd", "output"):
        matrix(name, sizes["vocab"], hidden)
    norm("output_norm")
    for layer in range(sizes["layers"]):
        start = f"blk.{layer}."
        for name, rows in (("q", hidden), ("k", kv * hidden // heads), ("v", kv * hidden // heads), ("output", hidden)):
            matrix(f"{start}attn_{name}", rows, hidden)
        matrix(f"{start}ffn_gate", sizes["ffn"], hidden)
        matrix(f"{start}ffn_up", sizes["ffn"], hidden)
        matrix(f"{start}ffn_down", hidden, sizes["ffn"])
        norm(f"{start}attn_norm")
        norm(f"{start}ffn_norm")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*")
    parser.add_argument("--make", metavar="FILE")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--wall", action="store_true")
    for name, size in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    options = parser.parse_args()
    if options.make:
        make(options.make, {name: getattr(options, name) for name in SIZES})
    clock = time.perf_counter if options.wall else time.process_time
    for file in options.files:
        model = unspool.load(file, threads=options.threads).model
        for batch in options.batches:
            ids = torch.randint(1, 1000, (batch, 8), generator=torch.Generator().manual_seed(1))

            def run(count: int, ids: torch.Tensor = ids, model: object = model) -> None:
                unspool.generate(
                    model, ids, max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
                )  # fmt: skip

            run(2)
            least = {
                8: float("inf"),
                40: float("inf"),
            }  # of each alone: a difference of two calls doubles what disturbs them
            for _ in range(options.rounds):
                for count in least:
                    before = clock()
                    run(count)
                    least[count] = min(least[count], clock() - before)
            took, size = (least[40] - least[8]) / 32, model.weights_bytes
            print(
                f"{file}: {size / 1e6:.1f} MB, {batch} rows, {took * 1e3:.2f} ms a step, {size / took / 1e9:.1f} GB/s"
            )


if __name__ == "__main__":
    main()

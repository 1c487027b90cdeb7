"""A decoding step of many families' real shapes on a GPU, through `generate`: `python benchmarks/families.py`.

Random weights in bfloat16 under the names and shapes that transformers' classes have. A step's time and its floor are
found as in `gpu_step.py`. `--profile` adds where a step's time goes, `--peer` transformers' own eager `generate`.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from gpu_profile import profile_step  # benchmarks/gpu_profile.py
from gpu_step import COMMON, count_bytes, measure_bandwidth, time_step  # benchmarks/gpu_step.py

import unspool
from unspool.models.registry import build_model
from unspool.models.weights import MemorySource, iterate_tensors

# model: (its family, the sizes in its config.json)
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3-8B": (
        "qwen3",
        {
            "vocab_size": 151_936,
            "hidden_size": 4096,
            "intermediate_size": 12_288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
        },
    ),
    "Qwen2.5-7B": (
        "qwen2",
        {
            "vocab_size": 152_064,
            "hidden_size": 3584,
            "intermediate_size": 18_944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
        },
    ),
    "OLMo-2-7B": (
        "olmo2",
        {
            "vocab_size": 100_352,
            "hidden_size": 4096,
            "intermediate_size": 11_008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
        },
    ),
    "Gemma-2-2B": (
        "gemma2",
        {
            "vocab_size": 256_000,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
        },
    ),
    "StarCoder2-3B": (
        "starcoder2",
        {
            "vocab_size": 49_152,
            "hidden_size": 3072,
            "intermediate_size": 12_288,
            "num_hidden_layers": 30,
            "num_attention_heads": 24,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
        },
    ),
    "BLOOM-3B": ("bloom", {"vocab_size": 250_880, "hidden_size": 2560, "n_layer": 30, "n_head": 32}),
    "Phi-2": (
        "phi",
        {
            "vocab_size": 51_200,
            "hidden_size": 2560,
            "intermediate_size": 10_240,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "partial_rotary_factor": 0.4,
        },
    ),
    "OPT-2.7B": (
        "opt",
        {
            "vocab_size": 50_272,
            "hidden_size": 2560,
            "word_embed_proj_dim": 2560,
            "ffn_dim": 10_240,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
        },
    ),
    "Pythia-2.8B": (
        "gpt_neox",
        {
            "vocab_size": 50_304,
            "hidden_size": 2560,
            "intermediate_size": 10_240,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "rotary_pct": 0.25,
        },
    ),
    "StableLM-3B": (
        "stablelm",
        {
            "vocab_size": 50_304,
            "hidden_size": 2560,
            "intermediate_size": 6912,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "partial_rotary_factor": 0.25,
        },
    ),
    "GPT-2-XL": ("gpt2", {"vocab_size": 50_257, "n_embd": 1600, "n_layer": 48, "n_head": 25}),
    "Llama-3.2-1B": (
        "llama",
        {
            "vocab_size": 128_256,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "tie_word_embeddings": True,
        },
    ),
    "Gemma-3-1B": (
        "gemma3_text",
        {
            "vocab_size": 262_144,
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "num_hidden_layers": 26,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "sliding_window": 512,
        },
    ),
    "Qwen3-0.6B": (
        "qwen3",
        {
            "vocab_size": 151_936,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "tie_word_embeddings": True,
        },
    ),
    "SmolLM2-135M": (
        "llama",
        {
            "vocab_size": 49_152,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "tie_word_embeddings": True,
        },
    ),
}
GOALS = ((5e9, 0.90), (2e9, 0.75), (0, 0.60))  # bytes of weights: the share of the floor wanted from there on


def make_reference(name: str, device: str) -> Any:
    """transformers' model of that shape, with its initial random weights; on "meta" without any."""
    import transformers

    family, sizes = SHAPES[name]
    config = transformers.AutoConfig.for_model(family, **sizes)
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def draw_weights(reference: Any) -> dict[str, torch.Tensor]:
    """Weights on the GPU: the model's own, or random ones of the same shapes if it has none."""
    state = dict(reference.state_dict())
    if reference.device.type != "meta":
        return state
    return {
        name: torch.randn(like.shape, device="cuda", dtype=torch.bfloat16) * 0.02
        for name, like in state.items()
        if like.is_floating_point()
    }


def find_floor(model: Any, batch: int, context: float, bandwidth: float) -> float:
    """Milliseconds that reading a step's weights and keys takes."""
    read = model.weights_bytes
    if not model.spec.is_head_tied:
        read -= sum(map(count_bytes, iterate_tensors(model.weights.embedding)))  # of which a step reads a row
    if model.weights.positions is not None:
        read -= count_bytes(model.weights.positions)
    spec = model.spec
    seen = sum(
        min(context, spec.window) if spec.kind_of(layer) == "sliding" and spec.window else context
        for layer in range(spec.num_layers)
    )
    keys = batch * seen * 2 * spec.num_kv_heads * spec.head_dim * 2
    return float((read + keys) / bandwidth * 1e3)


@torch.no_grad()
def main() -> None:
    """Print a row for each model and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--runs", nargs="+", default=["1x256"], help="batch x context")
    parser.add_argument("--few", type=int, default=8)
    parser.add_argument("--many", type=int, default=72)
    parser.add_argument("--peer", action="store_true", help="time transformers' eager generate too")
    parser.add_argument("--profile", action="store_true", help="print the kernels of a step")
    options = parser.parse_args()
    bandwidth = measure_bandwidth()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16, copy {bandwidth / 1e12:.2f} TB/s")
    columns = ("run", "GB", "first s", "ms/step", "floor", "of floor", "goal")
    print(f"{'model':>14}" + "".join(f"{name:>9}" for name in columns) + "   path, transformers ms/step (ratio)")
    for name in options.models:
        reference = make_reference(name, "cuda" if options.peer else "meta")
        weights = draw_weights(reference)
        model: Any = build_model(
            reference.config.to_dict(), MemorySource(weights), device=torch.device("cuda"), dtype=torch.bfloat16
        )
        del weights
        goal = next(share for size, share in GOALS if model.weights_bytes >= size)
        for run in options.runs:
            batch, context = map(int, run.split("x"))
            ids = torch.randint(1, 1000, (batch, context), device="cuda")

            def ours(count: int, ids: Any = ids, model: Any = model) -> Any:
                return unspool.generate(model, ids, max_new_tokens=count, return_dict_in_generate=True, **COMMON)

            started = time.perf_counter()
            ours(2)
            first = time.perf_counter() - started
            took = time_step(
                lambda count, ids=ids, model=model: unspool.generate(model, ids, max_new_tokens=count, **COMMON),
                options.few,
                options.many,
            )
            path = ours(options.few).stats.path  # of the last step: the prompt is read on another
            floor = find_floor(model, batch, context + (options.few + options.many) / 2, bandwidth)
            cells = (run, f"{model.weights_bytes / 1e9:.1f}", f"{first:.1f}", f"{took:.3f}", f"{floor:.3f}")
            cells += (f"{floor / took:.2f}", f"{goal:.2f}")
            print(f"{name:>14}" + "".join(f"{cell:>9}" for cell in cells) + f"   {path}", end="", flush=True)
            if options.peer:
                eager = time_step(
                    lambda count, ids=ids, reference=reference: reference.generate(
                        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, **COMMON
                    ),
                    4,
                    20,
                    rounds=1,
                )
                print(f", {eager:.2f} ({eager / took:.1f}x)", end="")
            print(flush=True)
            if options.profile:
                profile_step(model, batch, context)
        del model, reference
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

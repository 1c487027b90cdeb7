"""The decode step of large shapes on a GPU, and what sampling adds to it: `python benchmarks/gpu_step.py`.

Random weights in bfloat16: speed does not depend on their values. The floor is the bytes of weights and keys read a
step over the bandwidth that a copy reaches in the same run.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch

from logits import Sheet, make_chain  # benchmarks/logits.py: the chain as a call runs it
from unspool.models.registry import build_model
from unspool.models.weights import MemorySource

SHAPES = {
    "1B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32},
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
}


def make_config(shape: str) -> dict[str, Any]:
    """A Llama config of the given size."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128_256,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": shape == "1B",
        **SHAPES[shape],
    }


def make_weights(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Random weights under the names of the Hugging Face layout, on the GPU."""
    hidden, ffn, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    kv = hidden // heads * config["num_key_value_heads"]

    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, device="cuda", dtype=torch.bfloat16) * 0.02

    weights = {
        "model.embed_tokens.weight": random(config["vocab_size"], hidden),
        "model.norm.weight": torch.ones(hidden, device="cuda", dtype=torch.bfloat16),
    }
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = random(config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        for name, size in {
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (ffn, hidden),
            "mlp.up_proj": (ffn, hidden),
            "mlp.down_proj": (hidden, ffn),
        }.items():
            weights[f"{at}{name}.weight"] = random(*size)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{at}{name}.weight"] = torch.ones(hidden, device="cuda", dtype=torch.bfloat16)
    return weights


def measure(function: Any, repeats: int = 30) -> float:
    """The median of a call's milliseconds on the device."""
    times = []
    for _ in range(repeats + 5):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        function()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[5:])


def measure_bandwidth() -> float:
    """Bytes a second that a large copy moves."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / (measure(lambda: target.copy_(source)) / 1e3)


@torch.no_grad()
def main() -> None:
    """Print a row for each shape and batch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=["1B", "8B"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 64])
    parser.add_argument("--context", type=int, default=1024)
    options = parser.parse_args()
    bandwidth = measure_bandwidth()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16, copy {bandwidth / 1e12:.2f} TB/s")
    print(f"{'shape':>6}{'batch':>7}{'step ms':>10}{'floor ms':>10}{'of floor':>10}{'chain ms':>10}{'of step':>9}")
    for shape in options.shapes:
        config = make_config(shape)
        model = build_model(
            config, MemorySource(make_weights(config)), is_gguf=False, device=torch.device("cuda"), dtype=torch.bfloat16
        )
        for batch in options.batches:
            cache = model.new_cache("static", batch, options.context + 64)
            model.forward(torch.randint(0, 1000, (batch, options.context), device="cuda"), cache)
            lengths = list(cache.lengths)
            token = torch.randint(0, 1000, (batch, 1), device="cuda")

            def step(cache: Any = cache, token: Any = token, lengths: Any = lengths, model: Any = model) -> None:
                model.forward(token, cache)
                cache.truncate(lengths)

            chain, _ = make_chain(Sheet.make(batch, config["vocab_size"], options.context, "cuda"))
            floor = (model.weights_bytes + cache.nbytes) / bandwidth * 1e3
            took = measure(step)
            shaped = measure(chain)
            print(f"{shape:>6}{batch:>7}{took:>10.2f}{floor:>10.2f}{floor / took:>10.2f}", end="")
            print(f"{shaped:>10.2f}{shaped / took:>9.1%}")
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

"""A decoding step of large shapes on a GPU, end to end through `generate`: `python benchmarks/gpu_step.py --peer`.

Random weights in bfloat16: speed does not depend on their values. A step's time is the difference between a long and a
short call over the difference of their tokens, so that reading the prompt is left out. The floor is the bytes of
weights and keys read a step over the bandwidth that a copy reaches in the same run.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch

import unspool
from unspool.models.registry import build_model
from unspool.models.weights import MemorySource, iterate_tensors

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


def make_weights(
    config: dict[str, Any], device: str = "cuda", dtype: torch.dtype = torch.bfloat16
) -> dict[str, torch.Tensor]:
    """Random weights under the names of the Hugging Face layout."""
    hidden, ffn, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    kv = hidden // heads * config["num_key_value_heads"]

    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, device=device, dtype=dtype) * 0.02

    weights = {
        "model.embed_tokens.weight": random(config["vocab_size"], hidden),
        "model.norm.weight": torch.ones(hidden, device=device, dtype=dtype),
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
            weights[f"{at}{name}.weight"] = torch.ones(hidden, device=device, dtype=dtype)
    return weights


def build_native(
    config: dict[str, Any],
    weights: dict[str, torch.Tensor],
    device: str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    packing: str | None = None,
) -> Any:
    """The native model of a config over these weights."""
    source = MemorySource(weights)
    return build_model(config, source, is_gguf=False, device=torch.device(device), dtype=dtype, packing=packing)


def make_model(
    shape: str | dict[str, Any],
    packing: str | None = None,
    device: str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
) -> Any:
    """A Llama of the given size, or of a config, with random weights."""
    config = make_config(shape) if isinstance(shape, str) else shape
    return build_native(config, make_weights(config, device, dtype), device, dtype, packing)


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
    """The bandwidth of a large copy, in bytes per second."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / (measure(lambda: target.copy_(source)) / 1e3)


def time_call(function: Any) -> float:
    """Seconds of a call, to the end of its work on the device."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    function()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def time_step(generate: Any, few: int, many: int, rounds: int = 3) -> float:
    """Milliseconds per step: the cost of `many - few` more tokens."""
    generate(few)
    generate(many)
    differences = [time_call(lambda: generate(many)) - time_call(lambda: generate(few)) for _ in range(rounds)]
    return statistics.median(differences) / (many - few) * 1e3


def make_reference(config: dict[str, Any], weights: dict[str, torch.Tensor]) -> Any:
    """transformers' model with the same weights, where they are."""
    import transformers

    like = weights["model.norm.weight"]
    settings = {name: value for name, value in config.items() if name not in ("architectures", "model_type")}
    with torch.device("meta"):
        reference = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings)).to(like.dtype)
    reference = reference.to_empty(device=like.device).eval()
    reference.load_state_dict(weights, strict=False)
    reference.model.rotary_emb = type(reference.model.rotary_emb)(reference.config).to(like.device)
    reference.tie_weights()
    return reference


def count_bytes(tensor: torch.Tensor) -> int:
    """The memory a tensor takes."""
    return tensor.numel() * tensor.element_size()


COMMON = {"eos_token_id": None, "pad_token_id": 0}
SAMPLING = {"do_sample": True, "temperature": 0.8, "top_k": 50, "top_p": 0.9, "seed": 1}


@torch.no_grad()
def main() -> None:
    """Print a row for each shape, batch and context."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=["1B", "8B"])
    parser.add_argument("--runs", nargs="+", default=["1x256", "1x4096", "8x1024", "64x1024"], help="batch x context")
    parser.add_argument("--quantize", choices=["int8", "int4", "fp8"], help="weights of so many bits")
    parser.add_argument("--few", type=int, default=16)
    parser.add_argument("--many", type=int, default=144)
    parser.add_argument("--peer", action="store_true", help="time transformers' eager generate too")
    parser.add_argument("--compiled", action="store_true", help="and its static cache with torch.compile (minutes)")
    options = parser.parse_args()
    bandwidth = measure_bandwidth()
    kept = options.quantize or "bf16"
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {kept}, copy {bandwidth / 1e12:.2f} TB/s")
    columns = ("shape", "run", "first s", "ms/step", "floor", "of floor", "sampling", "greedy/s.", "tok/s")
    print("".join(f"{name:>10}" for name in columns) + "   transformers ms/step (ratio), compiled")
    for shape in options.shapes:
        config = make_config(shape)
        weights = make_weights(config)
        model = build_native(config, weights, packing=options.quantize)
        reference = make_reference(config, weights) if options.peer or options.compiled else None
        read = model.weights_bytes
        if not config["tie_word_embeddings"]:
            read -= sum(map(count_bytes, iterate_tensors(model.weights.embedding)))  # of which a step reads a row
        for run in options.runs:
            batch, context = map(int, run.split("x"))
            ids = torch.randint(1, 1000, (batch, context), device="cuda")

            def ours(count: int, ids: Any = ids, model: Any = model, **more: Any) -> None:
                unspool.generate(model, ids, max_new_tokens=count, **{**COMMON, **more})

            ours(1)
            first = time_call(lambda: ours(2)) - time_call(lambda: ours(1))  # a step captured, or its kernels compiled
            took = time_step(ours, options.few, options.many)
            sampled = time_step(lambda count: ours(count, **SAMPLING), options.few, options.many)
            heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
            key_bytes = 4 * config["num_hidden_layers"] * kv * (config["hidden_size"] // heads)
            mean_context = context + (options.few + options.many) / 2
            floor = (read + batch * mean_context * key_bytes) / bandwidth * 1e3
            cells = (f"{first:.2f}", f"{took:.3f}", f"{floor:.3f}", f"{floor / took:.2f}", f"{sampled:.3f}")
            cells += (f"{took / sampled:.2f}", f"{batch / took * 1e3:.0f}")
            print("".join(f"{cell:>10}" for cell in (shape, run, *cells)), end="", flush=True)
            if reference is not None:
                mask = torch.ones_like(ids)

                def theirs(
                    count: int, ids: Any = ids, mask: Any = mask, reference: Any = reference, **more: Any
                ) -> None:
                    reference.generate(
                        ids, attention_mask=mask, do_sample=False, max_new_tokens=count, **{**COMMON, **more}
                    )

                eager = time_step(theirs, 4, 36, rounds=1)
                print(f"   {eager:.2f} ({eager / took:.2f}x)", end="", flush=True)
                if options.compiled and run == options.runs[0]:
                    static = time_step(
                        lambda count: theirs(count, cache_implementation="static"), options.few, options.many, rounds=1
                    )
                    print(f", {static:.2f} ({static / took:.2f}x)", end="")
            print(flush=True)
        del model, reference, weights
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

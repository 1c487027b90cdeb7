"""Mixtures of experts on a GPU: a step through `generate`, or how to cut its products.

`python benchmarks/gpu_mixtures.py` times steps of known shapes with random weights in bfloat16, cut to a few layers so
that they fit; the floor is what a step must read (of experts, the chosen ones) over the bandwidth of a copy.
`--tilings` times the kernels of experts one by one, each inside a CUDA graph over as many layers as outgrow the cache.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from gpu_step import measure_bandwidth, time_step  # benchmarks/gpu_step.py
from gpu_tilings import time_graph  # benchmarks/gpu_tilings.py

import unspool
from unspool.bench.floor import count_step_bytes
from unspool.kernels.gpu.experts import many_rows, one_row
from unspool.kernels.gpu.experts.fours import FourTiling, multiply_experts
from unspool.kernels.gpu.experts.many_fours import multiply_listed_fours
from unspool.kernels.gpu.experts.many_rows import GroupTiling, Lists
from unspool.kernels.gpu.experts.one_row import ExpertTiling
from unspool.kernels.gpu.experts.routing import Routes, find_routes
from unspool.kernels.gpu.launching import compile_ahead
from unspool.kernels.mx import MxWords
from unspool.models.registry import build_model
from unspool.models.weights import MemorySource

COMMON = {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "tie_word_embeddings": False}
SHAPES: dict[str, dict[str, Any]] = {
    "mixtral-8x7b": {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 8,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
    },
    "olmoe-1b-7b": {
        "model_type": "olmoe",
        "architectures": ["OlmoeForCausalLM"],
        "vocab_size": 50_304,
        "hidden_size": 2048,
        "intermediate_size": 1024,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_experts": 64,
        "num_experts_per_tok": 8,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss",
        "architectures": ["GptOssForCausalLM"],
        "vocab_size": 201_088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "quantization_config": {"quant_method": "mxfp4"},
    },
}
# name: hidden, ffn, experts, chosen
EXPERTS = {
    "mixtral-8x7b": (4096, 14_336, 8, 2),
    "qwen3-30b-a3b": (2048, 768, 128, 8),
    "olmoe-1b-7b": (2048, 1024, 64, 8),
    "gpt-oss-20b": (2880, 2880, 32, 4),
}


def make_weights(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Random weights, the experts of a layer in one tensor."""
    hidden, heads, kv_heads = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    width = config.get("head_dim") or hidden // heads
    inner = config.get("moe_intermediate_size") or config["intermediate_size"]
    experts = config.get("num_experts") or config["num_local_experts"]

    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, device="cuda", dtype=torch.bfloat16).mul_(0.02)

    weights = {
        "model.embed_tokens.weight": random(config["vocab_size"], hidden),
        "lm_head.weight": random(config["vocab_size"], hidden),
        "model.norm.weight": random(hidden) + 1,
    }
    sizes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (heads * width, hidden),
        "self_attn.k_proj.weight": (kv_heads * width, hidden),
        "self_attn.v_proj.weight": (kv_heads * width, hidden),
        "self_attn.o_proj.weight": (hidden, heads * width),
        "mlp.gate.weight": (experts, hidden),
        "mlp.experts.gate_up_proj": (experts, 2 * inner, hidden),
        "mlp.experts.down_proj": (experts, hidden, inner),
    }
    if config["model_type"] == "gpt_oss":
        return weights | make_gpt_oss_layers(config, random)
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if config["model_type"] == "qwen3_moe":
        norms |= {"self_attn.q_norm": width, "self_attn.k_norm": width}
    if config["model_type"] == "olmoe":
        norms |= {"self_attn.q_norm": heads * width, "self_attn.k_norm": kv_heads * width}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        weights |= {f"{at}{name}": random(*size) for name, size in sizes.items()}
        weights |= {f"{at}{name}.weight": random(size) + 1 for name, size in norms.items()}
    return weights


def make_gpt_oss_layers(config: dict[str, Any], random: Any) -> dict[str, torch.Tensor]:
    """gpt-oss's layers, their experts in MXFP4."""
    hidden, heads, kv_heads = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    width, inner, experts = config["head_dim"], config["intermediate_size"], config["num_local_experts"]
    weights: dict[str, torch.Tensor] = {}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        for name, outputs, inputs in (
            *(("self_attn.q_proj", heads * width, hidden), ("self_attn.k_proj", kv_heads * width, hidden)),
            *(("self_attn.v_proj", kv_heads * width, hidden), ("self_attn.o_proj", hidden, heads * width)),
            ("mlp.router", experts, hidden),
        ):
            weights |= {f"{at}{name}.weight": random(outputs, inputs), f"{at}{name}.bias": random(outputs)}
        weights |= {
            f"{at}{name}.weight": random(hidden) + 1 for name in ("input_layernorm", "post_attention_layernorm")
        }
        weights[f"{at}self_attn.sinks"] = random(heads)
        for name, outputs, inputs in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
            blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8, device="cuda")
            weights[f"{at}mlp.experts.{name}_blocks"] = blocks
            weights[f"{at}mlp.experts.{name}_scales"] = torch.full_like(blocks[..., 0], 119)
            weights[f"{at}mlp.experts.{name}_bias"] = random(experts, outputs)
    return weights


# --- steps -----------------------------------------------------------------------------------------------


def make_reference(config: dict[str, Any], weights: dict[str, torch.Tensor]) -> Any:
    """transformers' model with the same weights."""
    import transformers

    settings = {name: value for name, value in config.items() if name not in ("architectures", "model_type")}
    kind = config["architectures"][0].removesuffix("ForCausalLM")
    with torch.device("meta"):
        made = getattr(transformers, f"{kind}Config")(**settings)
        reference = getattr(transformers, f"{kind}ForCausalLM")(made).to(torch.bfloat16)
    reference = reference.to_empty(device="cuda").eval()
    reference.load_state_dict(weights, strict=False)
    reference.model.rotary_emb = type(reference.model.rotary_emb)(reference.config).to("cuda")
    return reference


def print_kernels(generate: Any, steps: int = 32) -> None:
    """Print the time of each kernel in a step, in microseconds, and how often it runs."""
    from torch.profiler import ProfilerActivity, profile

    generate(steps)
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        generate(steps)
        torch.cuda.synchronize()
    rows = sorted(profiled.key_averages(), key=lambda row: -row.self_device_time_total)
    for row in rows[:14]:
        print(f"      {row.self_device_time_total / steps:8.1f} us {row.count / steps:6.1f} x  {row.key[:90]}")


def measure_steps(name: str, runs: list[str], bandwidth: float, *, has_peer: bool, profiles: bool) -> None:
    """Print a step's time for each batch and context."""
    config = {**COMMON, **SHAPES[name]}
    weights = make_weights(config)
    model = build_model(config, MemorySource(weights), device="cuda", dtype=torch.bfloat16)
    reference = make_reference(config, weights) if has_peer else None
    del weights
    told: dict[str, Any] = {"eos_token_id": None, "pad_token_id": 0}
    for run in runs:
        rows, context = map(int, run.split("x"))
        ids = torch.randint(1, 1000, (rows, context), device="cuda")
        ours = time_step(lambda count, ids=ids: unspool.generate(model, ids, max_new_tokens=count, **told), 8, 72)
        floor = 1e3 * count_step_bytes(model, rows, context + 40) / bandwidth
        print(f"{name:>15} {run:>8} {ours:8.3f} ms, floor {floor:7.3f}, of it {floor / ours:.2f}", end="")
        if reference is not None:
            mask = torch.ones_like(ids)
            theirs = time_step(
                lambda count, ids=ids, mask=mask: reference.generate(
                    ids, attention_mask=mask, do_sample=False, max_new_tokens=count, **told
                ),
                2,
                18,
                rounds=1,
            )
            print(f", transformers {theirs:.2f} ({theirs / ours:.1f}x)", end="")
        print(flush=True)
        if profiles:
            print_kernels(lambda count, ids=ids: unspool.generate(model, ids, max_new_tokens=count, **told))


# --- tilings ---------------------------------------------------------------------------------------------

UPS = [
    ExpertTiling(*sizes)
    for sizes in [(4, 512, 2), (4, 1024, 4), (2, 1024, 4), (2, 2048, 4), (4, 2048, 8), (8, 512, 4), (1, 2048, 4)]
]
DOWNS = [
    ExpertTiling(*sizes)
    for sizes in [(4, 1024, 4), (8, 512, 4), (4, 256, 2), (8, 256, 4), (4, 512, 4), (2, 1024, 4), (16, 256, 8)]
]
GROUPS = [
    GroupTiling(*sizes)
    for sizes in [(32, 128, 4, 4), (64, 128, 4, 3), (64, 64, 4, 4), (128, 64, 4, 4), (32, 256, 4, 3), (64, 128, 8, 4)]
]


FOURS = [(8, 128, 4, 4), (4, 128, 4, 4), (8, 128, 2, 4), (16, 128, 2, 8), (8, 128, 8, 8), (4, 128, 8, 2), (8, 64, 4, 2)]


def make_fours(like: torch.Tensor) -> MxWords:
    """Random 4-bit floats of a matrix's shape."""
    rows, columns = like.shape
    words = torch.randint(-(2**31), 2**31 - 1, (rows, columns // 8), device="cuda").int()
    return MxWords(words, torch.full((rows, columns // 32), 119, dtype=torch.uint8, device="cuda"))


def measure_tilings(name: str, all_rows: list[int], bandwidth: float) -> None:
    """Print the time of each kernel and tiling; matrices of several layers, so that the cache has none of them."""
    hidden, inner, experts, _ = EXPERTS[name]
    count = max(2, min(16, int(24e9 / (3 * experts * hidden * inner * 2))))

    def random(*size: int) -> list[torch.Tensor]:
        return [torch.randn(*size, device="cuda", dtype=torch.bfloat16) for _ in range(count)]

    ups, downs = random(experts * 2 * inner, hidden), random(experts * hidden, inner)
    for rows in all_rows:
        measure_rows(name, rows, ups, downs, random(experts, hidden), bandwidth)


def measure_rows(
    name: str,
    rows: int,
    ups: list[torch.Tensor],
    downs: list[torch.Tensor],
    routers: list[torch.Tensor],
    bandwidth: float,
) -> None:
    """The same for one number of rows."""
    hidden, inner, experts, chosen = EXPERTS[name]
    count = len(ups)
    norm = torch.ones(hidden, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16)
    out = torch.zeros_like(x)
    all_routes = [Routes.make(rows, hidden, experts, chosen, x.device, x.dtype) for _ in range(count)]
    fed = torch.randn(rows * chosen, inner, device="cuda", dtype=torch.bfloat16)
    made = torch.zeros(rows * chosen, hidden, device="cuda", dtype=torch.bfloat16)
    lists = [Lists.make(experts, rows * chosen, x.device) for _ in range(count)]
    lengths = torch.zeros(rows, dtype=torch.int32, device="cuda")

    def route(place: int) -> None:
        find_routes(routers[place], x, all_routes[place], norm=norm, eps=1e-5)

    for place in range(count):
        route(place)
        if rows > 1:
            many_rows.list_pairs(all_routes[place], lengths, lists[place])
    torch.cuda.synchronize()
    read = sum(len(set(one.chosen.flatten().tolist())) for one in all_routes) / count
    floors = [read * 2 * hidden * inner * size / bandwidth * 1e6 for size in (2, 1)]
    took = time_graph(lambda: [route(place) for place in range(count)]) / count
    print(f"{name} {rows} rows: route {took:.2f} us; {read:.1f} experts read, floors {floors}")

    def report(part: str, floor: float, calls: list[tuple[Any, Any]]) -> None:
        with compile_ahead():
            for _, call in calls:
                call(0)
        found = []
        for tiling, call in calls:
            try:
                each = time_graph(lambda call=call: [call(place) for place in range(count)]) / count
                found.append((each, tuple(getattr(tiling, field) for field in tiling.__slots__)))
            except Exception as error:
                print(part, tiling, repr(error)[:200])
        print(
            f"   {part}:" + "".join(f" | {t:.1f} ({floor / t:.2f}) {sizes}" for t, sizes in sorted(found)[:7]),
            flush=True,
        )

    silu = 1
    if rows <= 8:
        report("up", floors[0], [
            (t, lambda p, t=t: one_row.feed_up(ups[p], all_routes[p], fed, silu, tiling=t)) for t in UPS
        ])  # fmt: skip
        report("down", floors[1], [
            (t, lambda p, t=t: one_row.feed_down(downs[p], all_routes[p], fed, out, adds=True, tiling=t))
            for t in DOWNS
        ])  # fmt: skip
    if name == "gpt-oss-20b":
        four_ups, four_downs = ([make_fours(one) for one in some[:6]] for some in (ups, downs))
        at = len(four_ups)
        fours = [FourTiling(*sizes) for sizes in FOURS]
        part = {"share": chosen, "activation": silu, "is_gated": True, "limit": 7.0, "gain": 1.702}
        report("fours up", floors[0] * 4.25 / 16, [
            (t, lambda p, t=t: multiply_experts(four_ups[p % at], x, all_routes[p], fed, t, **part)) for t in fours
        ])  # fmt: skip
        report("fours down", floors[1] * 4.25 / 16, [
            (t, lambda p, t=t: multiply_experts(four_downs[p % at], fed, all_routes[p], made, t, share=1))
            for t in fours
        ])  # fmt: skip
        if rows > 1:
            groups = [
                GroupTiling(*sizes) for sizes in [(64, 32, 4, 3), (32, 32, 4, 3), (64, 64, 8, 2), (128, 32, 8, 2)]
            ]
            report("many fours up", floors[0] * 4.25 / 16, [
                (t, lambda p, t=t: multiply_listed_fours(
                    four_ups[p % at], x, lists[p], fed, num_tokens=rows, tiling=t, **part
                ))
                for t in groups
            ])  # fmt: skip
    if rows > 1:
        report("many up", floors[0], [
            (t, lambda p, t=t: many_rows.multiply_lists(
                ups[p], x, lists[p], fed, share=chosen, num_tokens=rows, tiling=t, activation=silu, is_gated=True
            ))
            for t in GROUPS
        ])  # fmt: skip
        report("many down", floors[1], [
            (t, lambda p, t=t: many_rows.multiply_lists(
                downs[p], fed, lists[p], made, share=1, num_tokens=rows, tiling=t
            ))
            for t in GROUPS
        ])  # fmt: skip
        took = time_graph(
            lambda: [many_rows.list_pairs(r, lengths, one) for r, one in zip(all_routes, lists, strict=True)]
        )
        print(f"   lists {took / count:.2f} us", flush=True)


@torch.no_grad()
def main() -> None:
    """Print a line for each shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES))
    parser.add_argument("--runs", nargs="+", default=["1x256", "8x256", "64x256"], help="batch x context")
    parser.add_argument("--peer", action="store_true", help="time transformers too")
    parser.add_argument("--profile", action="store_true", help="print the kernels of a step")
    parser.add_argument("--tilings", nargs="+", type=int, help="time kernels, for these numbers of rows")
    options = parser.parse_args()
    bandwidth = measure_bandwidth()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {bandwidth / 1e12:.2f} TB/s")
    for name in options.shapes:
        if options.tilings:
            measure_tilings(name, options.tilings, bandwidth)
        else:
            measure_steps(name, options.runs, bandwidth, has_peer=options.peer, profiles=options.profile)


if __name__ == "__main__":
    main()

"""Models that GPU tests run, larger than the goldens' where kernels ask for it."""

from __future__ import annotations

from typing import Any

import torch

from unspool.models.registry import build_model
from unspool.models.weights import MemorySource


def make_model(window: int | None, dtype: torch.dtype, num_layers: int = 2, width: int = 32) -> Any:
    """A decoder of Llama's shape with heads of so many numbers, and random weights."""
    hidden, inner, heads, kv_heads, vocab = 128, 192, 4, 2, 96
    generator = torch.Generator().manual_seed(3)
    name = "Mistral" if window else "Llama"
    config: dict[str, Any] = {
        "model_type": name.lower(),
        "architectures": [f"{name}ForCausalLM"],
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": width,
        "max_position_embeddings": 1024,
        "sliding_window": window,
    }
    shapes = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (heads * width, hidden),
        "self_attn.k_proj": (kv_heads * width, hidden),
        "self_attn.v_proj": (kv_heads * width, hidden),
        "self_attn.o_proj": (hidden, heads * width),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    named = {
        f"model.layers.{layer}.{part}.weight": shape for layer in range(num_layers) for part, shape in shapes.items()
    }
    named |= {"model.embed_tokens.weight": (vocab, hidden), "lm_head.weight": (vocab, hidden)}
    named["model.norm.weight"] = (hidden,)
    weights = {part: torch.randn(shape, generator=generator) * 0.1 for part, shape in named.items()}
    return build_model(config, MemorySource(weights)).to("cuda", dtype)

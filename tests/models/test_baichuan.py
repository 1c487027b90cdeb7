"""Baichuan, which has no class in transformers, against a reference written out here."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from unspool.models.registry import build_model
from unspool.models.weights import MemorySource

HIDDEN, HEADS, FFN, LAYERS = 24, 6, 32, 2
WIDTH = HIDDEN // HEADS


def make(vocab: int, has_rope: bool) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    config = {
        "architectures": ["BaichuanForCausalLM"],
        "model_type": "baichuan",
        "vocab_size": vocab,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        **({"max_position_embeddings": 64} if has_rope else {"model_max_length": 64}),
    }
    shapes = {"model.embed_tokens": (vocab, HIDDEN), "lm_head": (vocab, HIDDEN), "model.norm": (HIDDEN,)}
    for i in range(LAYERS):
        shapes |= {
            f"model.layers.{i}.self_attn.W_pack": (3 * HIDDEN, HIDDEN),
            f"model.layers.{i}.self_attn.o_proj": (HIDDEN, HIDDEN),
            f"model.layers.{i}.mlp.gate_proj": (FFN, HIDDEN),
            f"model.layers.{i}.mlp.up_proj": (FFN, HIDDEN),
            f"model.layers.{i}.mlp.down_proj": (HIDDEN, FFN),
            f"model.layers.{i}.input_layernorm": (HIDDEN,),
            f"model.layers.{i}.post_attention_layernorm": (HIDDEN,),
        }
    generator = torch.Generator().manual_seed(0)
    weights = {f"{name}.weight": torch.randn(*shape, generator=generator) * 0.4 for name, shape in shapes.items()}
    return config, weights


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def turn(x: torch.Tensor) -> torch.Tensor:
    """Rope on the two halves of a head; x is (heads, length, width)."""
    angles = torch.arange(x.shape[1])[:, None] / 10_000 ** (torch.arange(0, WIDTH, 2) / WIDTH)
    a, b = x.chunk(2, -1)
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)


def slopes_for_six() -> list[float]:
    """Four heads' slopes, then every other one of eight heads'."""
    four = [2 ** (-8 / 4 * (i + 1)) for i in range(4)]
    eight = [2 ** (-8 / 8 * (i + 1)) for i in range(8)]
    return four + eight[0::2][:2]


def reference(tokens: torch.Tensor, w: dict[str, torch.Tensor], has_rope: bool, is_second: bool) -> torch.Tensor:
    x = w["model.embed_tokens.weight"][tokens]  # (length, hidden)
    length = len(tokens)
    hidden = torch.full((length, length), -math.inf).triu(1)
    bias = hidden if has_rope else hidden + torch.tensor(slopes_for_six())[:, None, None] * torch.arange(length)
    for i in range(LAYERS):
        at = f"model.layers.{i}."
        packed = norm(x, w[at + "input_layernorm.weight"]) @ w[at + "self_attn.W_pack.weight"].T
        q, k, v = (part.view(length, HEADS, WIDTH).transpose(0, 1) for part in packed.chunk(3, -1))
        q, k = (turn(q), turn(k)) if has_rope else (q, k)
        read = (q @ k.transpose(1, 2) / math.sqrt(WIDTH) + bias).softmax(-1) @ v
        x = x + read.transpose(0, 1).reshape(length, HIDDEN) @ w[at + "self_attn.o_proj.weight"].T
        y = norm(x, w[at + "post_attention_layernorm.weight"])
        gated = F.silu(y @ w[at + "mlp.gate_proj.weight"].T) * (y @ w[at + "mlp.up_proj.weight"].T)
        x = x + gated @ w[at + "mlp.down_proj.weight"].T
    head = w["lm_head.weight"]
    head = head / head.norm(dim=1, keepdim=True) if is_second else head
    return norm(x, w["model.norm.weight"]) @ head.T


@pytest.mark.parametrize("has_rope", [True, False], ids=["7b", "13b"])
@pytest.mark.parametrize("vocab", [97, 125_696], ids=["first", "second"])
def test_logits_equal_the_reference(has_rope: bool, vocab: int) -> None:
    config, weights = make(vocab, has_rope)
    model = build_model(config, MemorySource(weights))
    tokens = torch.randint(0, 97, (2, 11), generator=torch.Generator().manual_seed(1))
    ours = model(tokens).logits
    for row in range(2):
        expected = reference(tokens[row], weights, has_rope, vocab == 125_696)
        assert float((ours[row] - expected).abs().max()) < 1e-4
    assert model.info.max_context == (64 if has_rope else None)
    cache = model.new_cache(rows=2)
    steps = torch.stack([model.forward(tokens[:, i : i + 1], cache).logits for i in range(11)], 1)
    assert float((steps - ours).abs().max()) < 1e-4

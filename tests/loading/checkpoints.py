"""Small checkpoints that are written by hand: matrices large enough for torch to share their work among threads."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

SIZE, FFN, VOCAB, LAYERS = 256, 512, 300, 2
Shapes = dict[str, tuple[int, ...]]

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": SIZE,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}
GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": VOCAB,
    "n_embd": SIZE,
    "n_layer": LAYERS,
    "n_head": 4,
    "n_positions": 128,
}
T5 = {
    "architectures": ["T5ForConditionalGeneration"],
    "vocab_size": VOCAB,
    "d_model": SIZE,
    "d_kv": 64,
    "d_ff": FFN,
    "num_layers": LAYERS,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}


def _list_llama(num_layers: int = LAYERS) -> Shapes:
    shapes: Shapes = {"model.embed_tokens.weight": (VOCAB, SIZE), "lm_head.weight": (VOCAB, SIZE)}
    for layer in range(num_layers):
        start = f"model.layers.{layer}"
        shapes |= {f"{start}.self_attn.{name}_proj.weight": (SIZE, SIZE) for name in "qo"}
        shapes |= {f"{start}.self_attn.{name}_proj.weight": (SIZE // 2, SIZE) for name in "kv"}
        shapes |= {f"{start}.mlp.{name}_proj.weight": (FFN, SIZE) for name in ("gate", "up")}
        shapes |= {f"{start}.mlp.down_proj.weight": (SIZE, FFN)}
        shapes |= {f"{start}.{name}_layernorm.weight": (SIZE,) for name in ("input", "post_attention")}
    return shapes | {"model.norm.weight": (SIZE,)}


def _list_gpt2() -> Shapes:
    shapes: Shapes = {"transformer.wte.weight": (VOCAB, SIZE), "transformer.wpe.weight": (128, SIZE)}
    for layer in range(LAYERS):
        start = f"transformer.h.{layer}"
        products = {"attn.c_attn": (SIZE, 3 * SIZE), "attn.c_proj": (SIZE, SIZE)}
        products |= {"mlp.c_fc": (SIZE, 4 * SIZE), "mlp.c_proj": (4 * SIZE, SIZE)}
        for name, shape in products.items():
            shapes |= {f"{start}.{name}.weight": shape, f"{start}.{name}.bias": shape[1:]}
        shapes |= {f"{start}.{name}.{part}": (SIZE,) for name in ("ln_1", "ln_2") for part in ("weight", "bias")}
    return shapes | {f"transformer.ln_f.{part}": (SIZE,) for part in ("weight", "bias")}


def _list_t5() -> Shapes:
    shapes: Shapes = {"shared.weight": (VOCAB, SIZE)}
    for side in ("encoder", "decoder"):
        for layer in range(LAYERS):
            kinds = ["SelfAttention", *(["EncDecAttention"] if side == "decoder" else [])]
            for place, kind in enumerate(kinds):
                start = f"{side}.block.{layer}.layer.{place}"
                shapes |= {f"{start}.{kind}.{name}.weight": (SIZE, SIZE) for name in "qkvo"}
                shapes[f"{start}.layer_norm.weight"] = (SIZE,)
            start = f"{side}.block.{layer}.layer.{len(kinds)}"
            shapes |= {
                f"{start}.DenseReluDense.wi.weight": (FFN, SIZE),
                f"{start}.DenseReluDense.wo.weight": (SIZE, FFN),
            }
            shapes[f"{start}.layer_norm.weight"] = (SIZE,)
        shapes[f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"] = (32, 4)
        shapes[f"{side}.final_layer_norm.weight"] = (SIZE,)
    return shapes


CHECKPOINTS = {
    "llama": (LLAMA, _list_llama()),
    "deep": (LLAMA | {"num_hidden_layers": 24}, _list_llama(24)),
    "gpt2": (GPT2, _list_gpt2()),
    "t5": (T5, _list_t5()),
}


def write_checkpoint(folder: Path, name: str, dtype: torch.dtype) -> Path:
    """A folder in the Hugging Face layout with random weights; returns it."""
    config, shapes = CHECKPOINTS[name]
    generator = torch.Generator().manual_seed(0)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: (0.05 * torch.randn(shape, generator=generator)).to(dtype) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder

"""Tiny models of every family, as folders: their config, their generation settings and their weights' file."""

from __future__ import annotations

import atexit
import json
from functools import cache
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

GOLDENS = Path(__file__).parents[1] / "conformance" / "goldens" / "models"
NATIVE = (
    *("bart", "bloom", "gemma2", "gpt2", "gpt_neox", "llama", "mamba", "marian", "mistral", "opt", "pegasus", "phi"),
    *("qwen2", "qwen3", "t5"),
)
ADAPTED = ("bart", "marian", "pegasus")  # which have a native form too
# Families without a golden model, made by transformers: what its config classes are told beyond the usual sizes.
MADE: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("gemma", {"head_dim": 8, "intermediate_size": 48, "num_key_value_heads": 2}),
    "gemma3": ("gemma3_text", {"head_dim": 8, "intermediate_size": 48, "num_key_value_heads": 2, "sliding_window": 5}),
    "gptj": ("gptj", {"rotary_dim": 4}),
    "falcon": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-rw": ("falcon", {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}),
}
MADE_ADAPTED: dict[str, tuple[str, dict[str, Any]]] = {
    "olmo2": ("olmo2", {"intermediate_size": 48, "num_key_value_heads": 2}),
    "gpt_bigcode": ("gpt_bigcode", {}),
    "gpt_oss": (
        "gpt_oss",
        {
            "intermediate_size": 16,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "sliding_window": 5,
        },
    ),
}
_SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@cache
def find_folder(name: str) -> Path:
    """The folder of a tiny model; what is made is made once a process."""
    if name not in (made := {**MADE, **MADE_ADAPTED}):
        return GOLDENS / name
    import torch
    import transformers

    kind, settings = made[name]
    folder = Path(mkdtemp(prefix=f"unspool-tiny-{name}-"))
    atexit.register(rmtree, folder, ignore_errors=True)
    transformers.utils.logging.disable_progress_bar()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(kind, **{**_SIZES, **settings})
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def read_config(name: str) -> dict[str, Any]:
    """The config.json of a tiny model."""
    config: dict[str, Any] = json.loads((find_folder(name) / "config.json").read_text())
    return config


def use(folder: Path, *, native: bool | None = None) -> None:
    """Load what lies in a folder, and write three tokens where that works."""
    import unspool

    lm = unspool.load(folder, device="cpu", native=native)
    lm.generate([[5, 6, 7, 8], [9]], max_new_tokens=3)

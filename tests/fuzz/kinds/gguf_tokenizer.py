"""The tokenizer of a GGUF file: its metadata mutated, built and used."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz.mutate import hostile_string, hostile_value
from unspool.text.gguf_vocabulary import tokenizer_from_gguf

NAME = "gguf_tokenizer"
SHARE = 2.0
SHORT = 40

_TOKENS = [
    "<unk>",
    "<s>",
    "</s>",
    "a",
    "b",
    "ab",
    "\u2581",
    "\u0120a",
    " ",
    *(f"<0x{code:02X}>" for code in range(256)),
]
_KEYS = (
    *("model", "pre", "tokens", "scores", "token_type", "merges", "bos_token_id", "eos_token_id", "unknown_token_id"),
    *("add_bos_token", "add_eos_token", "add_space_prefix", "remove_extra_whitespaces", "precompiled_charsmap"),
)  # fmt: skip


def make(rng: Random) -> dict[str, Any]:
    tokens = list(_TOKENS)
    if rng.random() < 0.3:
        tokens[rng.randrange(len(tokens))] = rng.choice(("", "a" * 65_000, hostile_string(rng)))
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": rng.choice(("llama", "gpt2", "t5")),
        "tokenizer.ggml.pre": rng.choice(("default", "llama-bpe", "qwen2", "none")),
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-float(i) for i in range(len(tokens))],
        "tokenizer.ggml.token_type": [rng.choice((1, 1, 1, 2, 3, 4, 6, 99)) for _ in tokens],
        "tokenizer.ggml.merges": ["a b", *([hostile_string(rng)] if rng.random() < 0.2 else [])],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.precompiled_charsmap": rng.choice(
            ([], list(rng.randbytes(40)), [8, 0, 0, 0, *rng.randbytes(60)])
        ),
        "tokenizer.chat_template": "{{ messages[0].content }}",
    }
    for _ in range(rng.choice((0, 1, 1, 2))):
        key = f"tokenizer.ggml.{rng.choice(_KEYS)}"
        if rng.random() < 0.4:
            metadata.pop(key, None)
        else:
            metadata[key] = hostile_value(rng)
    return metadata


def run(given: dict[str, Any], folder: Path) -> None:
    tokenizer = tokenizer_from_gguf(given)
    for text in ("a b ab", "é\U0001f680 <s>", "ab" * 2000, " "):
        tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True)

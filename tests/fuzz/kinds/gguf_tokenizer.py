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
)


_TYPES = [2, 3, 3, *[1] * 6, *[6] * 256]
_SPLITS = ("default", "gpt-2", "llama-bpe", "qwen2", "tekken", "gpt-4o", "deepseek-v3", "smollm", "falcon", "none")
# A trie whose units lead nowhere, and some texts.
_CHARSMAPS: tuple[list[int], ...] = ([], [0, 4, 0, 0, *[0] * 1024, 97, 0])


def make(rng: Random) -> dict[str, Any]:
    """A sound vocabulary of one of the kinds, with tokens and types exchanged; sometimes a hostile value or two."""
    tokens, types = list(_TOKENS), list(_TYPES)
    for _ in range(rng.choice((0, 0, 1, 2))):
        tokens[rng.randrange(len(tokens))] = rng.choice(
            ("", "a" * rng.choice((3, 200, 300, 65_000)), f"x{rng.random()}", "<|im_end|>", hostile_string(rng))
        )
    for _ in range(rng.choice((0, 0, 3, 50))):
        types[rng.randrange(len(types))] = rng.choice((1, 2, 3, 4, 5, 6, 99))
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": rng.choice(("llama", "gpt2", "t5")),
        "tokenizer.ggml.pre": rng.choice(_SPLITS),
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-float(i) for i in range(len(tokens))],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": ["a b", *([hostile_string(rng)] if rng.random() < 0.05 else [])],
        "tokenizer.ggml.bos_token_id": rng.choice((1, 1, 2, 0)),
        "tokenizer.ggml.eos_token_id": rng.choice((2, 2, 3)),
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": rng.random() < 0.5,
        "tokenizer.ggml.add_space_prefix": rng.random() < 0.5,
        "tokenizer.ggml.precompiled_charsmap": rng.choice(
            _CHARSMAPS if rng.random() < 0.8 else (list(rng.randbytes(40)), [8, 0, 0, 0, *rng.randbytes(60)])
        ),
        "tokenizer.chat_template": rng.choice(("{{ messages[0].content }}", "{{ messages | tojson }}", "{% if %}")),
    }
    for _ in range(rng.choice((0, 0, 0, 1, 1, 2))):
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

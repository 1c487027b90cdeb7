"""tokenizer_config.json and special_tokens_map.json beside a sound tokenizer.json."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz.mutate import dump_json, hostile_string, hostile_value, mutate_bytes, mutate_json
from unspool.text.tokenizer import Tokenizer

NAME = "tokenizer_config"
SHARE = 2.0
SHORT = 40

_MODEL = {"type": "BPE", "vocab": {"<unk>": 0, "a": 1, "b": 2, "ab": 3}, "merges": [["a", "b"]], "unk_token": "<unk>"}
_BACKEND = json.dumps({"version": "1.0", "added_tokens": [], "model": _MODEL})
_CONFIG: dict[str, Any] = {
    "bos_token": "<s>",
    "eos_token": {"content": "</s>", "lstrip": False, "special": True},
    "unk_token": "<unk>",
    "pad_token": None,
    "additional_special_tokens": ["<x>", {"content": "<y>"}],
    "added_tokens_decoder": {"4": {"content": "<s>", "special": True}, "5": {"content": "</s>", "special": True}},
    "chat_template": "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}",
    "clean_up_tokenization_spaces": True,
    "model_max_length": 1000000000000000019884624838656,
}


_TEMPLATES = (
    _CONFIG["chat_template"],
    [{"name": "default", "template": "{{ messages[0].content }}"}, {"name": "tool_use", "template": "{{ tools }}"}],
    "{{ bos_token }}{{ messages | tojson }}{{ unk_token }}",
    "{% if %}",
    "{{ raise_exception('\x1b]0;x') }}",
)
_TOKENS = ("<s>", "ab", "<unk>", " ", {"content": "<z>", "lstrip": True, "normalized": False}, "é", "<|im_end|>")


def make(rng: Random) -> tuple[bytes, bytes | None]:
    """A usual configuration with tokens and templates exchanged; now and then something hostile in it."""
    config = {name: value for name, value in _CONFIG.items() if rng.random() < 0.8}
    for name in ("bos_token", "eos_token", "pad_token", "mask_token"):
        if rng.random() < 0.3:
            config[name] = rng.choice(_TOKENS)
    if rng.random() < 0.3:
        config["chat_template"] = rng.choice(_TEMPLATES)
    if rng.random() < 0.3:
        start = rng.choice((4, 4, 4, 5, 3))
        config["added_tokens_decoder"] = {
            str(start + place): {
                "content": rng.choice((f"<{place}>", f"<{place}>", " ab", "<s>")),
                "special": place % 2 == 0,
            }
            for place in range(rng.randrange(6))
        }
    if rng.random() < 0.1:
        config[rng.choice(sorted(_CONFIG))] = hostile_value(rng)
    if rng.random() < 0.1:
        config["added_tokens_decoder"] = {
            rng.choice(("4", "9" * 5000, "-1", "²", "4.0")): {"content": hostile_string(rng)}
        }
    if config and rng.random() < 0.3:
        config = mutate_json(rng, config, rng.choice((1, 2)))
    data = dump_json(config)
    special = dump_json({"bos_token": rng.choice((hostile_value(rng), *_TOKENS))}) if rng.random() < 0.2 else None
    return (mutate_bytes(rng, data, 2) if rng.random() < 0.05 else data), special


def run(given: tuple[bytes, bytes | None], folder: Path) -> None:
    config, special = given
    (folder / "tokenizer.json").write_text(_BACKEND)
    (folder / "tokenizer_config.json").write_bytes(config)
    if special is not None:
        (folder / "special_tokens_map.json").write_bytes(special)
    tokenizer = Tokenizer.from_folder(folder)
    tokenizer.decode(tokenizer.encode("ab<s>a</s>"), skip_special_tokens=True)
    if tokenizer.chat_template is not None:
        tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False)
    tokenizer.save(folder / "saved")

"""GGUF files: hostile metadata, hostile tensors, damaged bytes, of several architectures."""

from __future__ import annotations

import struct
from pathlib import Path
from random import Random
from typing import Any

import unspool
from tests.fuzz.mutate import INTEGERS, hostile_number, hostile_string, mutate_bytes

NAME = "gguf"
SHARE = 1.5
SHORT = 60

_F32, _F16, _Q4_0, _Q8_0 = 0, 1, 2, 8
_HIDDEN, _HEADS, _INNER, _VOCAB = 32, 4, 64, 40
_ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "baichuan", "mamba")


def _pack_string(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(data)) + data


def _pack(value: Any) -> bytes:
    """A value with its type; whole numbers by their size, all others by their Python type."""
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        if 0 <= value < 1 << 32:
            return struct.pack("<II", 4, value)
        return (
            struct.pack("<IQ", 10, value % (1 << 64)) if value > 0 else struct.pack("<Iq", 11, max(value, -(1 << 63)))
        )
    if isinstance(value, float):
        return struct.pack("<Id", 12, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _pack_string(value)
    items = [_pack(one) for one in value or [0]]
    same = [item[4:] for item in items if item[:4] == items[0][:4]]
    return struct.pack("<I", 9) + items[0][:4] + struct.pack("<Q", len(same)) + b"".join(same)


def _name_tensors(arch: str) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes, slowest dimension first."""
    wide = (_HIDDEN, _HIDDEN)
    tensors: list[tuple[str, tuple[int, ...]]] = [
        ("token_embd.weight", (_VOCAB, _HIDDEN)),
        ("output_norm.weight", (_HIDDEN,)),
    ]
    for layer in range(2):
        start = f"blk.{layer}."
        tensors.append((f"{start}attn_norm.weight", (_HIDDEN,)))
        if arch == "mamba":
            parts = {
                "ssm_in.weight": (2 * _INNER, _HIDDEN),
                "ssm_conv1d.weight": (_INNER, 4),
                "ssm_conv1d.bias": (_INNER,),
            }
            parts |= {"ssm_x.weight": (2 + 32, _INNER), "ssm_dt.weight": (_INNER, 2), "ssm_dt.bias": (_INNER,)}
            parts |= {"ssm_a": (_INNER, 16), "ssm_d": (_INNER,), "ssm_out.weight": (_HIDDEN, _INNER)}
            tensors += [(start + name, shape) for name, shape in parts.items()]
            continue
        tensors += [(f"{start}{name}.weight", wide) for name in ("attn_q", "attn_k", "attn_v", "attn_output")]
        tensors += [(f"{start}ffn_{name}.weight", (_INNER, _HIDDEN)) for name in ("gate", "up")]
        tensors += [(f"{start}ffn_down.weight", (_HIDDEN, _INNER)), (f"{start}ffn_norm.weight", (_HIDDEN,))]
        if arch in ("qwen3", "gemma3"):
            tensors += [(f"{start}attn_{name}_norm.weight", (_HIDDEN // _HEADS,)) for name in ("q", "k")]
        if arch in ("gemma2", "gemma3"):
            tensors += [(f"{start}post_{name}_norm.weight", (_HIDDEN,)) for name in ("attention", "ffw")]
    return tensors


def _describe(arch: str) -> dict[str, Any]:
    tokens = ["<unk>", "<s>", "</s>", *(chr(97 + place) for place in range(_VOCAB - 3))]
    return {
        "general.architecture": arch,
        "general.alignment": 32,
        f"{arch}.block_count": 2,
        f"{arch}.embedding_length": _HIDDEN,
        f"{arch}.feed_forward_length": _INNER,
        f"{arch}.context_length": 64,
        f"{arch}.attention.head_count": _HEADS,
        f"{arch}.attention.head_count_kv": _HEADS,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.attention.layer_norm_epsilon": 1e-5,
        f"{arch}.attention.sliding_window": 8,
        f"{arch}.rope.freq_base": 10000.0,
        f"{arch}.rope.dimension_count": 8,
        f"{arch}.ssm.inner_size": _INNER,
        f"{arch}.ssm.state_size": 16,
        f"{arch}.ssm.conv_kernel": 4,
        f"{arch}.ssm.time_step_rank": 2,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-float(place) for place in range(_VOCAB)],
        "tokenizer.ggml.token_type": [2, 3, 3, *([1] * (_VOCAB - 3))],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def _fill(rng: Random, kind: int, count: int) -> bytes:
    if kind == _F32:
        return struct.pack(f"<{count}f", *(rng.uniform(-0.5, 0.5) for _ in range(count)))
    if kind == _F16:
        return struct.pack(f"<{count}e", *(rng.uniform(-0.5, 0.5) for _ in range(count)))
    size = 16 if kind == _Q4_0 else 32
    return b"".join(struct.pack("<e", rng.uniform(0, 0.02)) + rng.randbytes(size) for _ in range(count // 32))


def _change_metadata(rng: Random, metadata: dict[str, Any]) -> None:
    key = rng.choice(list(metadata))
    roll = rng.random()
    if roll < 0.5:
        metadata[key] = hostile_number(rng)
    elif roll < 0.6:
        metadata[key] = hostile_string(rng)
    elif roll < 0.7:
        metadata[key] = [hostile_number(rng) for _ in range(rng.choice((1, 2, 3)))]
    elif roll < 0.8:
        del metadata[key]
    elif roll < 0.9 and isinstance(metadata[key], list):
        metadata[key] = [*metadata[key][: rng.randrange(len(metadata[key]))], hostile_string(rng)]
    else:
        metadata[rng.choice(("split.count", "general.sampling.temp", hostile_string(rng)))] = hostile_number(rng)


def make(rng: Random) -> bytes:
    arch = rng.choice(_ARCHITECTURES)
    metadata, tensors = _describe(arch), _name_tensors(arch)
    for _ in range(rng.choice((0, 1, 1, 2))):
        _change_metadata(rng, metadata)
    head, data = b"", b""
    matrices = rng.choice((_F32, _F32, _F16, _Q4_0, _Q8_0))
    for name, shape in tensors:
        kind = matrices if len(shape) == 2 and shape[-1] % 32 == 0 else _F32
        count = shape[0] * (shape[1] if len(shape) == 2 else 1)
        data += b"\0" * (-len(data) % 32)
        offset = len(data)
        data += _fill(rng, kind, count)
        if rng.random() < 0.004:
            shape = tuple(rng.choice(INTEGERS) % (1 << 64) for _ in shape)
        if rng.random() < 0.003:
            offset = rng.choice((0, 32, 1 << 40, (1 << 64) - 32))
        if rng.random() < 0.003:
            kind = rng.choice((3, 6, 7, 10, 11, 12, 13, 14, 15, 24, 30, 99))
        if rng.random() < 0.003:
            name = hostile_string(rng)
        head += _pack_string(name) + struct.pack("<I", len(shape))
        head += b"".join(struct.pack("<Q", size) for size in shape[::-1]) + struct.pack("<IQ", kind, offset)
    counts = [len(tensors), len(metadata)]
    if rng.random() < 0.03:
        counts[rng.randrange(2)] = rng.choice(INTEGERS) % (1 << 64)
    out = b"GGUF" + struct.pack("<IQQ", rng.choice((3,) * 90 + (1, 2, 4, 1 << 24)), *counts)
    out += b"".join(_pack_string(key) + _pack(value) for key, value in metadata.items()) + head
    out += b"\0" * (-len(out) % 32) + data
    return mutate_bytes(rng, out, rng.choice((1, 2, 5))) if rng.random() < 0.2 else out


def run(given: bytes, folder: Path) -> None:
    path = folder / "model.gguf"
    path.write_bytes(given)
    lm = unspool.load(path, device="cpu")
    lm.generate([[5, 6, 7], [9]], max_new_tokens=2)
    lm.generate("abc", max_new_tokens=2)

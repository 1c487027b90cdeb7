"""Beam search beside transformers, on random models and settings of our own: token for token.

transformers 5 has plain beam search alone. Groups and constraints were compared with 4.52.4 when they were written:
550 calls on random Llama, GPT-2 and T5 models; tests/conformance/differences.md says where the answers part.
"""

from __future__ import annotations

import os
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import transformers

import unspool

PAD, WIDTH = 0, 6


def make_llama(vocab: int, hidden: int) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.6,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=PAD,
    )
    return transformers.LlamaForCausalLM(config)


def make_t5(vocab: int, hidden: int) -> Any:
    config = transformers.T5Config(
        vocab_size=vocab,
        d_model=hidden,
        d_kv=8,
        d_ff=2 * hidden,
        num_layers=2,
        num_heads=4,
        initializer_factor=3.0,
        decoder_start_token_id=PAD,
        eos_token_id=1,
        pad_token_id=PAD,
    )
    return transformers.T5ForConditionalGeneration(config)


MODELS = {"llama": (make_llama, 37, 16), "larger llama": (make_llama, 71, 32), "t5": (make_t5, 43, 16)}


@cache
def load_both(name: str, folder: Path) -> tuple[Any, Any]:
    make, vocab, hidden = MODELS[name]
    torch.manual_seed(len(name) + vocab)
    reference = make(vocab, hidden).eval()
    path = folder / name.replace(" ", "-")
    reference.save_pretrained(path)
    return unspool.load(path).model, reference


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def draw_call(rng: random.Random, vocab: int, *, pads_left: bool) -> dict[str, Any]:
    ids, mask = [], []
    for length in [WIDTH, *(rng.randint(2, WIDTH) for _ in range(rng.randint(0, 2)))]:
        row, pad = [rng.randint(3, vocab - 1) for _ in range(length)], [PAD] * (WIDTH - length)
        ids.append(pad + row if pads_left else row + pad)
        mask.append([0] * len(pad) + [1] * length if pads_left else [1] * length + [0] * len(pad))
    beams = rng.choice([2, 3, 5])
    call: dict[str, Any] = {
        "input_ids": torch.tensor(ids),
        "attention_mask": torch.tensor(mask),
        "num_beams": beams,
        "num_return_sequences": rng.choice([1, beams]),
        "max_new_tokens": rng.choice([4, 11]),
        "length_penalty": rng.choice([-1.0, 0.0, 0.5, 1.0, 2.0]),
        "early_stopping": rng.choice([True, False, "never"]),
        "eos_token_id": rng.choice([[2], [1, 5, 7], list(range(3, 9))]),
    }
    extras = {
        "no_repeat_ngram_size": 2,
        "bad_words_ids": [[rng.randint(3, 8)], [rng.randint(3, 8), rng.randint(3, 8)]],
        "min_new_tokens": 3,
        "repetition_penalty": 1.3,
    }
    return call | {name: value for name, value in extras.items() if rng.random() < 0.3}


@pytest.mark.parametrize("name", MODELS)
def test_the_same_sequences(name: str, folder: Path) -> None:
    model, reference = load_both(name, folder)
    rng = random.Random(name)
    for number in range(9):
        call = draw_call(rng, MODELS[name][1], pads_left=name != "t5")
        wanted = {"return_dict_in_generate": True, "output_scores": True}
        theirs = reference.generate(do_sample=False, **wanted, **call)
        ours = unspool.generate(model, **wanted, **call, low_memory=number % 4 == 3)
        assert ours.sequences.tolist() == theirs.sequences.tolist(), call
        assert ours.beam_indices.tolist() == theirs.beam_indices.tolist(), call
        torch.testing.assert_close(ours.sequences_scores, theirs.sequences_scores, atol=5e-3, rtol=1e-4)

"""Contrastive search by the paper's words: the loop that recomputes everything."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from tests.conformance.cases import load_model
from tests.fakes import FakeModel

Reading = Callable[[list[list[int]]], tuple[torch.Tensor, torch.Tensor]]
"""The logits (texts, vocab) that follow texts of one length, and the states (texts, length, hidden) they consist of."""

ROWS = [[1, 2, 3], [4, 5, 6, 7, 8], [9], [11, 1]]
ASK: dict[str, Any] = {"penalty_alpha": 0.6, "top_k": 4}
WAYS: list[dict[str, Any]] = [
    {},
    {"low_memory": True},
    {"use_cache": False},
    {"use_cache": False, "low_memory": True},
    {"cache_implementation": "static"},
    {"cache_implementation": "static", "low_memory": True, "max_cache_len": 40},
    {"prefill_chunk_size": 1},
    {"prefill_chunk_size": 3},
]


def search_slowly(
    read: Reading,
    prompt: Sequence[int],
    num_new: int,
    alpha: float = 0.6,
    k: int = 4,
    eos: Sequence[int] = (),
    process: Callable[[list[int], torch.Tensor], torch.Tensor] = lambda _, logits: logits,
) -> list[int]:
    """The tokens after a prompt by the paper's words: no cache, no batch, every candidate's whole text read again."""
    ids = list(prompt)
    while len(ids) < len(prompt) + num_new:
        logits, past = (each[0] for each in read([ids]))
        probabilities = process(ids, logits).softmax(-1)
        best, chosen = -torch.inf, -1
        candidates = probabilities.topk(k).indices.tolist()
        states = read([[*ids, token] for token in candidates])[1][:, -1]
        for token, state in zip(candidates, states, strict=True):
            likeness = max(float(F.cosine_similarity(state, other, dim=0)) for other in past)
            value = (1 - alpha) * float(probabilities[token]) - alpha * likeness
            if value > best and probabilities[token] > 0:
                best, chosen = value, token
        ids.append(chosen)
        if chosen in eos:
            break
    return ids[len(prompt) :]


def read_fake(model: FakeModel, **score: Any) -> Reading:
    """A fake's reading, by its definition."""

    def read(texts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        logits = [model.score(ids, **score) for ids in texts]
        states = [[FakeModel.score(model, ids[: end + 1]) @ model.reading for end in range(len(ids))] for ids in texts]
        return torch.stack(logits), torch.stack([torch.stack(each) for each in states])

    return read


def read_native(model: Any, source: Sequence[int] = ()) -> Reading:
    """A native model's reading of a whole text, without a cache."""

    def read(texts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        name = "decoder_input_ids" if source else "input_ids"
        given = {"input_ids": torch.tensor([list(source)] * len(texts))} if source else {}
        output = model(**given, **{name: torch.tensor(texts)}, output_hidden_states=True, use_cache=False)
        states = output.decoder_hidden_states if source else output.hidden_states
        return output.logits[:, -1], states[-1]

    return read


@cache
def expect_native(name: str, prompt: tuple[int, ...], num_new: int, source: tuple[int, ...] = ()) -> list[int]:
    """What the slow loop finds with a reference model."""
    return search_slowly(read_native(load_model(name).model, source), prompt, num_new)


def cut(sequences: torch.Tensor, rows: Sequence[Sequence[int]], new: Sequence[Sequence[int]]) -> list[list[int]]:
    """The new tokens of each row, as many as are expected, of left-padded sequences."""
    width = max(map(len, rows))
    return [found[width : width + len(tokens)] for found, tokens in zip(sequences.tolist(), new, strict=True)]

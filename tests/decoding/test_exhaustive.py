"""With as many beams as there are sequences, beam search finds the best one there is."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import unspool
from tests.fakes import FakeModel


def score_all(
    model: FakeModel, prompt: list[int], vocab: int, depth: int, penalty: float
) -> dict[tuple[int, ...], float]:
    """The score of every continuation of `depth` tokens (there is no end token)."""
    found = {}
    for tokens in itertools.product(range(vocab), repeat=depth):
        total, history = 0.0, list(prompt)
        for token in tokens:
            total += float(torch.log_softmax(model.score(history), dim=-1)[token])
            history.append(token)
        found[tokens] = total / depth**penalty
    return found


@settings(max_examples=25)
@given(
    vocab=st.integers(3, 5),
    depth=st.integers(1, 3),
    seed=st.integers(0, 1000),
    penalty=st.sampled_from([0.0, 1.0, 2.0]),
)
def test_all_sequences_as_beams_find_the_best(vocab: int, depth: int, seed: int, penalty: float) -> None:
    model = FakeModel(vocab=vocab, seed=seed)
    prompt = [seed % vocab, (seed // 7) % vocab]
    every = score_all(model, prompt, vocab, depth, penalty)
    best = max(every.values())
    output = unspool.generate(
        model,
        torch.tensor([prompt]),
        num_beams=vocab**depth,
        max_new_tokens=depth,
        length_penalty=penalty,
        eos_token_id=None,
        return_dict_in_generate=True,
        output_scores=True,
    )
    tokens = tuple(output.sequences[0, len(prompt) :].tolist())
    assert abs(every[tokens] - best) < 1e-4
    assert abs(float(output.sequences_scores[0]) - best) < 1e-4

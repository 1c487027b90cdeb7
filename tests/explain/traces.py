"""Traces to draw: one made by hand, and the searches of the fake model."""

from __future__ import annotations

from typing import Any

import unspool
from tests.fakes import FakeModel, pad_left
from unspool.decoding.beams.trace import BeamTrace, Candidate

PROMPTS = ([1, 2, 3], [4, 5], [6])
SEARCHES: dict[str, dict[str, Any]] = {
    "plain": {},
    "early": {"early_stopping": True},
    "sampled": {"do_sample": True, "seed": 3},
    "few": {"do_sample": True, "seed": 3, "top_k": 2},  # fewer candidates than beams: some beams never exist
    "grouped": {"num_beam_groups": 2, "diversity_penalty": 1.5},
    "constrained": {"force_words_ids": [[5, 6], [9]]},
}


def search(name: str, eos: int | None = 7, *, num_returned: int = 4, prompts: Any = PROMPTS, vocab: int = 23) -> Any:
    """The output of a search on the fake model, with its trace."""
    return unspool.generate(
        FakeModel(vocab),
        **pad_left(prompts),
        num_beams=4,
        num_return_sequences=num_returned,
        max_new_tokens=9,
        eos_token_id=eos,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        return_beam_trace=True,
        **SEARCHES[name],
    )


def make_trace() -> BeamTrace:
    """Two beams, three steps: `a b` is returned second, `a c end` first; `d` is kept and then dies out."""
    trace = BeamTrace(2)
    trace.note(0, 1, [_one(1, 0, -0.5), _one(4, 0, -1.5), _one(5, 0, -2.0), _one(5, 1, -1e9)], [0, 1])
    trace.note(0, 2, [_one(2, 0, -0.75), _one(3, 0, -1.25), _one(6, 1, -2.5), _one(9, 0, -3.0, "eos")], [0, 1])
    trace.note(
        0,
        3,
        [_one(9, 1, -1.5, "eos"), _one(5, 0, -2.25, "length"), _one(6, 0, -2.75, "length")],
        [0, 1],
        finished={0: -0.5, 1: -0.75},
    )
    trace.note_returned(0, 3, 0, -0.5, "eos")
    trace.note_returned(0, 3, 1, -0.75, "length")
    return trace


def _one(token: int, parent: int, total: float, reason: str | None = None) -> Candidate:
    return Candidate(token, parent, total, reason)


WORDS = {1: " a", 2: " b", 3: " c", 4: " d", 5: "e", 6: "f", 9: "<end>"}


def read_words(ids: Any) -> str:
    """The text of hand-made ids."""
    return "".join(WORDS[token] for token in ids)

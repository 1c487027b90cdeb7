"""One row of a run's output, as the reference keeps it beside every segment."""

from __future__ import annotations

from typing import Any

from unspool.outputs import GenerateOutput

_ROWS = ("sequences", "sequences_scores", "beam_indices")
_STEPS = ("scores", "logits")
_LAYERS = ("decoder_attentions", "cross_attentions", "decoder_hidden_states")


def pick_row(output: GenerateOutput, row: int) -> dict[str, Any]:
    """The row's part of each field: of a beam search, what belongs to the beams that its text came through."""
    found: dict[str, Any] = {name: output[name][row] for name in _ROWS if name in output}
    beams = found["beam_indices"].tolist() if "beam_indices" in found else None
    for name in (*_STEPS, *_LAYERS):
        steps = output.get(name, ())
        places = [row] * len(steps) if beams is None else beams
        kept = list(zip(steps, places, strict=False))  # a beam that ended has no more steps
        if name in _STEPS and steps:
            found[name] = [scores[place] for scores, place in kept]
        elif steps:
            found[name] = tuple(tuple(layer[place][None] for layer in layers) for layers, place in kept)
    return found

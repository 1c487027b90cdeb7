"""What methods beside the processors report of a token: DoLa, guidance, contrastive search, drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from unspool.decoding.observer import CandidatesCompared, DraftChecked, Guided, LayersContrasted
from unspool.trace.values import Show, list_likeliest, shorten

NUM_SHOWN = 10  # tokens with and without guidance


def describe_layers(report: LayersContrasted, show: Show) -> dict[str, Any]:
    """The layer that DoLa contrasted with, each layer's divergence, and the token that it would have written."""
    values, tokens = torch.log_softmax(report.early[:, 0].float(), dim=-1).max(dim=-1)
    divergences = zip(report.layers, report.divergences[:, 0].tolist(), strict=True)
    guesses = zip(report.layers, tokens.tolist(), values.exp().tolist(), strict=True)
    return {
        "layer": report.layers[int(report.chosen[0])],
        "divergences": [{"layer": layer, "value": shorten(value)} for layer, value in divergences],
        "guesses": [{"layer": layer, "id": one, "text": show(one), "p": shorten(p)} for layer, one, p in guesses],
    }


def describe_guidance(report: Guided, show: Show) -> dict[str, Any]:
    """The likeliest tokens without guidance, with it, and after the negative prompt."""
    named = {"without": report.own, "with": report.guided, "negative": report.other}
    return {
        name: list_likeliest(torch.log_softmax(scores[0].float(), dim=-1), NUM_SHOWN, show)
        for name, scores in named.items()
    }


def describe_candidates(report: CandidatesCompared, show: Show) -> dict[str, Any]:
    """Contrastive search's candidates: probability, penalty, and the score by which one was chosen."""
    tokens, likeness = report.tokens[0].tolist(), report.likeness[0].tolist()
    weights, chosen = report.weights[0].tolist(), int(report.chosen[0])
    candidates = [
        {
            "id": token,
            "text": show(token),
            "p": shorten(p),
            "penalty": shorten(like),
            "score": shorten((1 - report.alpha) * p - report.alpha * like),
            "chosen": place == chosen,
        }
        for place, (token, p, like) in enumerate(zip(tokens, weights, likeness, strict=True))
        if p > -torch.inf  # it may not be taken
    ]
    return {"alpha": report.alpha, "candidates": candidates}


def judge_draft(report: DraftChecked, num_taken: int) -> tuple[list[str], list[str]]:
    """The verdict on each drafted token, and what each of the tokens taken was."""
    num_drafted, accepted = len(report.tokens), report.num_accepted
    is_refused = num_taken > accepted and accepted < num_drafted
    verdicts = ["accepted"] * accepted + ["rejected"] * is_refused
    verdicts += ["unused"] * (num_drafted - len(verdicts))
    kinds = ["accepted"] * min(accepted, num_taken)
    kinds += ["corrected" if is_refused else "bonus"] * (num_taken - len(kinds))
    return verdicts, kinds


def describe_draft(tokens: Sequence[int], verdicts: Sequence[str], show: Show) -> list[dict[str, Any]]:
    """Drafted tokens with their verdicts."""
    pairs = zip(tokens, verdicts, strict=True)
    return [{"id": token, "text": show(token), "verdict": verdict} for token, verdict in pairs]

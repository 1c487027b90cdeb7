"""Beam searches over a toy model, driven the same way by the reference (record_searches.py) and by the tests.

Log-probabilities are multiples of a power of two, so that their sums are exact on every machine, and candidates are
sorted stably, so that equals come out in one order.
"""

from __future__ import annotations

import random
from typing import Any

import torch


def draw_case(seed: int) -> dict[str, Any]:
    """The settings of a search, with groups or with constraints or with neither."""
    draw = random.Random(seed)
    kind = ("plain", "groups", "constrained")[seed % 3]
    num_groups = draw.choice([2, 3]) if kind == "groups" else 1
    num_beams = num_groups * draw.choice([1, 2, 3]) if num_groups > 1 else draw.randint(2, 5)
    vocabulary = draw.randint(6, 12)
    prompt_length, written = draw.randint(1, 3), draw.randint(2, 7)
    eos = draw.choice([None, 1, [1], [1, 3], [2, 4, 5]]) if draw.random() < 0.9 else [vocabulary - 1]
    case = {
        "seed": seed,
        "batch_size": draw.randint(1, 3),
        "num_beams": num_beams,
        "num_beam_groups": num_groups,
        "vocabulary": vocabulary,
        "prompt_length": prompt_length,
        "max_length": prompt_length + written,
        # Stopping before `max_length` (a time limit, a stop string) closes with an end token: there must be one.
        "steps": written if eos is None else draw.randint(1, written),
        "eos_token_id": eos,
        "length_penalty": draw.choice([1.0, 0.0, -1.0, 2.0, 0.6]),
        "early_stopping": draw.choice([True, False, "never"]),
        "keep": draw.randint(1, num_beams),
        "eighths": draw.random() < 0.4,  # coarse scores: many are equal
        "end_bonus": draw.choice([0.0, 1.5, 3.0]),
        "with_ancestry": draw.random() < 0.7,
        "words": [],
    }
    if kind == "constrained":
        case["words"] = [draw_word(draw, vocabulary) for _ in range(draw.randint(1, 2))]
    return case


def draw_word(draw: random.Random, vocabulary: int) -> list[Any]:
    """A phrase, or phrases none of which begins another."""
    phrases: list[list[int]] = []
    for _ in range(draw.choice([1, 1, 2, 3])):
        phrase = [draw.randrange(vocabulary) for _ in range(draw.randint(1, 3))]
        if not any(phrase[: len(other)] == other[: len(phrase)] for other in phrases):
            phrases.append(phrase)
    return phrases[0] if len(phrases) == 1 else phrases


def as_ids(eos: int | list[int] | None) -> list[int]:
    return [] if eos is None else [eos] if isinstance(eos, int) else eos


class ToyModel:
    """Log-probabilities that depend on the last token and on the length."""

    def __init__(self, case: dict[str, Any]) -> None:
        draw, size = random.Random(case["seed"] + 1_000_000), case["vocabulary"]
        unit = 8 if case["eighths"] else 1024
        self.table = torch.tensor(
            [[-draw.randint(1, 5 * unit) / unit for _ in range(size)] for _ in range(size)], dtype=torch.float32
        )  # (vocab, vocab)
        self.table[:, as_ids(case["eos_token_id"])] += case["end_bonus"]
        self.table.clamp_(max=-1 / unit)
        self.tokens = torch.arange(size)
        prompt = [[draw.randrange(size) for _ in range(case["prompt_length"])] for _ in range(case["batch_size"])]
        self.prompt = torch.tensor(prompt).repeat_interleave(case["num_beams"], dim=0)  # (batch * beams, prompt)

    def __call__(self, input_ids: torch.Tensor) -> torch.Tensor:
        length = input_ids.shape[-1]
        return self.table[input_ids[:, -1]] - (length * (self.tokens + 3) % 7) / 8  # (rows, vocab)


def take_best(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The best candidates of (batch, beams, vocab) scores: scores, tokens and beams, each (batch, count)."""
    vocabulary = scores.shape[-1]
    best, places = scores.flatten(1).sort(dim=1, descending=True, stable=True)
    best, places = best[:, :count], places[:, :count]
    return best, places % vocabulary, places // vocabulary


def run_search(case: dict[str, Any], library: Any, trace: list[Any] | None = None) -> dict[str, Any]:
    """Search with a library's scorer; what it said at every step is put into `trace`."""
    scorer = make_scorer(case, library)
    model, groups = ToyModel(case), case["num_beam_groups"]
    batch, size = case["batch_size"], case["num_beams"] // groups
    ends = {"pad_token_id": 0, "eos_token_id": case["eos_token_id"], "decoder_prompt_len": case["prompt_length"]}
    count = max(2, 1 + len(as_ids(case["eos_token_id"]))) * size
    input_ids = model.prompt
    beam_scores = torch.full((batch, groups, size), -1e9)
    beam_scores[:, :, 0] = 0
    beam_scores = beam_scores.view(-1)
    places = torch.arange(batch * groups * size).view(batch, groups, size)
    ancestry: list[tuple[int, ...]] = [()] * len(beam_scores)
    for _ in range(case["steps"]):
        next_ids = input_ids.new_zeros(len(input_ids), input_ids.shape[1] + 1)
        next_scores, next_ancestry = beam_scores.clone(), list(ancestry)
        said = []
        for group in range(groups):
            mine = places[:, group].flatten()  # (batch * size,)
            ids = input_ids[mine]
            scores = model(ids) + beam_scores[mine, None]
            if group:
                scores = scores - group * (torch.arange(scores.shape[-1]) % 3) / 4  # the groups must differ
            best = take_best(scores.view(batch, size, -1), count)
            own_ancestry = [ancestry[place] for place in mine.tolist()] if case["with_ancestry"] else None
            if case["words"]:
                answer = scorer.process(ids, *best, scores, beam_indices=own_ancestry, **ends)
            else:
                answer = scorer.process(ids, *best, beam_indices=own_ancestry, group_index=group, **ends)
            tokens, parents = answer["next_beam_tokens"], answer["next_beam_indices"]
            next_ids[mine] = torch.cat([ids[parents], tokens[:, None]], dim=-1)
            next_scores[mine] = answer["next_beam_scores"]
            for place, parent in zip(mine.tolist(), parents.tolist(), strict=True):
                next_ancestry[place] = (*ancestry[int(mine[parent])], parent)
            said += [tokens.tolist(), parents.tolist(), [float(score) for score in answer["next_beam_scores"]]]
        input_ids, beam_scores, ancestry = next_ids, next_scores, next_ancestry
        if trace is not None:
            trace.append([*said, [int(flag) for flag in scorer._done]])
        if scorer.is_done:
            break
    result = scorer.finalize(
        input_ids,
        beam_scores,
        best[1],
        best[2],
        max_length=case["max_length"],
        beam_indices=ancestry if case["with_ancestry"] else None,
        **ends,
    )
    beams = result["beam_indices"]
    return {
        "sequences": result["sequences"].tolist(),
        "sequence_scores": [round(score, 5) for score in result["sequence_scores"].tolist()],
        "beam_indices": None if beams is None else beams.tolist(),
    }


def make_scorer(case: dict[str, Any], library: Any) -> Any:
    settings = {
        "batch_size": case["batch_size"],
        "num_beams": case["num_beams"],
        "device": "cpu",
        "length_penalty": case["length_penalty"],
        "do_early_stopping": case["early_stopping"],
        "num_beam_hyps_to_keep": case["keep"],
        "max_length": case["max_length"],
    }
    if not case["words"]:
        return library.BeamSearchScorer(num_beam_groups=case["num_beam_groups"], **settings)
    constraints = [
        library.DisjunctiveConstraint(word) if isinstance(word[0], list) else library.PhrasalConstraint(word)
        for word in case["words"]
    ]
    return library.ConstrainedBeamSearchScorer(constraints=constraints, **settings)

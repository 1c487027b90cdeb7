"""Callers' own functions see each row by itself, unpadded: no text depends on the rows beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.fakes import FakeModel, pad_left

import unspool
from unspool import LanguageModel, LogitsProcessor, StoppingCriteria

PROMPTS = [[3, 4, 5, 6, 7, 8, 9], [10], [11, 12, 13, 12, 11]]
Seen = set[tuple[int, ...]]


class ByWidth(LogitsProcessor):
    """Lets the number of columns, the first token and the number of calls decide."""

    def __init__(self, seen: Seen) -> None:
        self.seen, self.num_calls, self.memory = seen, 0, dict[str, int]()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.seen.update(tuple(row) for row in input_ids.tolist())
        self.num_calls += 1
        self.memory["calls"] = self.memory.get("calls", 0) + 1
        assert self.memory["calls"] == self.num_calls
        scores[:, (input_ids.shape[1] * 3 + int(input_ids[0, 0]) + self.num_calls) % scores.shape[-1]] += 4
        return scores


class ByLength(StoppingCriteria):
    """Ends texts whose length and first token say so, and all at the seventh question."""

    def __init__(self, seen: Seen) -> None:
        self.seen, self.num_calls = seen, 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.seen.update(tuple(row) for row in input_ids.tolist())
        self.num_calls += 1
        ends = input_ids.shape[1] >= int(input_ids[0, 0]) + 6 or self.num_calls > 6
        return torch.full((len(input_ids),), ends)


def make_prefix(seen: Seen) -> Callable[[int, torch.Tensor], list[int]]:
    """Allows some tokens by the length and the first token."""

    def allow(_: int, input_ids: torch.Tensor) -> list[int]:
        seen.add(tuple(input_ids.tolist()))
        first = (len(input_ids) + int(input_ids[0])) % 5
        return list(range(first, 40, 3))

    return allow


def make_hook(kind: str, seen: Seen) -> dict[str, Any]:
    if kind == "processor":
        return {"logits_processor": [ByWidth(seen)]}
    if kind == "criterion":
        return {"stopping_criteria": [ByLength(seen)]}
    return {"prefix_allowed_tokens_fn": make_prefix(seen)}


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "seed": 5, "top_k": 9},
    "copies": {"do_sample": True, "seed": 5, "num_return_sequences": 2},
    "beams": {"num_beams": 3},
    "beams drawn": {"num_beams": 2, "do_sample": True, "seed": 3},
    "groups": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    "constrained": {"num_beams": 3, "force_words_ids": [[20]], "strict_constraints": False},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 4},
    "dola": {"dola_layers": [1]},
    "guidance": {"guidance_scale": 1.5},
    "drafts": {"prompt_lookup_num_tokens": 3},
    "log-probabilities": {"logprobs": 2},
    "beams that stay": {"num_beams": 3, "return_dict_in_generate": True},
    "outputs": {"return_dict_in_generate": True, "output_scores": True},
    "own cache": {"cache_implementation": "static"},
}


@pytest.mark.parametrize("kind", ["processor", "criterion", "prefix"])
@pytest.mark.parametrize("way", WAYS)
def test_what_rows_get_together_they_get_alone(lm: LanguageModel, way: str, kind: str) -> None:
    settings = {"max_new_tokens": 9, "eos_token_id": 2} | WAYS[way]
    seen_alone: Seen = set()
    alone = []
    for number, prompt in enumerate(PROMPTS):
        more = {"seed": settings["seed"] + number} if "seed" in settings else {}
        found = lm.generate([prompt], **settings | more, **make_hook(kind, seen_alone))
        alone += found.token_ids
    seen: Seen = set()
    more = {"seed": [settings["seed"] + number for number in range(3)]} if "seed" in settings else {}
    assert lm.generate(PROMPTS, **settings | more, **make_hook(kind, seen)).token_ids == alone
    assert seen == seen_alone
    assert {row[: len(prompt)] for row in seen for prompt in PROMPTS if row[0] == prompt[0]} <= set(map(tuple, PROMPTS))


@pytest.mark.parametrize("kind", ["processor", "criterion", "prefix"])
def test_an_engine_and_a_stream_show_the_same(lm: LanguageModel, kind: str) -> None:
    settings: dict[str, Any] = {"max_new_tokens": 9, "eos_token_id": 2}
    seen: Seen = set()
    wanted = lm.generate(PROMPTS, **settings, **make_hook(kind, seen)).token_ids
    in_stream: Seen = set()
    rows: list[list[int]] = [[] for _ in PROMPTS]
    for piece in lm.stream(PROMPTS, **settings, **make_hook(kind, in_stream)):
        rows[piece.row] += piece.token_ids
    in_engine: Seen = set()
    with unspool.Engine(lm) as engine:
        handles = [engine.submit([prompt], **settings, **make_hook(kind, in_engine)) for prompt in PROMPTS]
        assert [handle.result().token_ids[0] for handle in handles] == wanted
    assert rows == wanted
    assert in_stream == in_engine == seen


def test_padding_that_a_mask_hides_is_not_shown(lm: LanguageModel) -> None:
    seen: Seen = set()
    wanted = lm.generate(PROMPTS, max_new_tokens=5, **make_hook("processor", seen)).token_ids
    in_tensors: Seen = set()
    padded = pad_left(PROMPTS)
    found = lm.generate(padded, max_new_tokens=5, **make_hook("processor", in_tensors))
    assert (found.token_ids, in_tensors) == (wanted, seen)


def test_a_length_counts_each_row_alone(lm: LanguageModel) -> None:
    stop = {"stopping_criteria": [unspool.MaxLengthCriteria(10)], "eos_token_id": None}
    found = lm.generate(PROMPTS, **stop)
    assert [len(row) for row in found.token_ids] == [10 - len(prompt) for prompt in PROMPTS]
    assert found.finish_reasons == ["length"] * 3


def test_a_processor_of_ours_counts_the_row_s_own_columns(lm: LanguageModel) -> None:
    def forbid(width: int) -> list[Any]:
        return [unspool.MinLengthLogitsProcessor(width, list(range(5, 40)))]

    alone = [lm.generate([row], max_new_tokens=6, logits_processor=forbid(9)).token_ids[0] for row in PROMPTS]
    assert lm.generate(PROMPTS, max_new_tokens=6, logits_processor=forbid(9)).token_ids == alone


def test_the_reference_s_form_keeps_the_padding() -> None:
    seen: Seen = set()
    unspool.generate(FakeModel(), **pad_left(PROMPTS), max_new_tokens=2, pad_token_id=0, **make_hook("processor", seen))
    assert {len(row) for row in seen} == {7, 8}

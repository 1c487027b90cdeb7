"""Token healing: one greedy step that chooses every prompt's last token again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from unspool.config import GenerationConfig
from unspool.decoding.preparation import Hooks
from unspool.decoding.prompts import Prompts
from unspool.decoding.run import Run
from unspool.logits import LogitsProcessor
from unspool.plan import PromptShape, merge, settle
from unspool.protocols import Model
from unspool.text.healing import Tail, find_added_text, find_tail

FAVOUR = 1.0  # bias of the original token, as in the reference: "http" need not become "https"


class GrowingTokens(LogitsProcessor):
    """Restricts each row to the tokens that extend its last one."""

    def __init__(self, tails: Sequence[Tail]) -> None:
        self._tails = tails

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:  # noqa: ARG002 - the tails are known
        """The scores with all but those tokens at -inf."""
        result = torch.full_like(scores, float("-inf"))
        for row, tail in enumerate(self._tails):
            choices = torch.tensor(tail.choices, device=scores.device)
            result[row, choices] = scores[row, choices]
            result[row, tail.token] += FAVOUR
        return result


def heal_prompts(model: Model, prompts: Prompts, tokenizer: Any, pad_token_id: int) -> tuple[Prompts, list[str]]:
    """The prompts with their last tokens chosen again, and the text that this added to each."""
    width = prompts.width
    rows = [prompts.ids[row, width - length :].tolist() for row, length in enumerate(prompts.lengths)]
    tails = {row: find_tail(tokenizer, ids, model.info.vocab_size) for row, ids in enumerate(rows)}
    found = {row: tail for row, tail in tails.items() if tail is not None}
    added = [""] * len(rows)
    if not found:
        return prompts, added
    chosen = _choose(model, list(found.values()), pad_token_id)
    for (row, tail), token in zip(found.items(), chosen, strict=True):
        rows[row] = [*tail.kept, token]
        added[row] = find_added_text(tokenizer, tail, token)
    return _fill_left(rows, pad_token_id, prompts), added


def _choose(model: Model, tails: list[Tail], pad_token_id: int) -> list[int]:
    """Each prompt's new last token, by one greedy step."""
    prompts = _fill_left([list(tail.kept) for tail in tails], pad_token_id)
    prompts = Prompts(prompts.ids.to(model.device), prompts.lengths)
    config = GenerationConfig(max_new_tokens=1, pad_token_id=pad_token_id)
    shape = PromptShape(prompts.num_rows, prompts.width, max(prompts.lengths))
    run = Run(model, prompts, settle(*merge(None, config, {}), model.info, shape), Hooks([GrowingTokens(tails)]))
    for _ in run:
        pass
    return [tokens[0] for tokens in run.emitted]


def _fill_left(rows: list[list[int]], pad_token_id: int, like: Prompts | None = None) -> Prompts:
    longest = max(map(len, rows))
    ids = torch.tensor([[pad_token_id] * (longest - len(row)) + row for row in rows])
    if like is None:
        return Prompts(ids, [len(row) for row in rows])
    return replace(like, ids=ids.to(like.ids.device), lengths=[len(row) for row in rows])

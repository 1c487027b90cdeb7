"""Who left a row without a token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from unspool.errors import NoTokenLeftError
from unspool.logits.base import LogitsProcessorList


def explain_no_token(
    processors: LogitsProcessorList,
    input_ids: torch.Tensor,
    scores: torch.Tensor,
    extra: Mapping[str, Any],
    *,
    place: int,
    where: str,
) -> NoTokenLeftError:
    """Run the processors one by one on the model's logits, and name those that took tokens from the row at `place`."""
    if bool(scores[place].isnan().any()):
        return NoTokenLeftError(
            f"no token can be chosen for {where}: the model's own logits are NaN there; its weights or its number "
            "format are at fault (try dtype=torch.float32), no processor"
        )
    takers: list[str] = []
    for processor in processors:
        if bool(scores[place].isneginf().all()):
            break  # what others make of that, NaN for instance, is not their fault
        name = getattr(processor, "__name__", type(processor).__name__)
        after = LogitsProcessorList([processor], starts=processors.starts)(input_ids, scores.clone(), **extra)
        if bool(after[place].isnan().any()) or bool(after[place].isposinf().any()):
            return NoTokenLeftError(
                f"no token can be chosen for {where}: {name} made scores NaN or infinite there; mend it, or set "
                "remove_invalid_values=True"
            )
        num_taken = int(((scores[place] > float("-inf")) & (after[place] == float("-inf"))).sum())
        if num_taken:
            takers.append(f"{name} ({num_taken} tokens)")
        scores = after
    return NoTokenLeftError(
        f"no token is left to choose for {where}: {_join(takers) or 'the model'} forbade all {scores.shape[-1]} of "
        "them; loosen one of these, so that a token stays possible"
    )


def _join(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)

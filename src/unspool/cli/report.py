"""An answer as JSON, and its cost in one line."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unspool.outputs import Generation, Stats, TokenLogprob


def format_stats(stats: Stats, finish_reasons: Sequence[str] = ()) -> str:
    """One line: speed first, then its parts, and the finish reasons other than the model's own end."""
    early = [reason for reason in dict.fromkeys(finish_reasons) if reason != "eos"]
    parts = [
        f"{stats.tokens_per_second:.1f} tokens/s" if stats.tokens_per_second else "",
        f"first token {stats.first_token_seconds:.2f} s",
        f"{stats.prompt_tokens} prompt + {count(stats.new_tokens, 'new token')}",
        count(stats.forward_passes, "forward pass", "forward passes"),
        _format_speculation(stats),
        f"ended by {', '.join(early)}" if early else "",
    ]
    return " · ".join(part for part in parts if part)


def _format_speculation(stats: Stats) -> str:
    speculation = stats.speculation
    if speculation is None:
        return ""
    right = f"{sum(speculation.accepted)} of {count(sum(speculation.drafted), 'drafted token')} right"
    return f"{right}, {speculation.mean_accepted_length:.1f} a check" if sum(speculation.checks) else right


def count(number: int, one: str, many: str | None = None) -> str:
    """`1 token`, `2 tokens`."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def describe_stats(stats: Stats) -> dict[str, Any]:
    """The costs as JSON values."""
    values = {**asdict(stats), "tokens_per_second": stats.tokens_per_second}
    if stats.speculation is None:
        del values["speculation"]
    else:
        values["speculation"]["mean_accepted_length"] = stats.speculation.mean_accepted_length
    return values


def describe_generation(
    generation: Generation, head: Mapping[str, Any], write_token: Callable[[int], str]
) -> dict[str, Any]:
    """The object that `--json` prints."""
    report: dict[str, Any] = {
        **head,
        "text": generation.text,
        "texts": generation.texts,
        "token_ids": generation.token_ids,
        "prompt_token_ids": generation.prompt_token_ids,
        "finish_reasons": generation.finish_reasons,
        "stats": describe_stats(generation.stats),
    }
    for name, rows in (("logprobs", generation.logprobs), ("prompt_logprobs", generation.prompt_logprobs)):
        if rows is not None:
            report[name] = [
                [None if token is None else _describe_logprob(token, write_token) for token in row] for row in rows
            ]
    if generation.thoughts is not None:
        report["thoughts"] = generation.thoughts
    if generation.dola_layers is not None:
        report["dola_layers"] = generation.dola_layers
    return report


def _describe_logprob(token: TokenLogprob, write_token: Callable[[int], str]) -> dict[str, Any]:
    def describe(token_id: int, logprob: float) -> dict[str, Any]:
        # JSON has no infinities: an impossible token has the log-probability null.
        value = logprob if math.isfinite(logprob) else None
        return {"token_id": token_id, "token": write_token(token_id), "logprob": value}

    chosen = describe(token.token_id, token.logprob)
    return {**chosen, "top": [describe(token_id, logprob) for token_id, logprob in token.top]} if token.top else chosen

"""What a request cost, in the forms that clients read."""

from __future__ import annotations

from typing import Any

from unspool.server.work import Work


def count_usage(work: Work) -> dict[str, Any]:
    """OpenAI's form."""
    prompt = work.order.num_prompt_tokens
    made: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": work.num_new,
        "total_tokens": prompt + work.num_new,
        "prompt_tokens_details": {"cached_tokens": work.num_cached},
    }
    if work.order.settings.get("thoughts"):
        made["completion_tokens_details"] = {"reasoning_tokens": work.num_thinking}
    return made

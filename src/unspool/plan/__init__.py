"""From settings to a plan: who set what, every conflict, before the first forward pass.

Defaults < the model's generation_config.json < the caller's config < the call's arguments.
"""

from __future__ import annotations

from unspool.lazy import find_lazily

HOMES = {
    "Origin": "unspool.plan.origins",
    "Plan": "unspool.plan.call",
    "PromptShape": "unspool.plan.prompt_shape",
    "as_token_ids": "unspool.plan.settling",
    "find_marking_pad": "unspool.plan.settling",
    "merge": "unspool.plan.origins",
    "settle": "unspool.plan.settling",
}
"""Where each name is: a config asks the tables here for its pairs, without what plans need besides."""

__all__ = sorted(HOMES)
__getattr__ = find_lazily(__name__, HOMES)

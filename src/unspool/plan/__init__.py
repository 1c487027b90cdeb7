"""From settings to a plan: who set what, every conflict, before the first forward pass.

Defaults < the model's generation_config.json < the caller's config < the call's arguments.
"""

from __future__ import annotations

from unspool.plan.call import Plan, PromptShape, StrategyName
from unspool.plan.origins import Origin, merge
from unspool.plan.settling import as_token_ids, settle

__all__ = ["Origin", "Plan", "PromptShape", "StrategyName", "as_token_ids", "merge", "settle"]

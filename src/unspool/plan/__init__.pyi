# Made by tools/make_stubs.py.
from unspool.plan.call import Plan as Plan
from unspool.plan.origins import Origin as Origin
from unspool.plan.origins import merge as merge
from unspool.plan.prompt_shape import PromptShape as PromptShape
from unspool.plan.settling import as_token_ids as as_token_ids
from unspool.plan.settling import find_marking_pad as find_marking_pad
from unspool.plan.settling import settle as settle

__all__ = [
    "Origin",
    "Plan",
    "PromptShape",
    "as_token_ids",
    "find_marking_pad",
    "merge",
    "settle",
]

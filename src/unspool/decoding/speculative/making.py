"""From a plan to a drafter and its policy."""

from __future__ import annotations

from unspool.cache import ROLL_BACK
from unspool.config.drafting import Drafting
from unspool.decoding.prompts import Prompts
from unspool.decoding.rows import Rows
from unspool.decoding.speculative.drafter import Drafter
from unspool.decoding.speculative.policy import Policy, Scheduled
from unspool.decoding.speculative.prompt_lookup import PromptLookup
from unspool.decoding.step import Step
from unspool.errors import UnsupportedError
from unspool.plan import Plan
from unspool.protocols import Model


def make_policy(drafting: Drafting, drafter: Drafter) -> Policy:
    """What decides how long drafts are."""
    return Scheduled(drafting.num_tokens, drafting.schedule)


def make_drafter(
    plan: Plan, step: Step, rows: Rows, prompts: Prompts, assistant: Model | None
) -> Drafter | None:
    """The drafter that the plan names, ready to guess what follows the rows; None where it names none."""
    drafting = plan.drafting
    if drafting is None:
        return None
    if drafting.kind == "prompt_lookup":
        return PromptLookup(rows, drafting.max_ngram_size, plan.eos_token_ids, _read_sources(prompts, plan.copies))
    raise UnsupportedError(f"this version has no drafter {drafting.kind!r} yet")


def _read_sources(prompts: Prompts, copies: int) -> list[list[int]] | None:
    """An encoder's tokens, for every row of the call."""
    source = prompts.source
    if source is None or source.tokens is None:
        return None
    rows = [source.tokens[row, :length].tolist() for row, length in enumerate(source.lengths)]
    return [tokens for tokens in rows for _ in range(copies)]

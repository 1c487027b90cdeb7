"""Calls that differ from an earlier one in their prompt, length or seed alone, as most requests of a server do.

Whatever a call decides from its settings and its model is taken from the earlier one. What depends on the prompt is
checked anew: its tokens, and the lengths.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from copy import copy
from dataclasses import replace
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

import torch

from unspool.config import PARAMETERS, GenerationConfig
from unspool.config.values import check_value
from unspool.decoding.preparation import Hooks
from unspool.decoding.prompts import Prompts, read_ids
from unspool.decoding.run import Run
from unspool.plan import Plan, PromptShape
from unspool.plan.memo import Memo, describe_values
from unspool.plan.settling import settle_lengths
from unspool.protocols import Model


class _Known(NamedTuple):
    """What calls of a kind have in common."""

    plan: Plan
    hooks: Hooks


_FREE: Final = ("max_new_tokens", "seed")  # settings that decide nothing but lengths and draws
_known: WeakKeyDictionary[Model, Memo[_Known]] = WeakKeyDictionary()


def describe_call(model: Any, tokenizer: Any, settings: Mapping[str, Any], num_rows: int) -> Hashable | None:
    """A key for calls with equal settings; None if they have more than settings that can be compared."""
    if not all(name in PARAMETERS for name in settings):
        return None  # an argument of the call: a processor, a cache, a drafting model
    config = getattr(model, "generation_config", None)
    if not isinstance(config, GenerationConfig | None):
        return None
    own = {} if config is None else {name: getattr(config, name) for name in config.explicit}
    free = _find_free(settings)
    values = describe_values(own, {name: None if name in free else value for name, value in settings.items()})
    return None if values is None else (id(tokenizer), num_rows, values, tuple(free))


def _find_free(settings: Mapping[str, Any]) -> dict[str, int]:
    return {name: settings[name] for name in _FREE if type(settings.get(name)) is int}


def start_again(
    key: Hashable | None,
    model: Any,
    tokenizer: Any,
    ids: torch.Tensor,
    listed: list[list[int]],
    settings: Mapping[str, Any],
) -> Run | None:
    """A run over ids (rows, length) that are all real, and the same as lists, like one that was kept under the key;
    None if there is none."""
    memo = None if key is None else _known.get(model)
    known = None if memo is None else memo.find(key)
    if known is None or known.hooks.tokenizer is not tokenizer:
        return None
    ids = read_ids(ids, model.info.vocab_size)
    rows, width = ids.shape
    plan = settle_lengths(_follow(known.plan, _find_free(settings)), model.info, PromptShape(rows, width, width))
    prompts = Prompts(ids, [width] * rows, on_host=ids, listed=listed, hides_padding=True, device=model.device)
    return Run(model, prompts, plan, known.hooks)


def _follow(plan: Plan, free: Mapping[str, int]) -> Plan:
    """The plan with other values of the settings that decide little."""
    if all(getattr(plan.settings, name) == value for name, value in free.items()):
        return plan
    for name, value in free.items():
        check_value(PARAMETERS[name], value)
    settings = copy(plan.settings)
    vars(settings).update(free)
    return replace(plan, settings=settings, seeds=(free["seed"],) if "seed" in free else plan.seeds)


def keep_run(key: Hashable | None, model: Any, run: Run) -> None:
    """Let calls with the same key begin as this one did, if nothing of it was its own."""
    parts = run.parts
    prompts, hooks, plan = parts.prompts, parts.hooks, parts.plan
    has_more = hooks != Hooks(tokenizer=hooks.tokenizer) or prompts.num_written
    is_more = prompts.source or prompts.negative or prompts.embeds is not None or prompts.order is not None
    is_plain = parts.model is model and prompts.on_host is not None and min(prompts.lengths) == prompts.width
    is_changed = plan.compiling is not None or plan.settings.token_healing  # the model, the prompt
    if key is not None and is_plain and not has_more and not is_more and not is_changed:
        _known.setdefault(model, Memo()).keep(key, _Known(plan, hooks))

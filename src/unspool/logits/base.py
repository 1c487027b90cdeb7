"""What a logits processor is, and the list that runs several in turn."""

from __future__ import annotations

import copy
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Container
from functools import lru_cache
from types import FunctionType, MethodType
from typing import Any

import torch

from unspool.errors import SettingError
from unspool.logits.rows import RowTable, RowValues


class LogitsProcessor(ABC):
    """A pure function of the history and the scores: `(input_ids, scores) -> scores`, each row on its own."""

    @abstractmethod
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """New scores (rows, vocab) from the tokens so far (rows, length) and the scores; both stay unchanged."""

    def select_rows(self, index: torch.Tensor) -> LogitsProcessor:
        """The processor for the rows at `index`, in that order; one that holds nothing per row is its own."""
        held = {
            name: value
            for name, value in vars(self).items()
            if isinstance(value, (RowValues, RowTable)) and value.is_per_row
        }
        if not held:
            return self
        chosen = copy.copy(self)
        for name, value in held.items():
            setattr(chosen, name, value.select(index))
        return chosen


class LogitsProcessorList(list[Any]):
    """Processors run in turn; arguments beyond the two go to those whose signature takes them."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """The scores after every processor."""
        for processor in self:
            extra = _find_extra(processor)
            if extra is None:
                scores = processor(input_ids, scores)
                continue
            required, optional, takes_any = extra
            missing = [name for name in required if name not in kwargs]
            if missing:
                raise SettingError(
                    f"{type(processor).__name__} needs {', '.join(missing)}, which the call does not pass. "
                    "Make sure that every argument its __call__ requires is given to the processor list."
                )
            taken = kwargs if takes_any else {name: kwargs[name] for name in required + optional if name in kwargs}
            scores = processor(input_ids, scores, **taken)
        return scores

    def takes(self, name: str) -> bool:
        """Whether a processor asks for the argument `name` beside the ids and the scores."""
        found = [_find_extra(processor) for processor in self]
        return any(name in extra[0] + extra[1] for extra in found if extra is not None)

    def check_arguments(self, given: Container[str]) -> None:
        """Raise for a processor that can't do without an argument that no call will give it."""
        for processor in self:
            extra = _find_extra(processor)
            for name in extra[0] if extra is not None else ():
                if name not in given:
                    raise SettingError(
                        f"{type(processor).__name__} needs `{name}` beside the ids and the scores, which decoding "
                        "does not give; let it have a default"
                    )

    def select_rows(self, index: torch.Tensor) -> LogitsProcessorList:
        """The list for the rows at `index`; a user's processor without `select_rows` stays as it is."""
        return LogitsProcessorList(
            processor.select_rows(index) if hasattr(processor, "select_rows") else processor for processor in self
        )


Extra = tuple[tuple[str, ...], tuple[str, ...], bool]


def _find_extra(processor: Any) -> Extra | None:
    # Looked up by the function that will run, which outlives the many processors of a class.
    if isinstance(processor, (FunctionType, MethodType)):
        return _read_signature(processor, 2)
    return _read_signature(type(processor).__call__, 3)


@lru_cache(maxsize=512)
def _read_signature(function: Callable[..., Any], num_known: int) -> Extra | None:
    """The names that a processor requires and takes beyond the ids and the scores; None if there are none."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a builtin that does not say
        return None
    named = [p for p in parameters[num_known:] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    required = tuple(p.name for p in named if p.default is p.empty)
    optional = tuple(p.name for p in named if p.default is not p.empty)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return (required, optional, takes_any) if named or takes_any else None

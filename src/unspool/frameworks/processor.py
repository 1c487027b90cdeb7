"""What processors of both frameworks are: a rule over arrays, called with the ids, the scores and the length so far."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from typing import Any

from unspool.errors import InputError, SettingError, UnsupportedError
from unspool.frameworks.arrays import Array, Arrays


class Abstract:
    """A base to derive processors of one's own from."""

    @staticmethod
    def open_arrays() -> Arrays:
        """The framework's operations; raises where it is not installed."""
        raise NotImplementedError

    def __call__(self, input_ids: Array, scores: Array, cur_len: Any = None) -> Array:
        """Refused: only what derives from it can be called."""
        raise UnsupportedError(
            f"{type(self).__name__} is abstract: derive a class from it that has a __call__ of its own"
        )


class Rule(Abstract, ABC):
    """A pure function of the first `cur_len` columns of the ids and of the scores, which may be traced."""

    def __new__(cls, *_: Any, **__: Any) -> Any:
        cls.open_arrays()  # raises where the framework is missing, before any score is there
        return super().__new__(cls)

    def __call__(self, input_ids: Array, scores: Array, cur_len: Any = None) -> Array:
        """New scores; `cur_len` is a number, or an array of one, that some rules do without."""
        if scores.shape[-1] is None:
            raise InputError("the scores' last axis has no known size; trace with the size of the vocabulary")
        return self.change(self.open_arrays(), input_ids, scores, cur_len)

    @abstractmethod
    def change(self, xp: Arrays, input_ids: Array, scores: Array, cur_len: Any) -> Array:
        """New scores, over a framework's arrays."""

    def read_ids(self, xp: Arrays, input_ids: Array, scores: Array) -> Array:
        """The ids (rows, length), whose rows are the scores'."""
        shapes = [tuple(getattr(one, "shape", ())) for one in (input_ids, scores)]
        if [len(shape) for shape in shapes] != [2, 2] or shapes[0][0] != shapes[1][0]:
            raise InputError(
                f"{type(self).__name__} reads ids (rows, length) beside scores (rows, vocabulary), and their shapes "
                f"are {shapes[0]} and {shapes[1]}"
            )
        if not shapes[0][1]:
            raise InputError(f"{type(self).__name__} reads ids, and there are none, or of no known length when traced")
        return xp.ids(input_ids, scores)


class ProcessorList(list[Any]):
    """Processors in turn; arguments beyond the three go to those whose signature names them."""

    def __call__(self, input_ids: Array, scores: Array, cur_len: Any, **kwargs: Any) -> Array:
        """The scores after every processor."""
        for processor in self:
            names = list(inspect.signature(processor.__call__).parameters.values())[3:]
            missing = [one.name for one in names if one.default is one.empty and one.name not in kwargs]
            missing = [name for name in missing if name not in ("args", "kwargs")]
            if missing:
                raise SettingError(
                    f"{type(processor).__name__} needs {', '.join(missing)}, which the call does not pass; give them "
                    "to the list by name"
                )
            taken = {one.name: kwargs[one.name] for one in names if one.name in kwargs}
            scores = processor(input_ids, scores, cur_len, **taken)
        return scores

"""What a logits processor is, and the list that runs several in turn."""

from __future__ import annotations

import copy
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from functools import lru_cache
from types import FunctionType, MappingProxyType, MethodType
from typing import Any, ClassVar

import torch

from unspool.errors import SettingError
from unspool.kernels.sending import send
from unspool.logits.rows import RowTable, RowValues, TokenIds

_WHOLE = "_whole_signature"  # attribute of a processor's `__call__`: its signature with the optional arguments
Joining = Mapping[str, Callable[[Any, Any], Any]]


def _hide_optional(call: FunctionType) -> None:
    """Let a signature show what is required: transformers' own generate() wants every argument that it shows."""
    whole = inspect.signature(call)
    shown = [p for p in whole.parameters.values() if p.default is p.empty or p.kind is p.VAR_KEYWORD]
    if len(shown) < len(whole.parameters):
        call.__dict__[_WHOLE] = whole
        call.__dict__["__signature__"] = whole.replace(parameters=shown)


class LogitsProcessor(ABC):
    """A pure function of the history and the scores: `(input_ids, scores) -> scores`, each row on its own."""

    # Whether what it does may depend on how many columns the history has. Once rows have come together, one that does
    # is given `starts`, the columns before each row's own history, if it takes them; else it runs on each set alone.
    counts_columns: ClassVar[bool] = True
    remembers_steps: ClassVar[bool] = False  # whether it carries something from one step to the next
    joined_by: ClassVar[Joining] = MappingProxyType({})  # how attributes follow when rows come together
    joined_as: ClassVar[str] = ""  # what processors of several classes that can become one have in common
    follows_moves: ClassVar[bool] = False  # whether `join` lets the columns that it counts move with the rows

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        call = cls.__dict__.get("__call__")
        if isinstance(call, FunctionType):
            _hide_optional(call)
        if call is not None and "find_forbidden" not in cls.__dict__:
            cls.find_forbidden = LogitsProcessor.find_forbidden  # type: ignore[method-assign]  # a parent's is of its call

    @abstractmethod
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """New scores (rows, vocab) from the tokens so far (rows, length) and the scores; both stay unchanged."""

    def find_forbidden(self, width: int) -> Sequence[int] | None:
        """The tokens that it takes from every row of a history of so many columns without padding, if it does nothing
        else to scores; None if it does, or if that depends on the tokens."""
        return None

    def join(self, other: Any, counts: tuple[int, int], shifts: tuple[int, int]) -> LogitsProcessor | None:
        """The processor for so many rows of this one and, after them, of another of its kind, whose columns move to
        the right by `shifts`; None if the two differ in more than values per row."""
        joined = copy.copy(self)
        for name, own in vars(self).items():
            theirs = vars(other).get(name)
            if isinstance(own, RowValues) and isinstance(theirs, RowValues):
                setattr(joined, name, own.join(theirs, counts))
            elif isinstance(own, RowTable) and isinstance(theirs, RowTable):
                both = own.join(theirs, counts)
                if both is None:
                    return None
                setattr(joined, name, both)
            elif name in self.joined_by:
                setattr(joined, name, self.joined_by[name](own, theirs))
            elif not _is_same(own, theirs):
                return None
        return joined

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


def _check_made(processor: Any, made: Any, scores: torch.Tensor, num_rows: int) -> torch.Tensor:
    """What a processor returned for scores, which a caller's own may forget to do. Guidance over the batch makes one
    row of two, as many as there are `num_rows`."""
    if isinstance(made, torch.Tensor) and made.shape in (scores.shape, (num_rows, *scores.shape[1:])):
        return made
    found = f"a tensor of the shape {tuple(made.shape)}" if isinstance(made, torch.Tensor) else f"{made!r:.60}"
    raise SettingError(
        f"{type(processor).__name__} returned {found}; a processor returns scores of the shape that it was given, "
        f"here {tuple(scores.shape)}"
    )


class LogitsProcessorList(list[Any]):
    """Processors run in turn; arguments beyond the two go to those whose signature takes them."""

    def __init__(self, processors: Iterable[Any] = (), *, starts: Sequence[int] | None = None) -> None:
        """`starts` are the columns before each row's own history, once rows have come together."""
        super().__init__(processors)
        self.starts = starts
        self._sent: torch.Tensor | None = None  # the same on a device

    @property
    def remembers_steps(self) -> bool:
        """Whether one of them carries something from one step to the next."""
        return any(getattr(processor, "remembers_steps", False) for processor in self)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """The scores after every processor."""
        if self.starts is not None:
            if self._sent is None or self._sent.device != scores.device:
                self._sent = send(self.starts, scores.device)
            kwargs["starts"] = self._sent
        for processor in self:
            extra = _find_extra(processor)
            if extra is None:
                scores = _check_made(processor, processor(input_ids, scores), scores, input_ids.shape[0])
                continue
            required, optional, takes_any = extra
            missing = [name for name in required if name not in kwargs]
            if missing:
                raise SettingError(
                    f"{type(processor).__name__} needs {', '.join(missing)}, which the call does not pass. "
                    "Make sure that every argument its __call__ requires is given to the processor list."
                )
            taken = kwargs if takes_any else {name: kwargs[name] for name in required + optional if name in kwargs}
            scores = _check_made(processor, processor(input_ids, scores, **taken), scores, input_ids.shape[0])
        return scores

    def find_forbidden(self, width: int) -> tuple[int, ...] | None:
        """The tokens that they take from every row of a history of so many columns, if they do nothing else."""
        if self.starts is not None:
            return None
        found: list[int] = []
        for processor in self:
            own = processor.find_forbidden(width) if isinstance(processor, LogitsProcessor) else None
            if own is None:
                return None
            found += own
        return tuple(found)

    def takes(self, name: str) -> bool:
        """Whether a processor asks for the argument `name` beside the ids and the scores."""
        own = [processor for processor in self if not isinstance(processor, RowGroups)]
        found = [_find_extra(processor) for processor in own]
        return any(name in extra[0] + extra[1] for extra in found if extra is not None) or any(
            processors.takes(name) for one in self if isinstance(one, RowGroups) for processors, _, _ in one.groups
        )

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

    def join_rows(
        self, other: LogitsProcessorList, counts: tuple[int, int], shifts: tuple[int, int]
    ) -> LogitsProcessorList:
        """The list for so many rows of this one and, after them, of another, whose columns move by `shifts`.

        Processors that both have become one with values per row. Others run on their own rows.
        """
        starts = _join_starts((self.starts, other.starts), counts, shifts)
        joined, is_moved = LogitsProcessorList(starts=starts), any(starts)
        for one, two in _align(self, other):
            both = None
            if one and two and _can_join(one[0], two[0], is_moved=is_moved):
                both = one[0].join(two[0], counts, shifts)
            if both is None:
                groups = (
                    LogitsProcessorList(own, starts=held) for own, held in ((one, self.starts), (two, other.starts))
                )
                both = RowGroups(
                    [group for each in zip(groups, counts, shifts, strict=True) for group in _as_groups(*each)]
                )
            joined.append(both)
        return joined

    def select_rows(self, index: torch.Tensor) -> LogitsProcessorList:
        """The list for the rows at `index`; a user's processor without `select_rows` stays as it is."""
        return LogitsProcessorList(
            (processor.select_rows(index) if hasattr(processor, "select_rows") else processor for processor in self),
            starts=None if self.starts is None else [self.starts[row] for row in index.tolist()],
        )


class RowGroups(LogitsProcessor):
    """Lists of processors for groups of rows that stand one after the other; each is shown its rows as if alone."""

    def __init__(self, groups: Sequence[tuple[LogitsProcessorList, int, int]]) -> None:
        self.groups = list(groups)  # the processors, how many rows they are for, and the columns before theirs

    def __call__(
        self,
        input_ids: torch.Tensor,
        scores: torch.Tensor,
        uniforms: torch.Tensor | None = None,
        pads: torch.Tensor | None = None,
        host_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The scores of every group after its own processors."""
        parts, first = [], 0
        for processors, count, shift in self.groups:
            own = slice(first, first + count)
            first += count
            extra = {} if uniforms is None else {"uniforms": uniforms[own]}
            if pads is not None:
                extra["pads"] = (pads[own] - shift).clamp(min=0)
            if host_ids is not None:
                extra["host_ids"] = host_ids[own, shift:]
            parts.append(processors(input_ids[own, shift:], scores[own], **extra))
        return torch.cat(parts)

    def join(self, other: Any, counts: tuple[int, int], shifts: tuple[int, int]) -> LogitsProcessor | None:
        """None: the list puts the groups of both side by side."""
        return None

    def select_rows(self, index: torch.Tensor) -> LogitsProcessor:
        """The groups for the rows at `index`, which keep their order."""
        groups, first = [], 0
        for processors, count, shift in self.groups:
            own = index[(index >= first) & (index < first + count)] - first
            first += count
            if len(own):
                groups.append((processors.select_rows(own), len(own), shift))
        return RowGroups(groups)


def _as_groups(processors: LogitsProcessorList, count: int, shift: int) -> list[tuple[LogitsProcessorList, int, int]]:
    """A list as groups of rows, whose columns have moved by `shift`."""
    if len(processors) == 1 and isinstance(processors[0], RowGroups):
        return [(own, rows, before + shift) for own, rows, before in processors[0].groups]
    return [(processors, count, shift)]


def _align(one: Sequence[Any], two: Sequence[Any]) -> Iterator[tuple[Sequence[Any], Sequence[Any]]]:
    """Two lists in parts that follow each other: a processor of each, both of a kind, or what only one has."""
    kinds, others = [_find_kind(each) for each in one], [_find_kind(each) for each in two]
    if kinds == others:  # as among requests that differ in values alone
        yield from ((one[place : place + 1], two[place : place + 1]) for place in range(len(kinds)))
        return
    matcher = SequenceMatcher(None, kinds, others, autojunk=False)
    for tag, first, last, other_first, other_last in matcher.get_opcodes():
        if tag == "equal":
            yield from (
                (one[n : n + 1], two[n + other_first - first : n + other_first - first + 1]) for n in range(first, last)
            )
        else:
            yield one[first:last], two[other_first:other_last]


def _join_starts(
    held: tuple[Sequence[int] | None, Sequence[int] | None], counts: tuple[int, int], shifts: tuple[int, int]
) -> list[int]:
    """The columns before the history of each row of two lists."""
    sets = zip(held, counts, shifts, strict=True)
    return [start + shift for own, count, shift in sets for start in (own if own is not None else [0] * count)]


def _find_kind(processor: Any) -> object:
    """What two processors have in common that may become one."""
    return (isinstance(processor, LogitsProcessor) and processor.joined_as) or type(processor)


def _can_join(processor: Any, other: Any, *, is_moved: bool) -> bool:
    """Whether a processor may become one with another, for rows whose columns have moved or not."""
    if not isinstance(processor, LogitsProcessor) or _find_kind(processor) != _find_kind(other):
        return False
    counts = is_moved and processor.counts_columns and not processor.follows_moves
    return not counts or LogitsProcessorList([processor]).takes("starts")


def _is_same(one: Any, two: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(two, torch.Tensor) and one.shape == two.shape and torch.equal(one, two.to(one.device))
    if isinstance(one, TokenIds):
        return isinstance(two, TokenIds) and one.ids == two.ids
    return type(one) is type(two) and isinstance(one, (int, float, str, tuple, dict, type(None))) and bool(one == two)


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
        whole = getattr(function, _WHOLE, None) or inspect.signature(function)
        parameters = list(whole.parameters.values())
    except (TypeError, ValueError):  # a builtin that does not say
        return None
    named = [p for p in parameters[num_known:] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    required = tuple(p.name for p in named if p.default is p.empty)
    optional = tuple(p.name for p in named if p.default is not p.empty)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return (required, optional, takes_any) if named or takes_any else None

"""Which rows are done, and why."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

import torch

from unspool.decoding.alone import AloneCriterion, Shown, unwrap
from unspool.decoding.rows import Joining, Rows
from unspool.outputs import StepTensors
from unspool.registry import resolve
from unspool.stopping import StoppingCriteriaList, as_row_flags
from unspool.stopping.entry import OWN_RANK, OWN_REASON, TextStop
from unspool.stopping.order import find_entry

_ROOM: Final = 64  # tokens that a row's kept end may grow by before it is cut
_ANY_TOKEN: Final[Mapping[int, bool]] = {}  # nothing is known of any


class Finish:
    """Asks every stopping criterion about every row, and remembers the first reason."""

    def __init__(self, criteria: StoppingCriteriaList, *, is_last_forced: bool = False) -> None:
        self._is_last_forced = is_last_forced  # to an end token, which is then no end of the text's own
        # What the text says comes before what a limit says, whatever order they were given in.
        known = [(criterion, find_entry(unwrap(criterion))) for criterion in criteria]
        ranked = sorted(known, key=lambda pair: OWN_RANK if pair[1] is None else pair[1].rank)
        self._criteria = [(criterion, OWN_REASON if entry is None else entry.reason) for criterion, entry in ranked]
        self.has_custom = any(entry is None for _, entry in ranked)
        # Some can be decided without a look at the history, once the token is known here; not what is derived from one.
        self.calls_criteria = any(
            entry is None or entry.reads_history or type(criterion) is not resolve(entry.stop)
            for criterion, entry in ranked
        )
        self.asks_alone = any(isinstance(criterion, AloneCriterion) for criterion in criteria)
        self._texts: list[tuple[TextStop, str]] = []  # what is decided by a row's last tokens
        self._tails: dict[int, list[int]] | None = None  # those of each row, if somebody follows the rows
        self._reach = 0
        self._reason_of: dict[int, str] = {}  # of the tokens that end a row by themselves
        self._limits: list[tuple[int, str]] = []  # columns at which every row ends
        self._clocks: list[tuple[Callable[[], bool], str]] = []  # whether every row ends now
        for criterion, entry in ranked:
            if isinstance(criterion, AloneCriterion):
                continue  # its columns are those of a row alone
            if entry is not None and entry.find_ends is not None:
                for token in entry.find_ends(criterion):
                    self._reason_of.setdefault(int(token), entry.reason)
            if entry is not None and entry.find_text is not None:
                self._texts.append((entry.find_text(criterion), entry.reason))
            if entry is not None and entry.find_limit is not None:
                self._limits.append((entry.find_limit(criterion), entry.reason))
            if entry is not None and entry.is_over is not None:
                self._clocks.append((partial(entry.is_over, criterion), entry.reason))
        self.end_tokens = tuple(sorted(self._reason_of))
        self.needs_history = self.calls_criteria or bool(self._texts)

    # --- stops that look at a row's last tokens --------------------------------------------------------
    @property
    def needs_device(self) -> bool:
        """Whether rows must be looked at where they are: the host's copies of their last tokens don't decide."""
        return self.calls_criteria or (bool(self._texts) and self._tails is None)

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        """Follow rows from their prompts on: their last tokens are kept here, each is entered when it is explained."""
        if self._texts and not self.calls_criteria:
            self._reach = max(text.reach for text, _ in self._texts)
            self._tails = {number: list(prompt[-self._reach :]) for number, prompt in enumerate(prompts)}

    def _follow(self, number: int, token: int) -> list[int]:
        """The last tokens of a row, with one more."""
        assert self._tails is not None
        tail = self._tails[number]
        tail.append(token)
        if len(tail) > 2 * self._reach + _ROOM:
            del tail[: -self._reach]
        return tail

    def find_text(self, tokens: Sequence[int]) -> str | None:
        """The reason by which the last of a row's tokens ends it, if a text does."""
        return next((reason for text, reason in self._texts if text.match(tokens) is not None), None)

    @property
    def known_ends(self) -> Mapping[int, bool] | None:
        """Tokens that texts can end in or can't, as far as that is known; None if no text ends a row."""
        if not self._texts:
            return None
        first, *others = (text.known_ends for text, _ in self._texts)
        return first if not others else _ANY_TOKEN

    def split(self, numbers: Collection[int], first: int, shift: int) -> dict[int, _Part]:
        """These stops among others', for the rows of such numbers: what was row 0 has the number `first`, and columns
        have moved by `shift`; see `JoinedFinish`."""
        return dict.fromkeys((number + first for number in numbers), _Part(self, first, shift))

    def forget(self, numbers: Collection[int]) -> None:
        """Let rows be gone, if it is known whose stops are whose."""

    def explain_rows(
        self, rows: Rows, new_tokens: Sequence[Sequence[int]], scores: StepTensors | None
    ) -> list[str | None]:
        """Why each row is done with the tokens it just got, or None; nothing is computed if the tokens decide."""
        if self._tails is not None:
            for number, tokens in zip(rows.numbers, new_tokens, strict=True):
                for token in tokens[:-1]:
                    self._follow(number, token)
        if self.needs_device or any(len(tokens) > 1 for tokens in new_tokens):
            return self.explain(rows.history(), scores, Shown.of(rows))
        return self.explain_tokens([tokens[0] for tokens in new_tokens], max(rows.ends), rows.numbers)

    def explain(
        self, history: torch.Tensor, scores: StepTensors | None, shown: Shown | None = None
    ) -> list[str | None]:
        """The reason why each row of (rows, width) is done, or None; `shown` says which rows of the call they are, for
        criteria that are asked about each alone."""
        num_rows, width = history.shape
        reasons: list[str | None] = [None] * num_rows
        is_cut = self.cuts_at(width)
        for criterion, reason in self._criteria:
            if is_cut and reason in self._reason_of.values():
                continue
            if shown is not None and isinstance(criterion, AloneCriterion):
                answer = criterion.ask(history, scores, shown)
            else:
                answer = criterion(history, scores)
            flags = as_row_flags(answer, num_rows, history.device)
            for row in torch.nonzero(flags).flatten().tolist():
                reasons[row] = reasons[row] or reason
        return reasons

    def explain_tokens(
        self, tokens: Sequence[int], width: int, numbers: Sequence[int] | None = None
    ) -> list[str | None]:
        """The same for rows that got a token each and are now `width` columns long, if no history is needed; or rows of
        these numbers, if they are followed."""
        found: Sequence[str | None] = [None] * len(tokens)
        if self._texts:
            assert numbers is not None
            found = [self.find_text(self._follow(number, token)) for number, token in zip(numbers, tokens, strict=True)]
        return self._explain_found(tokens, width, found)

    def explain_texts(self, texts: Sequence[Sequence[int]], width: int) -> list[str | None]:
        """The same for rows of which all tokens are here."""
        found = [self.find_text(text) for text in texts] if self._texts else [None] * len(texts)
        return self._explain_found([text[-1] for text in texts], width, found)

    def _explain_found(self, tokens: Sequence[int], width: int, found: Sequence[str | None]) -> list[str | None]:
        """The same, once it is known what texts say."""
        assert not self.calls_criteria
        limit = next((reason for most, reason in self._limits if width >= most), None)
        if self.cuts_at(width):
            return [reason or limit for reason in found]
        if limit is None:  # asked once: all rows end together
            limit = next((reason for is_over, reason in self._clocks if is_over()), None)
        return [self._reason_of.get(token) or text or limit for token, text in zip(tokens, found, strict=True)]

    def explain_token(self, token: int, width: int, number: int | None = None) -> str | None:
        """The same for one row."""
        return self.explain_tokens([token], width, None if number is None else [number])[0]

    @property
    def quick_ends(self) -> dict[int, str] | None:
        """The tokens that end a row, with the reason, if nothing else does but a length (`count_left`) and a text
        (`known_ends`); else None."""
        return None if self.calls_criteria or self._clocks else self._reason_of

    @property
    def is_quick(self) -> bool:
        """Whether rows are ended by tokens and lengths alone."""
        return not (self.calls_criteria or self._texts or self._clocks)

    def find_limit(self) -> int | None:
        """The column at which all rows end; None if no length ends them."""
        return min((most for most, _ in self._limits), default=None)

    def count_left(self, width: int) -> int | None:
        """How many columns more rows of that width may get; None if no length ends them."""
        limit = self.find_limit()
        return None if limit is None else max(0, limit - width)

    def ends_at(self, width: int) -> bool:
        """Whether all rows are done at that width, whatever their tokens are."""
        return any(width >= most for most, _ in self._limits)

    def cuts_at(self, width: int) -> bool:
        """Whether an end token in the last of `width` columns was forced there, and the limit is why the row ends."""
        return self._is_last_forced and self.ends_at(width)


class _Part(NamedTuple):
    """The stops of rows that came together."""

    finish: Finish
    first: int  # the number that their row 0 has among all
    shift: int  # the columns before those that they would have alone

    def explain(self, token: int, width: int, number: int) -> str | None:
        """Why a row of theirs is done with a token that makes it `width` columns long, or None."""
        return self.finish.explain_token(token, width - self.shift, number - self.first)


class JoinedFinish(Finish):
    """The stops of rows that came together: each set of rows has its own, and counts its own columns."""

    def __init__(self, parts: dict[int, _Part]) -> None:
        self._parts = parts  # by the number of each row
        self._texts, self._tails = [], None  # each part has its own
        listed = self._list_parts()
        self.has_custom = any(part.finish.has_custom for part in listed)
        self.calls_criteria = any(part.finish.calls_criteria for part in listed)
        self.needs_history = any(part.finish.needs_history for part in listed)
        self.asks_alone = any(part.finish.asks_alone for part in listed)
        self.end_tokens = tuple(sorted({token for part in listed for token in part.finish.end_tokens}))
        # If little ends rows, most steps' tokens are seen at a glance to end none.
        self._ends = frozenset(self.end_tokens) if all(part.finish.is_quick for part in listed) else None
        self._follow_limits(listed)

    def _follow_limits(self, parts: Sequence[_Part]) -> None:
        limits = [part.finish.find_limit() for part in parts]
        known = [limit + part.shift for limit, part in zip(limits, parts, strict=True) if limit is not None]
        self._next_limit = min(known, default=None)

    def _list_parts(self) -> list[_Part]:
        return list({id(part): part for part in self._parts.values()}.values())

    @classmethod
    def of(cls, sets: Sequence[Finish], numbers: Sequence[Collection[int]], joining: Joining) -> JoinedFinish:
        """The stops of several sets of rows that have come together, and the numbers that the rows of each had."""
        parts: dict[int, _Part] = {}
        for finish, own, first, shift in zip(sets, numbers, joining.firsts, joining.shifts, strict=True):
            parts |= finish.split(own, first, shift)
        return cls(parts)

    def split(self, numbers: Collection[int], first: int, shift: int) -> dict[int, _Part]:
        moved = {id(part): _Part(part.finish, part.first + first, part.shift + shift) for part in self._list_parts()}
        return {number + first: moved[id(self._parts[number])] for number in numbers}

    def forget(self, numbers: Collection[int]) -> None:
        for number in numbers:
            self._parts.pop(number, None)
        self._follow_limits(self._list_parts())

    @property
    def needs_device(self) -> bool:
        return any(part.finish.needs_device for part in self._list_parts())

    def explain_rows(
        self, rows: Rows, new_tokens: Sequence[Sequence[int]], scores: StepTensors | None
    ) -> list[str | None]:
        """Every part's own reasons for its own rows."""
        width, reasons = (
            max(rows.ends),
            self.explain_tokens([own[-1] for own in new_tokens], max(rows.ends), rows.numbers),
        )
        if self.needs_device:
            history = rows.history()
            for part in self._list_parts():
                places = [place for place, number in enumerate(rows.numbers) if self._parts.get(number) is part]
                if places and part.finish.needs_device:
                    found = part.finish.explain(history[places, part.shift : width], scores)
                    for place, reason in zip(places, found, strict=True):
                        reasons[place] = reason
        return reasons

    def explain(
        self, history: torch.Tensor, scores: StepTensors | None, shown: Shown | None = None
    ) -> list[str | None]:
        """Why each row of (rows, width) is done, or None; `shown` says which rows they are."""
        assert shown is not None
        reasons: list[str | None] = [None] * len(history)
        for part in self._list_parts():
            places = [place for place, number in enumerate(shown.numbers) if self._parts.get(number) is part]
            if places:
                for place, reason in zip(
                    places, part.finish.explain(history[places, part.shift :], scores), strict=True
                ):
                    reasons[place] = reason
        return reasons

    def explain_tokens(
        self, tokens: Sequence[int], width: int, numbers: Sequence[int] | None = None
    ) -> list[str | None]:
        """Why rows of these numbers are done with a token each; nothing is said of those whose stops must see them, and
        of those that have left."""
        is_short = self._next_limit is None or width < self._next_limit
        if is_short and self._ends is not None and self._ends.isdisjoint(tokens):
            return [None] * len(tokens)
        assert numbers is not None
        found: list[str | None] = []
        for token, number in zip(tokens, numbers, strict=True):
            part = self._parts.get(number)
            is_known = part is not None and not part.finish.needs_device
            found.append(part.explain(token, width, number) if part is not None and is_known else None)
        return found

    def count_left(self, width: int) -> int | None:
        """How many columns more every row may get."""
        return None if self._next_limit is None else max(0, self._next_limit - width)

    def ends_at(self, width: int) -> bool:
        """Whether all rows are done at that width."""
        if self._next_limit is None or width < self._next_limit:
            return False
        return all(part.finish.ends_at(width - part.shift) for part in self._list_parts())

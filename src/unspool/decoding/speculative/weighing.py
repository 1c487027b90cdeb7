"""`speculate="auto"`: draft as many tokens as pay, and none while none would."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

from unspool.decoding.speculative.policy import CheckedTurn

LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256, 512, 1024)  # those that are weighed
MEMORY = 7  # turns of a kind whose times are kept
FADING = 0.95  # what a turn leaves of the acceptance seen before
SHARE_TO_RISK = 0.008  # of the time so far that drafts may lose before they have shown their worth
CREDIT = 0.5  # passes that may be lost on top, at the start
MOST_CREDIT = 8.0  # gains that stand for losses later, in passes
PROBE = 2  # tokens of a draft that is only to see what a check costs, or whether it pays by now
TURNS_BEFORE_REFRESH = 128  # with drafts, after which a plain one is measured again: texts get longer
TURNS_OF_REST = 15  # without a draft, after one that was not worth its check: weighing takes its time too
MOST_TURNS_OF_LEAVE = 7  # without a look, after several that found nothing to guess: 1, 3, 7 turns
GUESSED_SLOPE = 0.1  # of a pass, what one more token costs where nothing is known yet


class Acceptance:
    """How likely guesses are right: the first of a draft, and each one after a right one."""

    def __init__(self) -> None:
        # Right and checked guesses, fading; they begin as a hopeful guess of little weight.
        self._first, self._later = [0.8, 2.0], [1.5, 2.0]

    def learn(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Hear of a turn's drafts."""
        for counts in (self._first, self._later):
            counts[0], counts[1] = counts[0] * FADING, counts[1] * FADING
        for num_drafted, num_right in zip(drafted, accepted, strict=True):
            if num_drafted:
                self._first[0] += num_right > 0
                self._first[1] += 1
                self._later[0] += max(0, num_right - 1)
                self._later[1] += max(0, min(num_right, num_drafted - 1))

    def expect(self, num_drafted: int) -> float:
        """The guesses of a draft that will be accepted, on average."""
        first, later = ((right + 0.05) / (checked + 0.1) for right, checked in (self._first, self._later))
        return first * sum(later**place for place in range(num_drafted))


class Costs:
    """What passes take: plain ones, and checks by the number of tokens drafted."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Measure everything anew: rows have left."""
        self._plain: deque[float] = deque(maxlen=MEMORY)
        self._checks: dict[int, deque[float]] = {}
        self._drafts: deque[float] = deque(maxlen=MEMORY)  # seconds a token

    @property
    def is_known(self) -> bool:
        """Whether a plain pass was measured: the first of a call may be slow, so one is not enough."""
        return len(self._plain) > 1

    @property
    def has_checks(self) -> bool:
        """Whether a check was measured: what one more token costs differs tenfold between devices."""
        return bool(self._checks)

    @property
    def plain(self) -> float:
        """Seconds of a plain pass."""
        return median(self._plain)

    def learn(self, turn: CheckedTurn) -> None:
        """Measure a turn."""
        longest = max(turn.drafted, default=0)
        if longest == 0:
            self._plain.append(turn.check_seconds)
            return
        self._checks.setdefault(longest, deque(maxlen=MEMORY)).append(turn.check_seconds)
        self._drafts.append(turn.draft_seconds / longest)

    def of_check(self, num_drafted: int) -> float:
        """Seconds to check a draft, between or beyond the lengths that were measured."""
        known = [(0, self.plain)]
        for length in sorted(self._checks):
            # Nothing takes longer than one token after the other; what seems to was disturbed.
            known.append((length, min(median(self._checks[length]), self.plain * (length + 1))))
        below = max((point for point in known if point[0] <= num_drafted), default=known[0])
        above = min((point for point in known if point[0] >= num_drafted), default=None)
        if above is None:
            length, seconds = known[-1]
            slope = (seconds - self.plain) / length if length else GUESSED_SLOPE * self.plain
            return max(seconds, self.plain) + max(0.0, slope) * (num_drafted - length)
        if above[0] == below[0]:
            return below[1]
        return below[1] + (above[1] - below[1]) * (num_drafted - below[0]) / (above[0] - below[0])

    def of_draft(self, num_drafted: int) -> float:
        """Seconds to make a draft."""
        return (median(self._drafts) if self._drafts else GUESSED_SLOPE * self.plain) * num_drafted


class Weighed:
    """Chooses the length that gives the most tokens per second by what was measured in this very call.

    Drafts that would lose are not made, but for a probe now and then, paid from a small share of the time so far; what
    drafts win and lose is kept in a ledger, so a call is never much slower than without them.
    """

    def __init__(self, most_tokens: int, *, is_free: bool) -> None:
        self._most = most_tokens
        self._is_free = is_free
        self._acceptance = Acceptance()
        self._costs = Costs()
        self._num_live = 0
        self._elapsed = 0.0
        self._balance = 0.0  # seconds won (or lost) by drafting
        self._turns_with_drafts = 0
        self._rest = 0  # turns that go by without a look at what could be drafted
        self._leave = 1  # turns of rest after the next look that finds nothing

    def rests(self) -> bool:
        """Whether a draft was lately not worth its check."""
        if not self._rest:
            return False
        self._rest -= 1
        self._elapsed += self._costs.plain
        return True

    @property
    def num_resting(self) -> int:
        """How many turns more go by without a look."""
        return self._rest

    def choose(self, limits: Sequence[int]) -> list[int]:
        """A free drafter is asked for all it may find; a model only for what is worth its own time."""
        if self.rests():  # rows that can't be stepped plainly
            return [0] * len(limits)
        most = min(self._most, max(limits))
        num_live = max(1, sum(limit > 0 for limit in limits))
        if not self._costs.is_known or self._turns_with_drafts >= TURNS_BEFORE_REFRESH:
            most = 0
        elif not self._is_free:
            most = self._weigh([most] * num_live, num_live)
        return [min(limit, most) for limit in limits]

    def trim(self, counts: Sequence[int], num_live: int) -> list[int]:
        """Cut what came to the length that is worth a check; what a model made is paid for already."""
        if self._is_free and not any(counts):  # looking takes little, but what does not look goes on several steps
            self._rest, self._leave = self._leave, min(2 * self._leave + 1, MOST_TURNS_OF_LEAVE)
            return list(counts)
        self._leave = 1
        most = self._weigh(counts, num_live) if self._is_free else self._most
        return [min(count, most) for count in counts]

    def observe(self, turn: CheckedTurn) -> None:
        """Measure a turn and enter what it won."""
        if turn.reads_prompt:
            return
        if turn.num_live != self._num_live:
            self._num_live = turn.num_live
            self._costs.forget()
        self._costs.learn(turn)
        seconds = turn.draft_seconds + turn.check_seconds
        self._elapsed += seconds
        if not any(turn.drafted):
            self._turns_with_drafts = 0
            return
        self._turns_with_drafts += 1
        self._acceptance.learn(turn.drafted, turn.accepted)
        if self._costs.is_known:
            plain = self._costs.plain
            won = plain * turn.num_tokens / max(1, turn.num_live) - seconds
            self._balance = min(self._balance + won, MOST_CREDIT * plain)

    def _weigh(self, counts: Sequence[int], num_live: int) -> int:
        """The most tokens per row that give the most tokens per second; 0 if drafting loses."""
        longest = max(counts) if self._costs.has_checks else min(PROBE, max(counts))
        best, best_rate = 0, num_live / self._costs.plain
        for length in sorted({longest, *(one for one in LENGTHS if one < longest)}):
            tokens = num_live + sum(self._acceptance.expect(min(count, length)) for count in counts)
            rate = tokens / self._cost(length)
            if rate > best_rate:
                best, best_rate = length, rate
        best = best or self._probe(longest)
        self._rest = 0 if best else TURNS_OF_REST
        return best

    def _probe(self, longest: int) -> int:
        """A short draft, if it can be afforded to see whether drafting pays by now."""
        length = min(PROBE, longest)
        at_stake = self._cost(length) - self._costs.plain
        allowed = self._balance + CREDIT * self._costs.plain + SHARE_TO_RISK * self._elapsed
        return length if at_stake <= allowed else 0

    def _cost(self, length: int) -> float:
        return self._costs.of_check(length) + (0.0 if self._is_free else self._costs.of_draft(length))

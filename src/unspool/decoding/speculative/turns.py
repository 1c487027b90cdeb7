"""Speculative turns: a drafter guesses, one pass checks, and every row keeps as much as is right."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch

from unspool.cache import Cache
from unspool.decoding.alone import Shown
from unspool.decoding.finish import Finish, JoinedFinish
from unspool.decoding.loop import Emitted, Result
from unspool.decoding.observer import DraftChecked, TokenChosen
from unspool.decoding.reader import Reader, Tried
from unspool.decoding.record import read_logprobs
from unspool.decoding.rows import Joining, Rows
from unspool.decoding.scorer import Scorer
from unspool.decoding.select import NO_TOKEN
from unspool.decoding.speculative.drafters.base import ACCEPT_STREAM, Draft, Drafter, SharedDrafter
from unspool.decoding.speculative.policy import CheckedTurn, Policy
from unspool.decoding.speculative.verify import choose_against
from unspool.decoding.strategies.sample import Sample
from unspool.decoding.strategies.stretch import StretchTurns, can_stretch
from unspool.decoding.strategies.turns import TokenTurns, check_shared
from unspool.decoding.tails import choose_token
from unspool.kernels.sending import fetch_once
from unspool.logits.fused import FusedTail
from unspool.outputs import Speculation

Choose = Callable[[int, Sequence[int]], list[int]]
"""From a depth in the drafts and the places of the rows that got so far to every row's token there."""


def _forget() -> None:
    pass


@dataclass(slots=True)
class SpeculativeTurns:
    """Rows, their drafter, the one verifier, and what ends them."""

    scorer: Scorer
    rows: Rows
    drafter: Drafter
    policy: Policy
    finish: Finish
    speculation: dict[int, tuple[Speculation, int]]  # by number: the figures of each row's call, and its place in them
    max_lengths: list[int]  # the most columns of each row
    do_sample: bool
    rows_may_leave: bool
    remember: Callable[[], None] = _forget  # called once it is over: what the next call may know of this one
    reasons: dict[int, str] = field(default_factory=dict)  # why rows of the call have ended
    plain: TokenTurns | None = None  # for turns without guesses
    stretch: StretchTurns | None = None  # the same, where they can be taken several at a time
    num_numbers: int = 0  # that rows have had, once others have come in

    @property
    def reads_choice(self) -> bool:
        """A row's last token is the next pass's first."""
        return False

    def result(self) -> Result:
        """Nothing but what was emitted: how drafts fared is in the call's figures."""
        return Result()

    def close(self) -> None:
        """Let later calls know how long drafts were best."""
        self.remember()

    # --- rows of several runs ----------------------------------------------------------------------------
    @property
    def reader(self) -> Reader:
        """What reads the rows."""
        return self.scorer.reader

    def share(self) -> None:
        """Rows of other runs may come from now on."""
        check_shared(self.scorer.record, rows_may_leave=self.rows_may_leave)
        if not isinstance(self.drafter, SharedDrafter):
            raise ValueError("rows whose drafter does not take in others are stepped by their own call")

    def settle(self) -> None:
        """Nothing is half done."""

    def admit(self, others: Sequence[SpeculativeTurns], cache: Cache) -> list[int]:
        """Take in the rows of other turns at work, after these; `cache` holds the keys of all. The others are used up.

        Returns the number that row 0 of each has among these. Drafts are as long as is best for these.
        """
        sets = [self, *others]
        for one in sets:
            one.share()
        numbers = [list(one.rows.numbers) for one in sets]
        firsts = list(accumulate([one.count_numbers() for one in sets], initial=0))
        self.num_numbers = firsts.pop()
        shifts = self.rows.admit([one.rows for one in others], firsts[1:], is_ragged=True)
        joining = Joining([len(own) for own in numbers], firsts, shifts)
        self.scorer.admit([one.scorer for one in others], cache, joining)
        assert isinstance(self.drafter, SharedDrafter)
        self.drafter.admit([one.drafter for one in others])
        self.finish = JoinedFinish.of([one.finish for one in sets], numbers, joining)
        self.max_lengths = [most for one in sets for most in one.max_lengths]
        for other, first in zip(others, firsts[1:], strict=True):
            self.speculation |= {first + number: one for number, one in other.speculation.items()}
        self.reasons.clear()  # of rows that have left
        self.plain = self.stretch = None
        return firsts[1:]

    def count_numbers(self) -> int:
        """How many numbers rows have had."""
        return max(self.num_numbers, *(number + 1 for number in (*self.rows.numbers, *self.reasons)))

    def find_places(self, numbers: Collection[int]) -> list[int]:
        """The rows of the cache that rows of these numbers have."""
        return [place for place, number in enumerate(self.rows.numbers) if number in numbers]

    def drop(self, numbers: Collection[int]) -> None:
        """Let rows go before they have ended; not all that there are."""
        self.reasons |= dict.fromkeys(numbers, "dropped")
        self._let_leave()

    def is_done(self) -> bool:
        """Whether every row has ended."""
        return all(number in self.reasons for number in self.rows.numbers)

    def turn(self) -> Emitted:
        """Guess, check all guesses in one pass, and let each row take what is right and one token more."""
        if not self.scorer.reader.is_fresh and self._can_step_plainly() and self.policy.rests():
            return self._step_plainly(1 + self.policy.num_resting)
        started = time.perf_counter()
        rows = self.rows
        is_live = [number not in self.reasons for number in rows.numbers]
        is_fresh = self.scorer.reader.is_fresh
        draft = self._propose(is_live)
        drafted = time.perf_counter()
        check_seconds: float | None = None
        if not is_fresh and not any(draft.counts) and self._can_step_plainly():
            emitted, accepted = self._step_plainly(1 + self.policy.num_resting), [0]
            if self.stretch is not None:  # of which the first turn took all
                check_seconds = self.stretch.seconds
        else:
            tried = self.scorer.reader.try_tokens(rows, draft.tokens, draft.counts, is_live)
            emitted, accepted = self._take(draft, tried, is_live)
            if tried.forward is not None:
                num_taken = [len(emitted.tokens.get(number, ())) for number in rows.numbers]
                self.scorer.keep_tried(tried.forward, rows, num_taken, is_prompt=is_fresh)
            self.scorer.reader.settle(rows)
        self.drafter.observe(rows, draft, accepted)
        if check_seconds is None:
            check_seconds = time.perf_counter() - drafted
        num_tokens = sum(map(len, emitted.tokens.values()))
        self.policy.observe(
            CheckedTurn(draft.counts, accepted, sum(is_live), num_tokens, drafted - started, check_seconds, is_fresh)
        )
        if self.rows_may_leave and emitted.finished:
            self._let_leave()
        return emitted

    def _can_step_plainly(self) -> bool:
        """Whether a lone row's turn without guesses may be one of plain decoding, which costs less around its pass."""
        return (
            len(self.rows) == 1
            and not self.scorer.record.keeps_any
            and not self.finish.needs_device
            and not self.scorer.has_custom_processors
        )

    def _step_plainly(self, most_steps: int) -> Emitted:
        """A turn without guesses, of so many that are certain to follow each other."""
        if self.plain is None:
            sample = Sample(self.scorer, do_sample=self.do_sample)
            parts = (self.rows, sample, self.finish, self.scorer.record, False, self.reasons)
            if can_stretch(self.scorer, self.rows):
                self.plain = self.stretch = StretchTurns(*parts, scorer=self.scorer)
            else:
                self.plain = TokenTurns(*parts)
        if self.stretch is not None:
            self.stretch.most_steps = most_steps
        emitted = self.plain.turn()
        for number in emitted.tokens:
            self._count(number, 0, 0)
        return emitted

    def _propose(self, is_live: Sequence[bool]) -> Draft:
        if self.scorer.reader.is_fresh:  # the prompt's own last pass is still to be answered
            return Draft.empty(self.rows)
        limits = self._find_limits(is_live)
        wanted = self.policy.choose(limits) if any(limits) else limits
        if not any(wanted):
            return Draft.empty(self.rows)
        draft = self.drafter.propose(self.rows, wanted)
        return draft.cut(self.policy.trim(draft.counts, sum(is_live)))

    def _find_limits(self, is_live: Sequence[bool]) -> list[int]:
        """The most guesses that can help each row: a pass gives one token more, and the cache must hold them all."""
        room = self.scorer.reader.cache.get_max_cache_shape()
        fits = max(self.max_lengths) if room is None else max(0, room - max(self.scorer.reader.cache.lengths) - 1)
        return [
            max(0, min(most - end - 1, fits)) if live else 0
            for most, end, live in zip(self.max_lengths, self.rows.ends, is_live, strict=True)
        ]

    # --- what the pass says --------------------------------------------------------------------------
    def _take(self, draft: Draft, tried: Tried, is_live: Sequence[bool]) -> tuple[Emitted, list[int]]:
        """Walk down the drafts: rows go on while the token chosen is the one guessed, and nothing ends them."""
        rows, guesses, logits = self.rows, fetch_once(draft.tokens).read_list(), tried.logits
        needs_history = self.finish.needs_device or self.scorer.looks_back or self.scorer.record.keeps_steps
        if needs_history:
            self.scorer.foresee(rows, [row[:count] for row, count in zip(guesses, draft.counts, strict=True)])
            choose = self._choose_by_depth(draft, logits)
        else:
            choose = self._choose_at_once(draft, tried)
        emitted = Emitted({}, {})
        taken: list[list[int]] = [[] for _ in is_live]
        accepted = [0] * len(is_live)
        places = [place for place, live in enumerate(is_live) if live]
        for depth in range(logits.shape[1]):
            tokens = choose(depth, places)
            for place in places:
                if tokens[place] == NO_TOKEN:
                    if not needs_history:
                        self._append(taken)
                    raise self.scorer.blame(rows, logits[:, depth], place)
                taken[place].append(tokens[place])
            if needs_history:
                self._append([tokens[place : place + 1] if place in places else [] for place in range(len(is_live))])
            going = []
            for place, reason in zip(places, self._explain(places, taken, needs_history), strict=True):
                is_right = depth < draft.counts[place] and tokens[place] == guesses[place][depth]
                accepted[place] += is_right
                if reason is not None:
                    number = rows.numbers[place]
                    emitted.finished[number] = self.reasons[number] = reason
                elif is_right:
                    going.append(place)
            places = going
            if not places:
                break
        if not needs_history:
            self._append(taken)
        self._enter(emitted, taken, logits, draft, accepted)
        observer = self.scorer.record.observer
        if observer is not None and draft.counts[0]:
            observer.see(DraftChecked(guesses[0][: draft.counts[0]], accepted[0]))
        return emitted, accepted

    def _append(self, taken: Sequence[Sequence[int]]) -> None:
        added = Draft.of(taken, self.rows.device)
        self.rows.append(added.tokens, added.counts)
        self.rows.note_last(taken)

    def _explain(self, places: Sequence[int], taken: Sequence[Sequence[int]], needs_history: bool) -> list[str | None]:
        """Why the rows at `places` end with the token they just got, or None."""
        ends = self.rows.ends
        if not self.finish.needs_device:
            numbers = self.rows.numbers
            widths = [ends[place] + (0 if needs_history else len(taken[place])) for place in places]
            return [self.finish.explain_token(taken[p][-1], w, numbers[p]) for p, w in zip(places, widths, strict=True)]
        reasons: dict[int, str | None] = {}
        scores = self.scorer.record.scores if self.finish.has_custom else None
        for width in {ends[place] for place in places}:
            away = {place for place, end in enumerate(ends) if end != width or place not in places}
            shown = Shown.of(self.rows, width=width, ended=away)
            explained = self.finish.explain(self.rows.history(width), scores, shown)
            reasons |= {place: explained[place] for place in places if ends[place] == width}
        return [reasons[place] for place in places]

    # --- choosing ------------------------------------------------------------------------------------
    def _choose_at_once(self, draft: Draft, tried: Tried) -> Choose:
        """Every position's token in one go, if no processor looks at the history."""
        num_rows, num_positions, vocab = tried.logits.shape
        tail, uniforms = self.scorer.tail, None
        if self.do_sample:
            uniforms = self.rows.uniforms_from(self.rows.lengths, num_positions).flatten()
        flat = tried.logits.reshape(-1, vocab)
        if tried.likeliest is not None and not self.do_sample:
            chosen = tried.likeliest
        elif draft.distributions is not None and self.do_sample:
            assert uniforms is not None
            scores = flat if tail is None else _spread(tail, num_rows, num_positions).run_plainly(flat)
            numbers = self.rows.uniforms_from(self.rows.lengths, num_positions, ACCEPT_STREAM).flatten()
            guesses, drafted = _pad_draft(draft, num_positions, vocab)
            chosen = choose_against(scores, guesses.flatten(), drafted.flatten(0, 1), uniforms, numbers)
        else:
            spread = None if tail is None else _spread(tail, num_rows, num_positions)
            chosen = choose_token(flat, uniforms, spread)
        table = fetch_once(chosen.view(num_rows, num_positions).t()).read_list()
        return lambda depth, _: table[depth]  # all rows' are known

    def _choose_by_depth(self, draft: Draft, logits: torch.Tensor) -> Choose:
        """A position's token once those before it stand: no processor is shown a text that was refused."""
        rows = self.rows
        num_positions, vocab = logits.shape[1:]
        has_drawn = draft.distributions is not None and self.do_sample
        if has_drawn:
            guesses, drafted = _pad_draft(draft, num_positions, vocab)

        def choose(depth: int, places: Sequence[int]) -> list[int]:
            whole = has_drawn or not self.do_sample or self.scorer.record.keeps_scores
            scores = self.scorer.score_places(rows, logits[:, depth], places, whole=whole, is_draft=False)
            for place in places:
                self.scorer.record.keep_row(place, logits[place, depth], scores[place])
            uniforms = rows.uniforms() if self.do_sample else None
            if has_drawn:
                assert uniforms is not None
                numbers = rows.uniforms_from(rows.lengths, 1, ACCEPT_STREAM)[:, 0]
                chosen = choose_against(scores, guesses[:, depth], drafted[:, depth], uniforms, numbers)
            else:
                chosen = choose_token(scores, uniforms, None if whole else self.scorer.tail)
            tokens: list[int] = fetch_once(chosen).read_list()
            if self.scorer.record.observer is not None:
                self.scorer.record.observer.see(TokenChosen(tokens[0]))
            return tokens

        return choose

    # --- entering ------------------------------------------------------------------------------------
    def _enter(
        self,
        emitted: Emitted,
        taken: Sequence[list[int]],
        logits: torch.Tensor,
        draft: Draft,
        accepted: Sequence[int],
    ) -> None:
        for place, tokens in enumerate(taken):
            if not tokens:
                continue
            number = self.rows.numbers[place]
            emitted.tokens[number] = tokens
            self._count(number, draft.counts[place], accepted[place])
            if self.scorer.record.num_top is not None:
                chosen = torch.tensor(tokens, device=logits.device)
                emitted.logprobs[number] = read_logprobs(
                    logits[place, : len(tokens)], chosen, self.scorer.record.num_top
                )

    def _count(self, number: int, num_drafted: int, num_accepted: int) -> None:
        speculation, row = self.speculation[number]
        speculation.add(row, num_drafted, num_accepted)

    def _let_leave(self) -> None:
        staying = [place for place, number in enumerate(self.rows.numbers) if number not in self.reasons]
        if staying:
            left = [number for number in self.rows.numbers if number in self.reasons]
            self.finish.forget(left)
            for number in left:
                del self.speculation[number]
            self.rows.select(staying)
            self.max_lengths = [self.max_lengths[place] for place in staying]
            self.scorer.keep_rows(staying)
            self.drafter.keep_rows(staying)
        else:
            self.rows.numbers = []


def _spread(tail: FusedTail, num_rows: int, num_positions: int) -> FusedTail:
    """The tail for all positions of all rows, one after the other."""
    index = torch.arange(num_rows).repeat_interleave(num_positions)
    return tail.select_rows(index) if num_positions > 1 else tail


def _pad_draft(draft: Draft, num_positions: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The guesses and their distributions with zeros for rows that have none: (rows, positions), (…, vocab)."""
    assert draft.distributions is not None
    missing = num_positions - draft.tokens.shape[1]
    guesses = torch.nn.functional.pad(draft.tokens, (0, missing))
    drafted = torch.nn.functional.pad(draft.distributions, (0, 0, 0, missing))
    place = torch.arange(num_positions, device=guesses.device)
    is_own = place < torch.tensor(draft.counts, device=guesses.device)[:, None]  # (rows, positions)
    assert drafted.shape[-1] == vocab
    return guesses * is_own, drafted * is_own[..., None]

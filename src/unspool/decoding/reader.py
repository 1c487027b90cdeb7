"""The one reader: every pass of a model in a call is asked for here; `stretching` takes several steps at once.

A `Reader` owns a model, its cache and what is left to read. What it needs is an `Ask`; its `answer` function gives the
`Forward`. `generate()` answers at once. An engine's function may suspend the run until a pass over the rows of many
runs has answered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
import torch.nn.functional as F

from unspool.cache import BRANCH, BRANCH_SOURCE, ROLL_BACK, Cache, branch_rows
from unspool.decoding.forwards import join_chunks, join_rows, select_rows
from unspool.decoding.parts import ask_in_parts
from unspool.decoding.prompts import fill_right, fit_columns
from unspool.decoding.readouts.base import Readout
from unspool.decoding.rows import Joining, Rows
from unspool.kernels.sending import send
from unspool.kernels.torch_threads import all_threads, one_thread
from unspool.protocols import (
    LAST,
    Answer,
    Ask,
    Encoded,
    Forward,
    Model,
    SourceAnswer,
    SourceAsk,
    Want,
)

# Tokens of a pass, if no chunk size is asked for: what lies between two layers of an 8B model takes 0.12 MB a token,
# so 2 GB, where 64 prompts of 4,096 would take 32; and products of so many rows are as fast as they get.
MOST_TOKENS_OF_A_PASS = 16_384

Watch = Callable[[Forward, Sequence[int], Sequence[int]], None]
"""Called with a pass, where each row's reading began and how many positions it took."""

OpenDraftCache = Callable[[Model], Cache | None]
"""Makes a cache without rows for a model that drafts; None: the model makes its own."""


def answer_at_once(ask: Ask) -> Forward:
    """The answer of `generate()`: the model's own forward pass."""
    with all_threads():
        return ask.model.forward(ask.tokens, ask.cache, counts=ask.counts, want=ask.want, embeds=ask.embeds)


def encode_at_once(ask: SourceAsk) -> Encoded:
    """The answer of `generate()`: the model's own encoder pass."""
    with all_threads():
        return ask.model.encode(ask.tokens, ask.counts, want=ask.want, embeds=ask.embeds)


def between_passes(model: Model, num_rows: int) -> AbstractContextManager[None]:
    """Where scores of so many rows are worked on: if passes are the CPU library's, its threads keep the cores."""
    is_library = model.device.type == "cpu" and getattr(model, "fast_path", None) == "library"
    return one_thread(num_rows * model.info.vocab_size) if is_library else nullcontext()


@dataclass(slots=True)
class Tried:
    """What a pass returned for several positions of every row."""

    logits: torch.Tensor  # (rows, positions, vocab), float32
    likeliest: torch.Tensor | None = None  # (rows, positions): where the model found the highest logits on its way
    forward: Forward | None = None  # the pass itself, if its states or attention weights are asked for


class Reader:
    """A model, its cache, and the passes of one call over them."""

    def __init__(
        self,
        model: Model,
        cache: Cache,
        *,
        want: Want = LAST,
        answer: Answer | None = None,
        answer_source: SourceAnswer | None = None,
        open_draft_cache: OpenDraftCache | None = None,
        readout: Readout | None = None,
        chunk: int | None = None,
        keeps_cache: bool = True,
        prompt_embeds: torch.Tensor | None = None,
        prompt_lengths: Sequence[int] = (),
        reads_whole: bool = False,
        divides_rows: bool = False,
    ) -> None:
        self.model = model
        self.cache = cache
        self.answer = answer or answer_at_once
        self.answer_source = answer_source or encode_at_once  # for draft models that have an encoder
        self.open_draft_cache = open_draft_cache
        self.readout = readout or Readout()
        self.want = self.readout.widen(want)
        self.keeps_cache = keeps_cache
        self.chunk = chunk
        self.num_passes = 0
        self.path, self.path_reason = "eager", ""  # how the last pass was run
        self.starts: list[int] = []  # where each row's last reading began
        self.counts: list[int] = []  # and how many positions it took
        self.ready: Forward | None = None  # a pass that waits for its processors: the prompt's, or a candidate's
        self.watch: Watch | None = None  # called with every pass over a prompt
        self._reads_prompt = False
        self._prompt_embeds = prompt_embeds
        self._prompt_lengths = list(prompt_lengths)
        self._reads_whole = reads_whole  # its prompts can't be read in pieces
        self._divides_rows = divides_rows
        self.num_parts = 1  # passes that the rows are divided into
        self._is_trying = False  # whether the cache is in a trial

    # --- passes --------------------------------------------------------------------------------------
    def ask(
        self,
        tokens: torch.Tensor | None,
        counts: Sequence[int] | None = None,
        want: Want | None = None,
        *,
        embeds: torch.Tensor | None = None,
        cache: Cache | None = None,
    ) -> Forward:
        """One pass over new tokens, of which each row's first `counts[row]` are real."""
        ask = Ask(
            self.model,
            self.cache if cache is None else cache,
            tokens,
            counts,
            self.want if want is None else want,
            embeds,
        )
        if self.num_parts == 1:
            forward = self.answer(ask)
        else:
            forward = ask_in_parts(self.answer, ask, self.num_parts)
        self.num_passes += self.num_parts
        self.path, self.path_reason = forward.path, forward.path_reason
        return forward

    def read(
        self,
        tokens: torch.Tensor | None,
        counts: Sequence[int],
        want: Want | None = None,
        *,
        embeds: torch.Tensor | None = None,
    ) -> Forward:
        """Read each row's first `counts[row]` new tokens, in chunks if they are many."""
        starts = self.starts = list(self.cache.lengths) or [0] * len(counts)
        self.counts = list(counts)
        num_new, longest = max(counts), self.cache.longest_pass
        if num_new == 1 and not self._reads_prompt:
            return self.ask(tokens, None if min(counts) == 1 else counts, want, embeds=embeds)
        forward: Forward | None = None
        first = 0
        while first < num_new:
            size = min(self._find_chunk(counts, first), longest or num_new, self._find_room(starts) or num_new)
            part = slice(first, min(first + size, num_new))
            real = [min(max(count - first, 0), part.stop - first) for count in counts]
            asked = self.want if want is None else want
            if min(counts) < num_new and size < num_new:  # what rows end with is joined, so it must be there
                asked = replace(asked, epilogue=None)
            piece = self.ask(
                None if tokens is None else tokens[:, part],
                None if min(real) == part.stop - first else real,
                asked,
                embeds=None if embeds is None else embeds[:, part],
            )
            if self.watch is not None and self._reads_prompt:
                self.watch(piece, starts, real)
            forward = piece if forward is None else join_chunks(forward, piece, real)
            first = part.stop
            if first < num_new:
                starts = list(self.cache.lengths)
        assert forward is not None
        return forward

    def _find_room(self, starts: Sequence[int]) -> int | None:
        """How many positions a pass may have where the longest row has no room for all of them: guidance reads other
        prompts behind embeddings, and the columns of rows that read nothing lie past their ends."""
        room = self.cache.room if min(starts) < max(starts) else None
        return None if room is None else max(1, room - max(starts))

    def _find_chunk(self, counts: Sequence[int], first: int) -> int:
        """How many positions each row reads in the pass that begins at its `first` new one."""
        longest = max(counts) - first
        if self.cache.reads_whole or (self._reads_whole and self._reads_prompt):
            return longest
        if self.chunk is not None:
            return self.chunk
        is_whole = self.want.hidden_states or self.want.attentions  # they are returned so
        if is_whole or longest * len(counts) <= MOST_TOKENS_OF_A_PASS:
            return longest
        return fit_columns([count - first for count in counts if count > first], MOST_TOKENS_OF_A_PASS)

    # --- the call's rows -----------------------------------------------------------------------------
    def prefill(self, rows: Rows) -> None:
        """Read the prompts once, before rows are repeated; the pass waits for its tokens to be chosen."""
        self._open_sets()
        self._reads_prompt = True
        self.ready = self._read_rows(rows)
        self._reads_prompt = False

    @property
    def is_fresh(self) -> bool:
        """Whether the prompt's last pass still waits for its tokens to be chosen: nothing is read before they are."""
        return self.ready is not None

    def next(self, rows: Rows, want: Want | None = None) -> Forward:
        """What follows each row: the pass that waits, or one over what the cache has not read."""
        ready = self.ready
        if ready is None:
            return self._read_rows(rows, want)
        self.ready = None
        return ready

    def _read_rows(self, rows: Rows, want: Want | None = None) -> Forward:
        if not self.keeps_cache:
            self.cache.truncate([0] * len(self.cache.lengths))
        held = self.cache.lengths or [0] * len(rows) * self.readout.num_sets
        before: Forward | None = None
        if self._prompt_embeds is not None:
            counts = [max(0, length - n) for length, n in zip(self._prompt_lengths, held, strict=False)]
            if any(counts):
                embeds = fill_right(self._prompt_embeds, held[: len(rows)], counts)
                others = len(held) - len(rows)  # rows of tokens, which wait for the next pass
                before = self.read(None, counts + [0] * others, embeds=F.pad(embeds, (0, 0) * 2 + (0, others)))
                held = self.cache.lengths
        tokens, counts = self.readout.unread(rows, held)
        if before is not None and not any(counts):
            return before
        forward = self.read(tokens, counts, want)
        return forward if before is None else join_chunks(before, forward, counts)

    def read_places(self, rows: Rows, places: Sequence[int]) -> torch.Tensor:
        """Read what the cache has not seen of the rows at `places`: logits (rows, vocab) for what follows."""
        held = self.cache.lengths or [0] * len(rows)
        chosen = frozenset(places)
        seen = [n if place in chosen else rows.lengths[place] for place, n in enumerate(held)]
        return self.read(*rows.unread(seen)).logits.float()

    # --- trials: several positions at once -----------------------------------------------------------
    def begin_trial(self) -> None:
        """What is read from here on may be taken back by `settle`."""
        self.cache.begin_trial()
        self._is_trying = True

    def try_tokens(
        self, rows: Rows, tokens: torch.Tensor | None, counts: Sequence[int], is_live: Sequence[bool]
    ) -> Tried:
        """The model's logits after each row's last token and after each of its drafts.

        `counts` of the drafted `tokens` (rows, drafts) belong to each row. The cache has read them all when this
        returns: `settle` takes back what was not accepted. Rows that are not live read nothing.
        """
        if self.ready is not None:
            ready, self.ready = self.ready, None
            return Tried(ready.logits.float()[:, None], forward=ready)
        lengths = rows.lengths
        held = [n if live else length for n, live, length in zip(self.cache.lengths, is_live, lengths, strict=True)]
        last, num_unread = rows.unread(held)
        assert last.shape[1] == 1, "a row has exactly one token that the cache has not seen"
        real = [own + count for own, count in zip(num_unread, counts, strict=True)]
        num_new = max(real)
        if num_new > 1:
            assert tokens is not None
            last = torch.cat((last, tokens[:, : num_new - 1]), dim=1)
            self.begin_trial()
        kept = Want("all", self.want.hidden_states, self.want.attentions)
        want = self.want if num_new == 1 else kept
        self.starts, self.counts = held, real
        forward = self.ask(last, None if min(real) == num_new else real, want)
        if num_new > 1:
            return Tried(forward.logits.float(), forward.likeliest, forward)
        return Tried(forward.logits.float()[:, None], forward=forward)

    def settle(self, rows: Rows) -> None:
        """Roll the cache back to what the rows have: all of it is read but the last token."""
        held = self.cache.lengths
        kept = [min(n, length - 1) for n, length in zip(held, rows.lengths, strict=True)]
        if kept != held or self._is_trying:
            self.cache.truncate(kept)  # where all was accepted too: it ends the trial, and what that keeps
        self._is_trying = False

    def forget(self, num_steps: int) -> None:
        """Undo the last passes, each of one token per row, or of whole texts, which are read anew anyway."""
        if self.keeps_cache:
            self.cache.truncate([length - num_steps for length in self.cache.lengths])
        self.num_passes -= num_steps

    # --- rows move -----------------------------------------------------------------------------------
    def repeat_rows(self, index: Sequence[int], *, branches: int = 1) -> None:
        """Let the cache and the pass that waits follow prompts that are continued more than once.

        With `branches` rows per prompt that go on together, as beams do, the prompt's keys stay in one copy where the
        model can read them so.
        """
        assert self.ready is not None
        if branches > 1 and self._divides_rows:
            self.num_parts = branches
        spread = self.spread(index)
        if branches > 1 and self._can_branch():
            self.cache = branch_rows(self.cache, branches)
        else:
            self.cache.select_rows(spread)
        self._select_prompts(index)
        self._select_ready(spread)

    def _can_branch(self) -> bool:
        if "branches" not in self.model.info.can:
            return False
        # The keys of a source stay as they are in every pass; those of a prompt are read by a kernel without weights.
        is_free = self.keeps_cache and not self.want.attentions
        return BRANCH_SOURCE in self.cache.can or (BRANCH in self.cache.can and is_free)

    def reorder_rows(self, index: Sequence[int]) -> None:
        """Let the cache follow beams: row `i` goes on from what row `index[i]` was, within its own prompt."""
        self.cache.select_rows(self.spread(index))

    @property
    def can_follow(self) -> bool:
        """Whether `follow_rows` waits for nothing."""
        return self.ready is None and self.cache.can_follow

    def follow_rows(self, index: torch.Tensor) -> None:
        """`reorder_rows` with an index (rows,) on the device."""
        num_sets = self.readout.num_sets
        if num_sets > 1:
            size = len(self.cache.lengths) // num_sets
            index = torch.cat([index + first * size for first in range(num_sets)])
        self.cache.follow_rows(index)

    def keep_rows(self, index: Sequence[int]) -> None:
        """Let the cache follow rows that stay while others leave."""
        spread = self.spread(index)
        self.cache.select_rows(spread)
        self._select_prompts(index)
        self._select_ready(spread)

    def admit(self, others: Sequence[Reader], cache: Cache, joining: Joining) -> None:
        """Take in the rows of other readers of the model, whose prompts are read too. `cache` holds the keys
        of all, one reader's after the other's."""
        readers = [self, *others]
        for other in others:
            is_alike = type(self.readout) is type(other.readout) and self._plain_want == other._plain_want
            is_whole = self.num_parts == other.num_parts == 1 and self._prompt_embeds is None
            if self.model is not other.model or not (is_alike and is_whole):
                raise ValueError("rows that are read in different ways can't share their passes")
            if self.is_fresh != other.is_fresh:
                raise ValueError(
                    "the first tokens of all sets must be chosen before they come together, or those of none"
                )
        ready = [one.ready for one in readers if one.ready is not None]
        self.cache, self.ready = cache, join_rows(ready) if ready else None
        num_sets, order = self.readout.num_sets, _list_sets(self.readout.num_sets, joining.counts)
        if num_sets > 1:
            cache.select_rows(order)
            if self.ready is not None:
                self.ready = select_rows(self.ready, send(order, self.ready.logits.device))
        self.starts, self.counts = [0] * len(order), [1] * len(order)
        self.readout.admit([one.readout for one in others], joining.firsts[1:])
        self.num_passes += sum(one.num_passes for one in others)

    @property
    def _plain_want(self) -> Want:
        return replace(self.want, epilogue=None)

    def close_sets(self) -> None:
        """Leave the call's own rows in the cache, for whoever gets it."""
        self.cache.select_rows(range(len(self.cache.lengths) // self.readout.num_sets))

    def _open_sets(self) -> None:
        """Give every set of rows its place in a cache that holds something of the call's rows already."""
        held, num_sets = list(self.cache.lengths), self.readout.num_sets
        if held and num_sets > 1:
            self.cache.select_rows(list(range(len(held))) * num_sets)
            # States go back all together: then the call's own rows are read again too.
            own = held if ROLL_BACK in self.cache.can else [0] * len(held)
            self.cache.truncate(own + [0] * len(held) * (num_sets - 1))

    def spread(self, index: Sequence[int]) -> list[int]:
        """Rows of the cache for rows of the call: in every set the same."""
        num_sets = self.readout.num_sets
        size = len(self.cache.lengths) // num_sets
        return [first * size + row for first in range(num_sets) for row in index]

    def _select_prompts(self, index: Sequence[int]) -> None:
        self.readout.select_rows(index)
        if self._prompt_embeds is not None:  # read again at every step where no cache is kept
            self._prompt_embeds = self._prompt_embeds[list(index)]
            self._prompt_lengths = [self._prompt_lengths[i] for i in index]

    def _select_ready(self, index: Sequence[int]) -> None:
        """Let the pass that waits follow its rows."""
        if self.ready is not None:
            self.starts = [self.starts[i] for i in index]
            self.counts = [self.counts[i] for i in index]
            self.ready = select_rows(self.ready, torch.tensor(list(index), device=self.ready.logits.device))


def _list_sets(num_sets: int, counts: Sequence[int]) -> list[int]:
    """Where the rows stand of caches side by side, each of so many rows for every set: set by set."""
    firsts = [num_sets * first for first in accumulate(counts, initial=0)]
    return [
        first + one * count + row
        for one in range(num_sets)
        for first, count in zip(firsts, counts, strict=False)
        for row in range(count)
    ]

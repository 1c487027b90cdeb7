"""The one step: a forward pass and the processors. Nothing else calls a model or runs a processor."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
import torch.nn.functional as F

from unspool.cache import ROLL_BACK, BranchingCache, Cache, DynamicCache, EncoderDecoderCache
from unspool.decoding.forwards import join_chunks, select_rows, take_first_rows
from unspool.decoding.parts import run_in_parts
from unspool.decoding.past_states import PastStates
from unspool.decoding.prompts import fill_right, fit_columns
from unspool.decoding.readout import Reading, Readout
from unspool.decoding.record import Record, read_logprobs
from unspool.decoding.rows import Rows
from unspool.decoding.tries import CopiedTries, Tries, make_tries
from unspool.errors import NoTokenLeftError
from unspool.kernels.contests import Contest, Won
from unspool.kernels.sending import send
from unspool.logits import LogitsProcessorList
from unspool.logits.blame import explain_no_token
from unspool.logits.fused import FusedTail, split_tail
from unspool.outputs import TokenLogprob
from unspool.protocols import LAST, Forward, Model, Stretching, Want

PROMPT_LOGPROBS_CHUNK = 64  # positions whose full logits are held at a time
# Tokens of a pass, where no chunk size is asked for: what lies between two layers of an 8B model takes 0.12 MB a token,
# so 2 GB, where 64 prompts of 4,096 would take 32; and products of so many rows are as fast as they get.
MOST_TOKENS_OF_A_PASS = 16_384
MOST_FORGOTTEN = 2  # steps with candidates that can be undone


@dataclass(slots=True)
class Scores:
    """A step's logits as the model gave them and as the processors left them: (rows, vocab), float32."""

    logits: torch.Tensor
    scores: torch.Tensor
    tail: FusedTail | None = None  # what is still to be done to them, and can be with the draw
    likeliest: torch.Tensor | None = None  # (rows,): where the model found the highest score on its way
    won: Won | None = None  # and the highest few, where it has kept a candidate


@dataclass(slots=True)
class Tried:
    """What a pass says of several positions of every row."""

    logits: torch.Tensor  # (rows, positions, vocab), float32
    likeliest: torch.Tensor | None = None  # (rows, positions): where the model found the highest logits on its way


class Step:
    """The model, its cache and the processors of one call, behind `next_logits`."""

    def __init__(
        self,
        model: Model,
        cache: Cache,
        processors: LogitsProcessorList,
        record: Record,
        *,
        want: Want,
        prefill_chunk_size: int | None = None,
        keeps_cache: bool = True,
        copies_logits: bool = False,
        prompt_embeds: torch.Tensor | None = None,
        prompt_lengths: Sequence[int] = (),
        divides_rows: bool = False,
        readout: Readout | None = None,
        tries_one_by_one: bool = False,
    ) -> None:
        self.model = model
        self.cache = cache
        self._follow_processors(processors)
        self.record = record
        self.num_forward_passes = 0
        self.path, self.path_reason = "eager", ""  # how the last pass was run
        self._stretch_path = ""  # and the last steps that were taken at once
        self._readout = readout or Readout()
        self._want = self._readout.widen(want)
        self._chunk = prefill_chunk_size
        self._keeps_cache = keeps_cache
        self._copies_logits = copies_logits  # a caller's own processor may write into what it is given
        self._prompt_embeds = prompt_embeds
        self._prompt_lengths = list(prompt_lengths)
        self._divides_rows = divides_rows
        self._num_parts = 1  # passes that the rows are divided into
        self._starts: list[int] = []  # where each row's last reading began
        self._counts: list[int] = []  # and how many positions it took
        self._given: torch.Tensor | None = None  # the last step's logits, as the processors were given them
        self._is_trying = False  # whether the cache is in a trial
        self._ready: Forward | None = None  # a pass that waits for its processors: the prompt's, or a candidate's
        self._past = PastStates() if want.last_states else None
        self._reads_prompt = False
        self._taken: deque[tuple[Forward, int]] = deque(maxlen=MOST_FORGOTTEN)  # what `forget` goes back to
        self._tries: Tries | None = None
        if want.last_states:
            can_fork = "forks" in model.info.can
            self._tries = make_tries(
                self._read_token,
                cache,
                can_fork=can_fork,
                one_by_one=tries_one_by_one,
                likes_steps=model.device.type == "cuda",
            )

    def prefill(self, rows: Rows, prompt_logprobs: int | None = None) -> list[list[TokenLogprob | None]] | None:
        """Read the prompts once, before rows are repeated; optionally tell their tokens' log-probabilities."""
        self._reads_prompt = True
        told = None if prompt_logprobs is None else self._tell_prompt(rows, prompt_logprobs)
        self._open_sets()
        self._ready = self._read(rows)
        self._reads_prompt = False
        return told

    def next_logits(self, rows: Rows, *, whole: bool = True, normalise: bool = False) -> Scores:
        """Read what the cache has not seen of each row, and score the next token.

        Where not the `whole` vocabulary's scores are wanted, the end of the chain may be left to the draw.
        With `normalise` the processors are given log-probabilities, as beam methods need them.
        """
        reading = self._read_logits(rows, normalise=normalise)
        logits = reading.logits
        if not self.processors and not normalise:
            self.record.keep_scores(logits, reading.given)
            return Scores(logits, reading.given, likeliest=reading.likeliest, won=reading.won)
        given = reading.given.clone() if self._copies_logits else reading.given
        if not whole and not self.record.keeps_scores and self._tail is not None:
            scores = self._head(rows.history(), given, **self._find_extra(rows))
            self.record.keep_scores(logits, scores)
            return Scores(logits, scores, self._tail)
        scores = self.processors(rows.history(), given, **self._find_extra(rows))
        self.record.keep_scores(logits, scores)
        return Scores(logits, scores)

    def next_groups(
        self, rows: Rows, groups: Sequence[Sequence[int]], current_tokens: torch.Tensor
    ) -> Iterator[torch.Tensor]:
        """Score the next tokens of groups of rows in turn: each sees in `current_tokens` (rows,) what those before it
        have chosen. Gives each group's processed log-probabilities (rows of the group, vocab)."""
        reading, history = self._read_logits(rows, normalise=True), rows.history()
        logits = reading.logits
        whole = torch.zeros_like(logits)
        for number, places in enumerate(groups):
            index = torch.tensor(list(places), device=logits.device)
            extra = {name: values[index] for name, values in self._find_extra(rows).items()}
            scores = self.processors.select_rows(index)(
                history[index],
                reading.given[index],
                current_tokens=current_tokens,
                beam_group_idx=number,
                **extra,
            )
            whole[index] = scores
            yield scores
        self.record.keep_scores(logits, whole)

    # --- candidates ----------------------------------------------------------------------------------
    def take_candidate(self, tokens: torch.Tensor, weights: torch.Tensor, alpha: float) -> torch.Tensor:
        """Read candidates (rows, k) for every row's next token, and go on from the best: its place (rows,).

        Likely ones (`weights`, rows and k: probabilities, -inf where one may not be taken) win, less `alpha` times how
        like the row's past they are. The best is read already, so the next logits take no pass.
        """
        tries, past = self._tries, self._past
        assert tries is not None and past is not None
        self._starts, self._counts = list(self.cache.lengths), [1] * len(tokens)
        contest = Contest(alpha, weights, past.offer())
        tried = tries.read(tokens, contest if self._keeps_cache else None)
        if tried.won is not None:
            past.take_over()
            self.cache.advance(len(tokens))
            self._ready = tried
            return tried.won.chosen
        assert tried.last_states is not None
        chosen = contest.judge(past.find_likeness(tried.last_states.view(*tokens.shape, -1)))
        first = torch.arange(len(chosen), device=chosen.device) * tokens.shape[1]
        kept = select_rows(tried, first + chosen)
        assert kept.last_states is not None
        past.append(kept.last_states[:, 0])
        tries.keep(chosen)
        self._ready = kept if self._keeps_cache else None
        return chosen

    def _read_token(self, tokens: torch.Tensor, cache: Cache, contest: Contest | None = None) -> Forward:
        self.num_forward_passes += 1
        want = self._want if contest is None else replace(self._want, contest=contest)
        forward = self.model.forward(tokens, cache, want=want)
        self.path, self.path_reason = forward.path, forward.path_reason
        return forward

    # --- several steps at once -----------------------------------------------------------------------
    @property
    def is_plain(self) -> bool:
        """Whether a greedy step is a pass and its likeliest token, and nothing else."""
        return (
            not self.processors
            and not self.record.keeps_any
            and self._keeps_cache
            and self._num_parts == 1
            and type(self._readout) is Readout
            and self._want == LAST
        )

    def take_steps(self, rows: Rows, num_steps: int, ends: tuple[int, ...]) -> list[list[int]]:
        """What up to so many greedy steps choose, a row each, as far as every row has a token to choose; the last is
        the first in which a row gets one of the `ends`.

        None of them counts before it is told of by `accept_step`: the cache holds what it held, with keys past it.
        Empty where steps must be taken one by one.
        """
        room, held = self.cache.room, self.cache.lengths
        if room is not None:
            num_steps = min(num_steps, room - max(held))
        if num_steps < 1 or any(length != n + 1 for length, n in zip(rows.lengths, held, strict=True)):
            return []
        stretch = cast(Stretching, self.model).take_steps(rows.last_tokens(), self.cache, num_steps, ends)
        if stretch is None:
            return []
        self._stretch_path = stretch.path
        steps = stretch.steps
        return steps[:-1] if min(steps[-1]) < 0 else steps  # taken again alone, it says why there is none

    def accept_step(self, rows: Rows) -> None:
        """Count one of the steps that were taken at once."""
        self.cache.advance(len(rows))
        self.num_forward_passes += 1
        self.path, self.path_reason = self._stretch_path, ""

    # --- several positions at once -------------------------------------------------------------------
    @property
    def is_fresh(self) -> bool:
        """Whether the prompt's last pass still waits for its tokens to be chosen: nothing is read before they are."""
        return self._ready is not None

    @property
    def looks_back(self) -> bool:
        """Whether a processor before the fused tail has to see the history, position by position."""
        return bool(self._head) if self._tail is not None else bool(self.processors)

    @property
    def tail(self) -> FusedTail | None:
        """The end of the chain that can be done with the draw."""
        return self._tail

    def try_tokens(
        self, rows: Rows, tokens: torch.Tensor | None, counts: Sequence[int], is_live: Sequence[bool]
    ) -> Tried:
        """The model's logits after each row's last token and after each of its drafts.

        `counts` of the drafted `tokens` (rows, drafts) belong to each row. The cache has read them all when this
        returns: `settle_tokens` takes back what was not accepted. Rows that are not live read nothing.
        """
        if self._ready is not None:
            ready, self._ready = self._ready, None
            return Tried(ready.logits.float()[:, None])
        lengths = rows.lengths
        held = [n if live else length for n, live, length in zip(self.cache.lengths, is_live, lengths, strict=True)]
        last, num_unread = rows.unread(held)
        assert last.shape[1] == 1, "a row has exactly one token that the cache has not seen"
        real = [own + count for own, count in zip(num_unread, counts, strict=True)]
        num_new = max(real)
        if num_new > 1:
            assert tokens is not None
            last = torch.cat((last, tokens[:, : num_new - 1]), dim=1)
            self.cache.begin_trial()
            self._is_trying = True
        want = self._want if num_new == 1 else Want(logits="all")
        forward = self.model.forward(last, self.cache, counts=None if min(real) == num_new else real, want=want)
        self.path, self.path_reason = forward.path, forward.path_reason
        self.num_forward_passes += 1
        if num_new > 1:
            return Tried(forward.logits.float(), forward.likeliest)
        return Tried(forward.logits.float()[:, None])

    def settle_tokens(self, rows: Rows) -> None:
        """Roll the cache back to what the rows have: all of it is read but the last token."""
        held = self.cache.lengths
        kept = [min(n, length - 1) for n, length in zip(held, rows.lengths, strict=True)]
        if kept != held or self._is_trying:
            self.cache.truncate(kept)  # where all was accepted too: it ends the trial, and what that keeps
        self._is_trying = False

    def score_places(self, rows: Rows, logits: torch.Tensor, places: Sequence[int], *, whole: bool) -> torch.Tensor:
        """Process the logits (rows, vocab) of the next token of the rows at `places`; others' scores mean nothing.

        Without `whole`, the fused tail is left to the draw. Processors count columns, and after drafts of different
        fortune rows end in different ones: those that end alike are shown together.
        """
        processors = self.processors if whole or self._tail is None else self._head
        given = logits.clone() if self._copies_logits else logits
        if not processors:
            return given
        ends = rows.ends
        groups: dict[int, list[int]] = {}
        for place in places:
            groups.setdefault(ends[place], []).append(place)
        if len(groups) == 1 and (self._copies_logits or len(places) == len(rows)):
            return processors(rows.history(ends[places[0]]), given, **self._find_extra(rows, ends[places[0]]))
        scores = given.clone()
        for width, members in groups.items():
            index = torch.tensor(members, device=logits.device)
            extra = self._find_extra(rows, width)
            if self._copies_logits:  # a caller's own processor may know rows by their place: it is shown all of them
                scores[index] = processors(rows.history(width), given.clone(), **extra)[index]
                continue
            chosen = processors.select_rows(index)
            few = {name: values[index] for name, values in extra.items()}
            scores[index] = chosen(rows.history(width)[index], given[index], **few)
        return scores

    def blame(self, rows: Rows, logits: torch.Tensor, place: int) -> NoTokenLeftError:
        """Which processors left the row at `place` without a token, from logits (rows, vocab) of its next one."""
        width = rows.ends[place]
        return explain_no_token(
            self.processors,
            rows.history(width),
            logits,
            self._find_extra(rows, width),
            place=place,
            where=f"row {rows.numbers[place]}, at position {rows.lengths[place]}",
        )

    def _read_logits(self, rows: Rows, *, normalise: bool) -> Reading:
        """The logits for every row's next token, as the readout makes them of a pass."""
        forward = self._ready if self._ready is not None else self._read(rows)
        self._ready = None
        if self._past is not None:
            self._taken.append((forward, self.num_forward_passes))
        starts, counts = self._starts[: len(rows)], self._counts[: len(rows)]
        self.record.keep_forward(
            take_first_rows(forward, starts, counts) if self._readout.num_sets > 1 else forward,
            rows.pads(),
            starts,
            counts,
        )
        self.path, self.path_reason = forward.path, forward.path_reason
        reading = self._readout.read(forward, rows, normalise=normalise)
        self._given = reading.given
        return reading

    def forget(self, num_steps: int) -> None:
        """Undo the last steps, of one token a row each; of steps with candidates at most `MOST_FORGOTTEN`."""
        self.cache.truncate([length - num_steps for length in self.cache.lengths])
        if self._past is None:
            self.num_forward_passes -= num_steps
            return
        self._past.drop(num_steps)
        for _ in range(num_steps):
            self._ready, self.num_forward_passes = self._taken.pop()

    @property
    def can_forget(self) -> bool:
        """Whether `forget` can undo a step, and no step waits for the host."""
        if ROLL_BACK not in self.cache.can:
            return False
        return self._tries is None or (not isinstance(self._tries, CopiedTries) and self._keeps_cache)

    @property
    def has_custom_processors(self) -> bool:
        """Whether a caller's own processors run in a step."""
        return self._copies_logits

    def explain_no_token(self, rows: Rows, place: int) -> NoTokenLeftError:
        """Which processors left the row at `place` without a token, found by running them one by one again."""
        assert self._given is not None
        return self.blame(rows, self._given, place)

    def _follow_processors(self, processors: LogitsProcessorList) -> None:
        self.processors = processors
        self._head, self._tail = split_tail(processors)
        self._takes = frozenset(name for name in ("uniforms", "pads") if processors.takes(name))

    def _find_extra(self, rows: Rows, width: int | None = None) -> dict[str, torch.Tensor]:
        """What processors may ask for beside the history (of `width` columns) and the scores."""
        extra = {}
        if "uniforms" in self._takes:
            extra["uniforms"] = rows.uniforms(stream=1)
        if "pads" in self._takes and (pads := rows.padding(width)) is not None:
            extra["pads"] = pads
        return extra

    def repeat_rows(self, index: Sequence[int], *, branches: int = 1) -> None:
        """Let the cache and the pass that waits follow prompts that are continued more than once.

        With `branches` rows a prompt that go on together, as beams do, the prompt's keys stay in one copy where the
        model can read them so.
        """
        assert self._ready is not None
        if branches > 1 and self._divides_rows:
            self._num_parts = branches
        spread = self._spread(index)
        if branches > 1 and self._can_branch():
            if isinstance(self.cache, EncoderDecoderCache):
                self.cache.branch(branches)
            else:
                assert isinstance(self.cache, DynamicCache)
                self.cache = BranchingCache(self.cache, branches)
        else:
            self.cache.select_rows(spread)
        self._select_prompts(index)
        self._select_ready(spread)

    def _select_ready(self, index: Sequence[int]) -> None:
        """Let the pass that waits follow its rows."""
        if self._ready is not None:
            self._starts = [self._starts[i] for i in index]
            self._counts = [self._counts[i] for i in index]
            self._ready = select_rows(self._ready, torch.tensor(list(index), device=self._ready.logits.device))

    def _can_branch(self) -> bool:
        if "branches" not in self.model.info.can:
            return False
        if isinstance(self.cache, EncoderDecoderCache):
            return True  # what is shared is the source, which every pass leaves as it is
        return type(self.cache) is DynamicCache and self._keeps_cache and not self._want.attentions

    def reorder_rows(self, index: Sequence[int]) -> None:
        """Let the cache follow beams: row `i` goes on from what row `index[i]` was, within its own prompt."""
        self.cache.select_rows(self._spread(index))

    def keep_rows(self, index: Sequence[int]) -> None:
        """Let the cache and the processors follow rows that stay while others leave."""
        self.cache.select_rows(self._spread(index))
        self._select_prompts(index)
        self._select_ready(index)
        if self._past is not None:
            self._past.select_rows(index)
            chosen = send(index, self.model.device)
            self._taken = deque(
                ((select_rows(one, chosen), count) for one, count in self._taken), maxlen=MOST_FORGOTTEN
            )
        self._follow_processors(self.processors.select_rows(torch.tensor(list(index))))

    def _open_sets(self) -> None:
        """Give every set of rows its place in a cache that holds something of the call's rows already."""
        held, num_sets = list(self.cache.lengths), self._readout.num_sets
        if held and num_sets > 1:
            self.cache.select_rows(list(range(len(held))) * num_sets)
            self.cache.truncate(held + [0] * len(held) * (num_sets - 1))

    def close_sets(self) -> None:
        """Leave the call's own rows in the cache, for whoever gets it."""
        self.cache.select_rows(range(len(self.cache.lengths) // self._readout.num_sets))

    def _spread(self, index: Sequence[int]) -> list[int]:
        """Rows of the cache for rows of the call: in every set the same."""
        num_sets = self._readout.num_sets
        size = len(self.cache.lengths) // num_sets
        return [first * size + row for first in range(num_sets) for row in index]

    def _select_prompts(self, index: Sequence[int]) -> None:
        self._readout.select_rows(index)
        if self._prompt_embeds is not None:  # read again at every step where no cache is kept
            self._prompt_embeds = self._prompt_embeds[list(index)]
            self._prompt_lengths = [self._prompt_lengths[i] for i in index]

    # --- reading -------------------------------------------------------------------------------------
    def _read(self, rows: Rows) -> Forward:
        if not self._keeps_cache:
            self.cache.truncate([0] * len(self.cache.lengths))
        held = self.cache.lengths or [0] * len(rows) * self._readout.num_sets
        before: Forward | None = None
        if self._prompt_embeds is not None:
            counts = [max(0, length - n) for length, n in zip(self._prompt_lengths, held, strict=False)]
            if any(counts):
                embeds = fill_right(self._prompt_embeds, held[: len(rows)], counts)
                others = len(held) - len(rows)  # rows of tokens, which wait for the next pass
                before = self._pass(None, F.pad(embeds, (0, 0) * 2 + (0, others)), counts + [0] * others)
                held = self.cache.lengths
        tokens, counts = self._readout.unread(rows, held)
        if before is not None and not any(counts):
            return before
        forward = self._pass(tokens, None, counts)
        return forward if before is None else join_chunks(before, forward, counts)

    def _pass(self, tokens: torch.Tensor | None, embeds: torch.Tensor | None, counts: Sequence[int]) -> Forward:
        """One forward pass over new positions, or several over chunks of them."""
        self._starts = list(self.cache.lengths) or [0] * len(counts)
        self._counts = list(counts)
        num_new = max(counts)
        forward: Forward | None = None
        first = 0
        while first < num_new:
            chunk = min(self._find_chunk(counts, first), self.cache.longest_pass or num_new)
            part = slice(first, min(first + chunk, num_new))
            real = [min(max(count - first, 0), part.stop - first) for count in counts]
            starts = list(self.cache.lengths) or [0] * len(counts)
            piece = run_in_parts(
                self.model,
                None if tokens is None else tokens[:, part],
                self.cache,
                num_parts=self._num_parts,
                counts=None if min(real) == part.stop - first else real,
                want=self._want,
                embeds=None if embeds is None else embeds[:, part],
            )
            self.num_forward_passes += self._num_parts
            self._keep_states(piece, starts, real)
            forward = piece if forward is None else join_chunks(forward, piece, real)
            first = part.stop
        assert forward is not None
        return forward

    def _find_chunk(self, counts: Sequence[int], first: int) -> int:
        """How many positions a row reads in the pass that begins at its `first` new one."""
        if self._chunk is not None:
            return self._chunk
        longest = max(counts) - first
        is_whole = self._want.hidden_states or self._want.attentions  # they are returned so
        if is_whole or longest * len(counts) <= MOST_TOKENS_OF_A_PASS:
            return longest
        return fit_columns([count - first for count in counts if count > first], MOST_TOKENS_OF_A_PASS)

    def _tell_prompt(self, rows: Rows, num_top: int) -> list[list[TokenLogprob | None]]:
        """Log-probabilities of the prompt's tokens, a chunk of positions at a time, leaving the last token unread."""
        told: list[list[TokenLogprob | None]] = [[None] for _ in range(len(rows))]
        want = Want(logits="all", last_states=self._want.last_states)
        tokens, counts = rows.unread([0] * len(rows))
        first = 0
        while first < max(counts) - 1:
            size = min(self._chunk or PROMPT_LOGPROBS_CHUNK, self.cache.longest_pass or PROMPT_LOGPROBS_CHUNK)
            size = min(size, PROMPT_LOGPROBS_CHUNK)
            real = [min(max(count - 1 - first, 0), size) for count in counts]
            width = max(real)
            part = tokens[:, first : first + width]
            starts = list(self.cache.lengths) or [0] * len(rows)
            forward = self.model.forward(part, self.cache, counts=real, want=want)
            self.num_forward_passes += 1
            self._keep_states(forward, starts, real)
            for row, count in enumerate(real):
                following = tokens[row, first + 1 : first + 1 + count]
                told[row] += read_logprobs(forward.logits[row, :count], following, num_top)
            first += size
        return told

    def _keep_states(self, forward: Forward, starts: Sequence[int], counts: Sequence[int]) -> None:
        """Remember the prompt's states, where candidates are to be compared with them."""
        if self._past is not None and self._reads_prompt:
            assert forward.last_states is not None
            self._past.read(forward.last_states, starts, counts)

"""The calls of the CPU library that run a decoder's passes, and their working memory."""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch

from unspool.cache import Span
from unspool.errors import UnspoolError
from unspool.forks import after_fork, make_lock
from unspool.kernels.cpu import Library
from unspool.kernels.cpu.library import CHUNK
from unspool.kernels.cpu.structures import CJob, CModel, CPacking, CSteps, CStore, point
from unspool.models.decoder.spec import DecoderSpec
from unspool.models.paths.library_keys import LibraryKeys
from unspool.models.paths.library_model import DescribedModel
from unspool.protocols import Choose, Forward, Want

_KEYS_AHEAD: Final = 1024  # positions by which working memory grows
TokenRange = tuple[int, int, int]  # a row, and the first and the last (exclusive) of its tokens
_NAMES: Final = (
    *("tokens", "positions", "own_rows", "own_places", "shared_rows", "shared_counts", "wanted", "bases", "firsts"),
    *("sources", "source_lengths"),
)
_NUM_FIRST: Final = _NAMES.index("sources")  # those before it stand side by side in a job


class StretchCall:
    """The arguments of a call that takes several steps, reused by the next one: building them costs more than a
    layer."""

    def __init__(self, num_rows: int, most_steps: int, vocab_size: int) -> None:
        self.num_rows, self.most_steps = num_rows, most_steps
        self.logits = torch.empty(num_rows, vocab_size)  # every step's in turn
        self._likeliest = (ctypes.c_int64 * num_rows)()
        self._chosen = (ctypes.c_int32 * (most_steps * num_rows))()
        self._numbers: list[Any] = [(ctypes.c_int32 * num_rows)() for _ in _NAMES]
        self._tokens, self._positions, self._own_rows, self._own_places, self._shared_rows, self._shared_counts = (
            self._numbers[:6]
        )
        self._numbers[6][:] = self._numbers[8][:] = range(num_rows)
        self._vocab_size = vocab_size
        self._ends: tuple[int, ...] = ()
        self._forbidden: tuple[int, ...] = ()
        self._num_close = ctypes.c_int64()
        addresses = [ctypes.addressof(numbers) for numbers in self._numbers]
        self.job = CJob(
            *(num_rows, num_rows, 0, 0, *addresses[:_NUM_FIRST], None),
            *(CStore(), CStore(), CPacking(), None),
            *(self.logits.data_ptr(), ctypes.addressof(self._likeliest)),
        )
        self.job.sources, self.job.source_lengths = addresses[_NUM_FIRST:]
        self.steps = CSteps(0, 0, None, *(addresses[place] for place in (0, 1, 3)), ctypes.addressof(self._chosen))

    def prepare(
        self,
        tokens: Sequence[int],
        span: Span,
        keys: LibraryKeys,
        scratch: int,
        ends: tuple[int, ...],
        forbidden: tuple[int, ...],
    ) -> None:
        """Set the rows' last tokens and the start of the span as the first step's input."""
        at = keys.addresses
        self.job.own, self.job.shared, self.job.packing, self.job.packed = at.own, at.shared, at.packing, at.packed
        self._numbers[7][:] = keys.bases or [0] * self.num_rows
        self._own_rows[:] = keys.own_rows
        if (sources := keys.sources) is not None:
            self.job.cross, self.job.most_source = sources.addresses.own, sources.longest
            self._numbers[_NUM_FIRST][:], self._numbers[_NUM_FIRST + 1][:] = sources.rows, sources.lengths
        self._shared_rows[:], self._shared_counts[:] = keys.shared_rows, keys.shared_counts
        if ends != self._ends:
            self._ends = ends
            self._kept_ends = self._list_tokens(ends)
            self.steps.num_ends, self.steps.ends = len(self._kept_ends), ctypes.addressof(self._kept_ends)
        if forbidden != self._forbidden:
            self._forbidden = forbidden
            kept = self._kept_forbidden = self._list_tokens(forbidden)
            self.job.num_forbidden, self.job.forbidden = len(kept), ctypes.addressof(kept)
        self._tokens[:], self._positions[:] = tokens, span.starts
        self._own_places[:] = [start - shared for start, shared in zip(span.starts, keys.shared_counts, strict=True)]
        self.job.most_keys, self.job.scratch, self.steps.num_steps = span.stop, scratch, span.num_new

    def _list_tokens(self, tokens: Sequence[int]) -> Any:
        known = [token for token in tokens if 0 <= token < self._vocab_size]
        return (ctypes.c_int32 * len(known))(*known)

    def run_without_logits(self, library: Library, model: CModel, *, has_sketch: bool) -> int:
        """Take the steps; with a sketch of the head nobody may read `logits`, and how many tokens it left is told."""
        self._num_close.value = 0
        self.job.num_close = ctypes.addressof(self._num_close) if has_sketch else None
        library.run_steps(ctypes.byref(model), self.job, self.steps, library.threads)
        self.job.num_close = None
        return self._num_close.value

    def go_on(self, tokens: Sequence[int]) -> None:
        """Set the tokens that were chosen as the next step's input."""
        self._tokens[:] = tokens
        self._positions[:] = [place + 1 for place in self._positions]
        self._own_places[:] = [place + 1 for place in self._own_places]

    def read(self) -> list[list[int]]:
        """The tokens of the steps that were taken, one list per row."""
        chosen, rows = self._chosen, self.num_rows
        return [chosen[first : first + rows] for first in range(0, self.steps.num_done * rows, rows)]


class LibraryCalls:
    """Makes the calls of one decoder; the working memory is one caller's at a time."""

    def __init__(self, spec: DecoderSpec, described: DescribedModel, library: Library) -> None:
        self._spec = spec
        self._described = described
        self._library = library
        self._lock = make_lock(self, "_lock")
        after_fork(self, LibraryCalls._begin_anew)
        self._left: list[Any] = []  # memory of calls that the process was forked in
        self._take_memory()

    def _begin_anew(self) -> None:
        """In a forked child: a thread that is not there may have been writing into the memory, or this one is."""
        self._left += [self._numbers, self._scratch, self._stretch]
        self._take_memory()

    def _take_memory(self) -> None:
        self._numbers = np.zeros((len(_NAMES), CHUNK), dtype=np.int32)
        self._number_rows = [int(row.ctypes.data) for row in self._numbers]
        self._scratch: torch.Tensor | None = None
        self._prepared: tuple[int, ...] = (
            0,
            0,
            0,
            0,
        )  # tokens, rows of the head, keys and threads that it has room for
        self._stretch: StretchCall | None = None
        self._briefs = threading.local()

    def forward(self, tokens: torch.Tensor, span: Span, keys: LibraryKeys, want: Want) -> Forward:
        """Read the tokens (rows, new), and write their keys where they belong; rows may have none of them."""
        rows, num_new = tokens.shape
        spec, wants_all = self._spec, want.logits == "all"
        shape = (rows, num_new, spec.vocab_size) if wants_all else (rows, spec.vocab_size)
        # What is wanted lies in order, unless rows have fewer tokens than others, or none.
        is_whole = min(span.counts) == num_new if wants_all else min(span.counts) > 0
        logits = (self._find_brief(shape) if want.is_brief else torch.empty(shape)) if is_whole else torch.zeros(shape)
        made = Forward(logits, path="library")
        if want.last_states:
            made.last_states = torch.empty(rows, num_new, spec.hidden_size)
        if want.early:
            made.early_logits = tuple(torch.zeros(shape) for _ in want.early)
        elif is_whole and want.finds_likeliest:
            made.likeliest = torch.empty(shape[:-1], dtype=torch.int64)
        num_tokens = min(CHUNK, sum(span.counts))
        with self._lock:
            model = self._described.reach(span.stop)
            self._prepare_scratch(model, num_tokens, num_tokens * (1 + len(want.early)), _count_keys(span, keys))
            if want.exit_layer is not None:
                model = self._described.take_first(want.exit_layer)
            sketch = self._described.sketch_head() if _asks_for_likeliest(want, num_new) and is_whole else None
            num_close = None if sketch is None else ctypes.c_int64()
            for ranges in self._cut(span):
                outputs = self._fill(ranges, tokens, span, keys, wants_all)
                self._run(model, ranges, outputs, span, keys, made, want.early if outputs else (), num_close)
            if sketch is not None and num_close is not None:
                made.logits = logits[:, :0]
                if not sketch.note_close(num_close.value, rows):
                    self._described.drop_sketch()
        return made

    def _find_brief(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Memory for logits that this thread's next pass may overwrite: the system need not hand out pages anew."""
        count, held = math.prod(shape), getattr(self._briefs, "logits", None)
        if held is None or held.numel() < count:
            held = self._briefs.logits = torch.empty(count)
        brief: torch.Tensor = held[:count].view(shape)
        return brief

    def take_steps(
        self,
        tokens: Sequence[int],
        span: Span,
        keys: LibraryKeys,
        ends: tuple[int, ...],
        choose: Choose | None = None,
        forbidden: tuple[int, ...] = (),
    ) -> list[list[int]]:
        """The tokens of up to `span.num_new` steps, one list of all rows' per step, from the rows' last tokens on: the
        likeliest ones that are not forbidden, or what `choose` makes of them."""
        rows = len(tokens)
        with self._lock:
            model = self._described.reach(span.stop)
            self._prepare_scratch(model, rows, rows, _count_keys(span, keys))
            call = self._stretch
            if call is None or call.num_rows != rows or call.most_steps < span.num_new:
                call = self._stretch = StretchCall(rows, span.num_new, self._spec.vocab_size)
            assert self._scratch is not None
            call.prepare(tokens, span, keys, self._scratch.data_ptr(), ends, forbidden)
            if choose is None:
                sketch = self._described.sketch_head()
                num_close = call.run_without_logits(self._library, model, has_sketch=sketch is not None)
                if sketch is not None and not sketch.note_close(num_close, rows * call.steps.num_done):
                    self._described.drop_sketch()
                return call.read()
            call.steps.num_steps = 1
            taken: list[list[int]] = []
            while True:
                self._library.run_steps(ctypes.byref(model), call.job, call.steps, self._library.threads)
                try:
                    chosen = choose(call.read()[0], call.logits)
                except UnspoolError:
                    if not taken:
                        raise
                    return taken  # what they chose goes first; the next step, taken again, says why it can't be
                taken.append(chosen)
                if len(taken) == span.num_new or any(token < 0 or token in ends for token in chosen):
                    return taken
                call.go_on(chosen)

    def _fill_step(self, tokens: Any, starts: Sequence[int], keys: LibraryKeys) -> None:
        """Write the numbers of a step of all rows into the table."""
        table, rows = self._numbers, len(starts)
        table[0, :rows] = tokens
        table[1, :rows] = starts
        table[2, :rows] = keys.own_rows
        table[4, :rows] = keys.shared_rows
        table[5, :rows] = keys.shared_counts
        table[3, :rows] = table[1, :rows] - table[5, :rows]
        table[6, :rows] = table[8, :rows] = range(rows)
        table[7, :rows] = 0 if keys.bases is None else keys.bases
        if keys.sources is not None:
            table[9, :rows], table[10, :rows] = keys.sources.rows, keys.sources.lengths

    def _prepare_scratch(self, model: CModel, num_tokens: int, num_read: int, most_keys: int) -> None:
        """Ensure that the working memory is large enough; it grows in steps, so that few tokens reallocate it."""
        needed = (num_tokens, num_read, -(-most_keys // _KEYS_AHEAD) * _KEYS_AHEAD)
        threads = self._library.threads  # another number may need more: work is shared out in another way
        have = self._prepared
        if (
            self._scratch is None
            or have[3] != threads
            or any(had < need for had, need in zip(have, needed, strict=False))
        ):
            wanted = (*map(max, have[:3], needed), threads)
            num_bytes = self._library.count_scratch(model, *wanted[:3])
            self._scratch = torch.empty(num_bytes, dtype=torch.uint8)
            self._prepared = wanted  # once it is there: memory may have run out

    def _cut(self, span: Span) -> list[list[TokenRange]]:
        """The rows' tokens in calls of at most CHUNK, in order: what a token reads is written before it."""
        calls: list[list[TokenRange]] = [[]]
        left = CHUNK
        for row, count in enumerate(span.counts):
            first = 0
            while first < count:
                if not left:
                    calls.append([])
                    left = CHUNK
                last = min(count, first + left)
                calls[-1].append((row, first, last))
                left -= last - first
                first = last
        return [call for call in calls if call]

    def _fill(
        self, ranges: Sequence[TokenRange], tokens: torch.Tensor, span: Span, keys: LibraryKeys, wants_all: bool
    ) -> list[tuple[int, int]]:
        """Write the numbers of a call's tokens into the table; which (row, place) each wanted one is."""
        if span.num_new == 1 and len(ranges) == len(span.counts):  # a step of all rows
            self._fill_step(tokens.reshape(-1).numpy(), span.starts, keys)
            return [(row, 0) for row in range(len(ranges))]
        each = np.array(ranges, dtype=np.int64)  # (ranges, 3)
        counts = each[:, 2] - each[:, 1]
        ends = np.cumsum(counts)
        num_tokens, rows = int(ends[-1]), np.repeat(each[:, 0], counts)
        begins = np.repeat(ends - counts, counts)  # where a token's range begins
        places = np.arange(num_tokens) - begins + np.repeat(each[:, 1], counts)  # of its row's tokens
        table = self._numbers[:, :num_tokens]
        shared = np.asarray(keys.shared_counts)[rows]
        table[0] = tokens.numpy()[rows, places]
        table[1] = np.asarray(span.starts)[rows] + places
        table[2] = np.asarray(keys.own_rows)[rows]
        table[3] = table[1] - shared
        table[4] = np.asarray(keys.shared_rows)[rows]
        table[5] = shared
        table[7] = 0 if keys.bases is None else np.asarray(keys.bases)[rows]
        table[8] = begins
        if keys.sources is not None:
            table[9], table[10] = np.asarray(keys.sources.rows)[rows], np.asarray(keys.sources.lengths)[rows]
        if wants_all:
            table[6] = range(num_tokens)
            return list(zip(rows.tolist(), places.tolist(), strict=True))
        is_last = each[:, 2] == np.asarray(span.counts)[each[:, 0]]
        wanted = ends[is_last] - 1
        self._numbers[6, : len(wanted)] = wanted
        return [(row, 0) for row in each[is_last, 0].tolist()]

    def _run(
        self,
        model: CModel,
        ranges: Sequence[TokenRange],
        outputs: Sequence[tuple[int, int]],
        span: Span,
        keys: LibraryKeys,
        forward: Forward,
        early: tuple[int, ...],
        num_close: ctypes.c_int64 | None,
    ) -> None:
        """Call the library for some ranges; `outputs` are the (row, place) of the logits that it makes. If the tokens
        that a sketch leaves are counted in `num_close`, it makes none."""
        logits, hidden = forward.logits, self._spec.hidden_size
        num_tokens = sum(last - first for _, first, last in ranges)
        wants_all, likeliest = logits.dim() == 3, forward.likeliest
        is_whole = not early and (min(span.counts) == span.num_new if wants_all else min(span.counts) > 0)
        made = logits.view(-1, self._spec.vocab_size)
        if is_whole and outputs:  # they follow each other: made where they belong
            row, place = outputs[0]
            first = row * span.num_new + place if wants_all else row
            made = made[first:]
            likeliest = likeliest.view(-1)[first:] if likeliest is not None else None
        elif not is_whole:
            made = torch.empty((1 + len(early)) * len(outputs), self._spec.vocab_size)
        final = torch.empty(num_tokens, hidden) if forward.last_states is not None else None
        early_states = torch.empty(len(early) * len(outputs), hidden) if early else None
        assert self._scratch is not None
        addresses, sources = keys.addresses, keys.sources
        job = CJob(
            num_tokens,
            len(outputs),
            span.stop,
            len(early),
            *self._number_rows[:_NUM_FIRST],
            ctypes.cast((ctypes.c_int32 * len(early))(*early), ctypes.c_void_p),
            *(addresses.own, addresses.shared, addresses.packing, addresses.packed),
            made.data_ptr(),
            likeliest.data_ptr() if likeliest is not None else None,
            point(early_states),
            point(final),
            sources.addresses.own if sources is not None else CStore(),
            *self._number_rows[_NUM_FIRST:],
            sources.longest if sources is not None else 0,
            *(0, None, None if num_close is None else ctypes.addressof(num_close)),
            self._scratch.data_ptr(),
        )
        self._library.run(ctypes.byref(model), ctypes.byref(job), self._library.threads)
        if not is_whole:
            for kept, part in zip(
                (logits, *(forward.early_logits or ())), torch.split(made, max(1, len(outputs))), strict=False
            ):
                for result, (row, place) in zip(part, outputs, strict=True):
                    (kept[row, place] if wants_all else kept[row]).copy_(result)
        if forward.last_states is not None and final is not None:
            at = 0
            for row, first, last in ranges:
                forward.last_states[row, first:last] = final[at : at + last - first]
                at += last - first


def _asks_for_likeliest(want: Want, num_new: int) -> bool:
    """Whether a pass over so many tokens of each row is to find the likeliest tokens that follow, and no more."""
    is_plain = not want.early and not want.last_states and want.exit_layer is None
    return want.likeliest_only and num_new == 1 and want.logits == "last" and is_plain


def _count_keys(span: Span, keys: LibraryKeys) -> int:
    """The most keys that a token reads: of its text, or of its source."""
    return span.stop if keys.sources is None else max(span.stop, keys.sources.longest)

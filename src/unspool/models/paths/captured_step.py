"""A captured step: its inputs on the device, the graphs that read them, and what it returns."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from unspool.cache.places import Places
from unspool.kernels.sending import send
from unspool.kernels.token_choice import ChoiceSizes
from unspool.models.decoder.spec import DecoderSpec
from unspool.models.paths.captured_shape import PassShape
from unspool.protocols import Forward, Want

if TYPE_CHECKING:
    from unspool.kernels.gpu.sampling.ends import PassEnd
    from unspool.kernels.gpu.sampling.epilogues import CapturedEpilogue
    from unspool.kernels.gpu.sampling.sketch import SketchedChoice
    from unspool.models.paths.captured_body import Body
    from unspool.models.paths.captured_sketch import CapturedSketch

UNIT: Final = 8  # numbers: addresses are multiples of this
LOGGED: Final = 64  # steps whose tokens a log holds
OFTEN: Final = 256  # steps after which graphs of several are captured: they repay it in about as many
_MOST_AT_ONCE: Final = 8  # steps of one graph
_NOT_THERE: Final = -1


class Sources(NamedTuple):
    """What an encoder's sources are to a pass: where their keys lie, and how many positions each has."""

    places: Places
    lengths: list[int]


class CapturedStep:
    """A step for a fixed number of rows: its inputs on the device, and the graphs that read them."""

    def __init__(
        self,
        spec: DecoderSpec,
        body: Body,
        device: torch.device,
        dtype: torch.dtype,
        shape: PassShape,
        sketch: CapturedSketch | None = None,  # of the head, if the pass is to read one
    ) -> None:
        from unspool.kernels.gpu.attention.packed_attention import (
            count_packed,  # Triton is imported only if a GPU is used
        )
        from unspool.kernels.gpu.sampling.tokens import count_tiles
        from unspool.models.paths.captured_body import StepInputs

        rows, num_logits = shape.rows, (1 + len(shape.early)) * shape.num_tokens
        size = shape.layout.count_entries(spec.num_layers, rows)
        if shape.packing is not None:
            size += count_packed(spec.num_layers, rows)
        elif shape.away:
            size += spec.num_layers
        # Outside inference mode, so that a step whose tokens alone are new need not enter it.
        with torch.inference_mode(False):
            tokens = torch.zeros(shape.num_tokens, dtype=torch.int64, device=device)
        with torch.inference_mode():
            table = torch.zeros(size, dtype=torch.int64, device=device)
            lengths = torch.full((rows,), _NOT_THERE, dtype=torch.int32, device=device)
            num_entries = spec.num_layers + 1 + rows if shape.rows_each else 0
            self._inputs = StepInputs(
                tokens=tokens,
                lengths=lengths,
                table=table,
                base=torch.zeros(UNIT, dtype=dtype, device=device),
                counts=table[-rows:] if shape.packing is not None else lengths,
                layout=shape.layout,
                sources=torch.zeros(num_entries, dtype=torch.int64, device=device),
            )
            self._sketched: SketchedChoice | None = None  # if there is one, there are no logits
            if sketch is not None and body.gives_head_input:
                self._sketched = sketch.make_choice(rows)
            vocab = spec.vocab_size if self._sketched is None else 0
            self._logits = torch.empty(num_logits, vocab, dtype=torch.float32, device=device)
            self._tops = torch.empty(rows, count_tiles(vocab), dtype=torch.float32, device=device)
            # A step's most likely tokens are the next one's input, if it is given no others.
            feeds = shape.num_new == 1 and (shape.epilogue is None or isinstance(shape.epilogue, ChoiceSizes))
            self._likeliest = self._inputs.tokens if feeds else torch.zeros(rows, dtype=torch.int64, device=device)
            self._fed: torch.Tensor | None = None  # those tokens, as they were handed out by the last run
            # Of how many tokens: the parts of what was read, of the logits and of the likeliest that are theirs.
            self._shown: tuple[int, torch.Tensor, torch.Tensor, torch.Tensor] | None = None
            self._log = torch.zeros(LOGGED, rows, dtype=torch.int64, device=device) if feeds else None
            self.num_logged, self.most_logged = 0, LOGGED
            self._body = body
            self._epilogue: CapturedEpilogue | None = None
            if shape.epilogue is not None:
                from unspool.kernels.gpu.sampling.epilogues import EpilogueSizes, make_epilogue

                sizes = EpilogueSizes(
                    rows,
                    shape.num_new,
                    len(shape.early),
                    self._body.states.shape[1],
                    spec.vocab_size,
                    2 * spec.num_kv_heads * spec.head_dim,
                )
                self._epilogue = make_epilogue(shape.epilogue, sizes, device)
        self.maker = threading.get_ident()
        self._rows, self._shape, self._num_layers = rows, shape, spec.num_layers
        self._cap = spec.logit_softcap
        self._places: weakref.ref[Places] | None = None  # what is in the table; an unused step holds no keys
        self._sources: tuple[weakref.ref[Places], list[int]] | None = None  # likewise
        self._lengths: list[int] = []  # the current lengths on the device
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}  # by the number of steps
        self._num_run, self._most_at_once = 0, _MOST_AT_ONCE

    def run(
        self,
        tokens: torch.Tensor,
        starts: Sequence[int],
        places: Places,
        want: Want,
        sources: Sources | None = None,
        num_steps: int = 0,
    ) -> Forward:
        """The result of the pass: logits (tokens, vocab) in float32, and what else its shape contains.

        With `num_steps` so many steps, each on the tokens of the one before, and what they chose alone (steps, rows).
        """
        shape, count = self._shape, len(starts) * self._shape.num_new
        is_known = self._places is not None and self._places() is places
        knows_sources = sources is None or self._has(sources)
        is_same = is_known and knows_sources and self._lengths == starts
        epilogue = self._epilogue
        is_fed = tokens is self._fed if epilogue is None else epilogue.holds(want.epilogue)
        has_inputs = epilogue is None or is_fed
        if not (is_same and has_inputs):
            with torch.inference_mode():
                if not is_known:
                    self._send_places(places)
                if not knows_sources:
                    assert sources is not None
                    self._send_sources(sources)
                if self._lengths != starts:
                    self._send_lengths(starts)
                if epilogue is not None and not is_fed:
                    epilogue.set_inputs(want.epilogue)
                if not self._graphs:
                    self._warm_up(starts)
                    self._graphs[1] = self._capture(1)
                    if epilogue is not None:
                        epilogue.set_inputs(want.epilogue)  # launches may have changed them
        if not is_fed:
            self._show(count)[0].copy_(tokens.reshape(-1))
        self._fed = None
        if num_steps:
            return Forward(self._logits, likeliest=self._run_several(starts, num_steps), path="captured")
        self._replay(1)
        is_advanced = shape.num_new == 1 or shape.is_forked
        self._lengths = [start + 1 for start in starts] if is_advanced else list(starts)
        if self._sketched is not None:
            return self._feed(count)
        logits, result = epilogue.take(len(starts)) if epilogue is not None else (None, None)
        if logits is not None:  # of the candidates that were kept, or until the next pass
            return Forward(logits, epilogue=result, path="captured")
        if want.is_brief and shape.num_new == 1 and not (shape.early or shape.wants_states or epilogue):
            return self._feed(count)
        _, shown, found = self._show(count)
        forward = Forward(shown.clone(), epilogue=result, path="captured")
        if shape.num_new == 1:
            forward.likeliest = found.clone()
        if shape.early and self._epilogue is None:
            layers = self._logits.view(-1, shape.num_tokens, self._logits.shape[1])[1:]
            forward.early_logits = tuple(layer[:count].clone() for layer in layers)
        if shape.wants_states:
            forward.last_states = self._body.states[:count].clone()
        return forward

    def _feed(self, count: int) -> Forward:
        """The result of a brief pass: logits and likeliest tokens where they are, these as the next one's input too."""
        _, logits, likeliest = self._show(count)
        self._fed = likeliest[:, None]  # another one in each run: whoever brings it has the last one's
        log = self if self._log is not None else None
        return Forward(logits, likeliest=likeliest, fed=self._fed, log=log, path="captured")

    def _show(self, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The parts of inputs, logits and likeliest that belong to so many tokens; kept for the next run."""
        if self._shown is None or self._shown[0] != count:
            self._shown = (count, self._inputs.tokens[:count], self._logits[:count], self._likeliest[:count])
        return self._shown[1:]

    def _run_several(self, starts: Sequence[int], num_steps: int) -> torch.Tensor:
        """Run so many steps: what they chose (steps, rows)."""
        assert self._log is not None
        self._replay(num_steps)
        self._lengths = [start + num_steps for start in starts]
        first = starts[0] % LOGGED
        if min(starts) == max(starts) and first + num_steps <= LOGGED:
            return self._log[first : first + num_steps, : len(starts)].clone()
        return self.read_log(self.num_logged, num_steps).t()

    def _replay(self, num_steps: int) -> None:
        """Replay the step, if it is run often by graphs of several: from one graph to the next the device does nothing
        for 4 to 5 µs."""
        self.num_logged += num_steps
        size = self._most_at_once if self._num_run >= OFTEN else 1
        self._num_run += num_steps
        while num_steps:
            while size > num_steps or not self._has_graph(size):
                size //= 2
            self._graphs[size].replay()
            num_steps -= size

    def _has_graph(self, num_steps: int) -> bool:
        """Whether there is a graph of so many steps, captured here if need be."""
        if num_steps not in self._graphs and num_steps <= self._most_at_once:
            from unspool.kernels.gpu.relaunching import OverlapError

            try:
                self._graphs[num_steps] = self._capture(num_steps)
            except OverlapError:
                self._most_at_once = 1
        return num_steps in self._graphs

    def read_log(self, last: int, count: int) -> torch.Tensor:
        """What `count` steps chose (rows, steps) for the rows of the last run; -1 where there was none."""
        assert self._log is not None and self.num_logged - last + count <= LOGGED
        rows = len(self._lengths)
        first = self._inputs.lengths[:rows, None] - (self.num_logged - last + count)
        lines = (first + torch.arange(count, dtype=torch.int32, device=first.device)).remainder(LOGGED)
        return self._log[:, :rows].gather(0, lines.long().t()).t()

    def _has(self, sources: Sources) -> bool:
        """Whether the device has the addresses of these sources."""
        known = self._sources
        return known is not None and known[0]() is sources.places and known[1] == sources.lengths

    def _send_sources(self, sources: Sources) -> None:
        entries = [*self._list_buffers(sources.places.buffers), *sources.lengths]
        self._inputs.sources.zero_()  # absent ones have no positions
        self._inputs.sources[: len(entries)].copy_(send(entries, self._inputs.sources.device))
        self._sources = (weakref.ref(sources.places), list(sources.lengths))

    def _send_places(self, places: Places) -> None:
        landing = places.landing if self._shape.away else None
        buffers, layers = list(places.buffers), places.packed.layers if places.packed is not None else []
        if landing is not None:
            brought = {layer: landing.pieces[nth % 2] for nth, layer in enumerate(landing.away)}
            if places.packed is None:
                buffers = [brought[layer][0] if layer in brought else held for layer, held in enumerate(buffers)]
            layers = [brought.get(layer, held) for layer, held in enumerate(layers)]
        entries = self._list_buffers(buffers)
        if landing is not None and places.packed is None:
            entries += self._list_buffers(places.buffers)[:-1]
        if places.rooms is not None:
            entries += places.rooms
        if places.branches:
            assert places.shared is not None and places.prompt_lengths is not None and places.ancestry is not None
            entries += [
                *self._list_buffers(places.shared),
                *self._list_index(places.ancestry),
                *places.prompt_lengths,
            ]
        if places.block_table is not None:
            entries += self._list_index(places.block_table)
        if places.packed is not None:
            from unspool.kernels.gpu.attention.packed_attention import list_packed

            packed = places.packed
            absent = [0] * (self._rows - len(packed.num_packed))
            entries += list_packed(self._inputs.base, layers, packed.num_places, [*packed.num_packed, *absent])
        if landing is not None and self._body.carrier is not None:
            num_positions = places.packed.num_places if places.packed is not None else buffers[0].shape[1]
            self._body.carrier.set_layers(self._inputs.base, landing.homes, landing.pieces, num_positions)
        self._inputs.table[: len(entries)].copy_(send(entries, self._inputs.table.device))
        self._places = weakref.ref(places)

    def _list_buffers(self, buffers: Sequence[torch.Tensor]) -> list[int]:
        base, unit = self._inputs.base.data_ptr(), UNIT * self._inputs.base.element_size()
        return [*((buffer.data_ptr() - base) // unit for buffer in buffers), buffers[0].shape[1]]

    def _list_index(self, index: torch.Tensor) -> list[int]:
        return [(index.data_ptr() - self._inputs.lengths.data_ptr()) // index.element_size(), index.shape[1]]

    def _send_lengths(self, starts: Sequence[int]) -> None:
        lengths = [*starts, *[_NOT_THERE] * (self._rows - len(starts))]
        self._inputs.lengths.copy_(send(lengths, self._inputs.lengths.device, torch.int32))

    def _warm_up(self, starts: Sequence[int]) -> None:
        """Launch the step twice: one-time setup of kernels and libraries must not be captured."""
        from unspool.kernels.gpu.launching import compile_ahead, wait_for_compilers

        wait_for_compilers()
        with compile_ahead():
            self.launch()
        self._send_lengths(starts)
        self.launch()
        self._send_lengths(starts)

    def _capture(self, num_steps: int) -> torch.cuda.CUDAGraph:
        from unspool.kernels.gpu.launching import start_alone

        graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for number in range(num_steps):
                with nullcontext() if number == 0 or self._body.starts_alone else start_alone():
                    self.launch()
        return graph

    def launch(self) -> None:
        """Launch the kernels of the step."""
        from unspool.kernels.gpu.sampling.captured_choice import CapturedChoice
        from unspool.kernels.gpu.sampling.tokens import take_highest

        if self._sketched is not None:
            given, lengths = self._body.run_to_head(self._inputs), self._inputs.lengths
            mask = self._epilogue.mask if isinstance(self._epilogue, CapturedChoice) else None
            self._sketched.choose(given, self._likeliest, lengths, self._cap, self._log, mask)
            return
        self._body.run(self._inputs, self._logits)
        own, lengths = self._logits[: self._shape.num_tokens], self._inputs.lengths
        if self._shape.num_new == 1 and self._epilogue is None:
            take_highest(own, self._tops, self._likeliest, lengths, self._cap, self._log)
            return
        if self._cap is not None:  # early logits have none
            own.div_(self._cap).tanh_().mul_(self._cap)
        if self._epilogue is not None:
            self._epilogue.finish(self._end_pass())
        elif self._shape.is_forked:  # one of the candidates will be kept
            lengths.add_(lengths.ge(0))

    def _end_pass(self) -> PassEnd:
        from unspool.kernels.gpu.sampling.ends import PassEnd

        inputs = self._inputs
        return PassEnd(
            logits=self._logits,
            likeliest=self._likeliest,
            tokens=inputs.tokens,
            states=self._body.states,
            lengths=inputs.lengths,
            log=self._log,
            base=inputs.base,
            table=inputs.table,
            num_layers=self._num_layers,
            unit=UNIT,
            layout=inputs.layout,
        )

"""An encoder's passes on a GPU, captured: some 150 launches of a source cost the host more than the GPU's work.

Sources are padded to one of a few lengths, and a graph is captured for each number of rows and padded length when it
occurs a second time; the first pass runs the same kernels one by one, so that both have the same bits. Lengths are read
on the device.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch

from unspool.forks import make_lock
from unspool.kernels.by_thread import note_keeper
from unspool.kernels.sending import send
from unspool.models.encoder_decoder.layers import EncoderDecoderWeights
from unspool.models.encoder_decoder.positions import DistanceBiases, PositionTable
from unspool.models.encoder_decoder.spec import EncoderDecoderSpec
from unspool.models.weights import TableLinear, find_addresses, iterate_tensors

if TYPE_CHECKING:
    from unspool.models.paths.encoder_body import EncoderBody

MOST_TOKENS: Final = 8192  # of a captured pass: with more, the GPU takes longer than the host
_FEWEST: Final = 16  # positions by which lengths are padded
_PARTS: Final = 8  # lengths between two powers of two
_MOST_KEPT: Final = 32  # graphs
_MOST_NOTED: Final = 1024  # shapes that occurred once

Key = tuple[int, int, bool, int]  # rows, padded length, whether no lengths are read because all of it is real, stream


def pad_length(length: int) -> int:
    """The length that sources are padded to."""
    step = max(_FEWEST, (1 << (length - 1).bit_length()) // 2 // _PARTS)
    return -(-length // step) * step


@dataclass(slots=True)
class _Captured:
    """A graph, its inputs and its output; the table of positions is kept because the graph has its address."""

    graph: torch.cuda.CUDAGraph
    given: torch.Tensor
    lengths: torch.Tensor | None
    states: torch.Tensor
    positions: torch.Tensor | None
    maker: int = field(default_factory=threading.get_ident)  # the thread


class CapturedEncoder:
    """The passes of one encoder."""

    def __init__(
        self,
        spec: EncoderDecoderSpec,
        weights: EncoderDecoderWeights,
        positions: PositionTable,
        biases: DistanceBiases | None,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._spec, self._stack, self._positions, self._distances = spec, weights.encoder, positions, biases
        self._device, self._dtype = device, dtype
        self._kept = list(iterate_tensors(weights.encoder))
        self._kept_at = find_addresses(self._kept)
        self._body: EncoderBody | None = None
        self._graphs: OrderedDict[Key, _Captured] = OrderedDict()
        self._pools: dict[int, Any] = {}  # of graphs that run one after the other: by stream
        self._noted: OrderedDict[Key, None] = OrderedDict()
        self._stream: torch.cuda.Stream | None = None
        self._lock = make_lock(self, "_lock")
        note_keeper(self)

    def forget_thread(self, thread: int) -> None:
        """Drop the graphs that a thread has captured, with their memory."""
        with self._lock:
            for key in [key for key, held in self._graphs.items() if held.maker == thread]:
                del self._graphs[key]
            streams = {key[3] for key in self._graphs}
            for stream in [stream for stream in self._pools if stream not in streams]:
                del self._pools[stream]  # torch takes none again that no graph has any more

    @torch.no_grad()
    def run(self, given: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """Final states (rows, longest, hidden) of tokens (rows, longest), or of features (rows, channels, frames)."""
        rows, features = len(lengths), self._spec.features
        longest = given.shape[1] if features is None else features.positions
        padded = pad_length(longest) if features is None else longest
        limit = self._spec.longest_source
        padded = padded if limit is None else max(longest, min(padded, limit))
        table = self._positions.reserve(padded)
        with self._lock, torch.cuda.device(self._device):
            self._follow_moves()
            is_whole = features is not None or (min(lengths) == padded and not self._open_body().reads_lengths)
            stream = torch.cuda.current_stream()
            key = (rows, padded, is_whole, stream.cuda_stream)
            held = self._graphs.get(key)
            if held is not None and held.positions is not table:
                held = None
            if held is None and (key not in self._noted or rows * padded > MOST_TOKENS):
                self._note(key)
                return self._run(*self._lay_out(given, lengths, padded, is_whole))[:, :longest]
            if held is None:
                held = self._capture(key, *self._lay_out(given, lengths, padded, is_whole), table)
            else:
                self._graphs.move_to_end(key)
                self._send(given, lengths, held)
            held.graph.replay()
            return held.states[:, :longest].clone()

    @torch.no_grad()
    def launch(self) -> None:
        """Launch the kernels of a pass over one source; its states need no memory for that."""
        features = self._spec.features
        length = _FEWEST if features is None else features.positions
        x = torch.empty(1, length, self._spec.hidden_size, dtype=self._dtype, device=self._device)
        lengths = torch.empty(1, dtype=torch.int32, device=self._device) if features is None else None
        self._open_body().run(x, lengths)

    def _lay_out(
        self, given: torch.Tensor, lengths: Sequence[int], padded: int, is_whole: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The inputs of a pass in memory of their own, padded."""
        if self._spec.features is not None:
            return given.to(self._device, self._dtype, copy=True), None
        tokens = torch.zeros(len(lengths), padded, dtype=torch.int64, device=self._device)
        tokens[:, : given.shape[1]] = given
        return tokens, None if is_whole else send(lengths, self._device, torch.int32)

    def _send(self, given: torch.Tensor, lengths: Sequence[int], held: _Captured) -> None:
        """Write a graph's inputs; what stands beyond a source are the tokens of another."""
        if self._spec.features is not None:
            held.given.copy_(given)
            return
        held.given[:, : given.shape[1]].copy_(given)
        if held.lengths is not None:
            held.lengths.copy_(send(lengths, self._device, torch.int32))

    def _run(self, given: torch.Tensor, lengths: torch.Tensor | None) -> torch.Tensor:
        """A pass, kernel by kernel."""
        stack, body = self._stack, self._open_body()
        if self._spec.features is not None:
            x = body.hear(given)
        else:
            assert stack.embedding is not None
            x = stack.embedding(given)
        length = x.shape[1]
        x = self._positions.add(x, torch.arange(length, device=self._device)[None], length)
        return body.run(x, lengths)

    def _open_body(self) -> EncoderBody:
        if self._body is None:
            from unspool.kernels.gpu.attention.prompt_attention import WIDTHS  # Triton is imported where a GPU is used
            from unspool.kernels.gpu.launching import is_hopper
            from unspool.models.paths.encoder_body import EncoderBody

            biases = [] if self._distances is None else self._distances.tabulate_around()
            has_kernel = is_hopper() and self._spec.encoder.head_dim in WIDTHS
            self._body = EncoderBody(self._spec, self._stack, biases, has_kernel=has_kernel)
        return self._body

    def _capture(
        self, key: Key, given: torch.Tensor, lengths: torch.Tensor | None, table: torch.Tensor | None
    ) -> _Captured:
        graph, here, beside = torch.cuda.CUDAGraph(), torch.cuda.current_stream(), self._open_stream()
        if len(self._graphs) >= _MOST_KEPT:
            self._graphs.popitem(last=False)
        beside.wait_stream(here)
        with torch.cuda.stream(beside):
            pool = self._pools.setdefault(key[3], torch.cuda.graph_pool_handle())
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                states = self._run(given, lengths)
            except BaseException:
                with suppress(Exception):  # what is captured is of no use: the first error counts
                    graph.capture_end()
                raise
            graph.capture_end()
        here.wait_stream(beside)
        made = self._graphs[key] = _Captured(graph, given, lengths, states, table)
        return made

    def _open_stream(self) -> torch.cuda.Stream:
        """The stream of all captures: each stream has a workspace of cuBLAS' own."""
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        return self._stream

    def _note(self, key: Key) -> None:
        """Remember that a shape has occurred."""
        self._noted[key] = None
        if len(self._noted) > _MOST_NOTED:
            self._noted.popitem(last=False)

    def _follow_moves(self) -> None:
        """Drop all graphs if weights have moved."""
        at = find_addresses(self._kept)
        if at != self._kept_at:
            self._kept_at = at
            self._graphs.clear()
            self._pools.clear()  # torch takes none again that no graph has any more
            self._body = None


def takes_encoder(spec: EncoderDecoderSpec, weights: EncoderDecoderWeights, dtype: torch.dtype) -> bool:
    """Whether our kernels run an encoder's passes: in float32 torch's operators are kept, as they are compared with."""
    if not weights.encoder.layers or dtype not in (torch.bfloat16, torch.float16):
        return False
    if isinstance(weights.encoder.layers[0].up, TableLinear):  # numbers would be looked up for each of its kernels
        return False
    from unspool.kernels.gpu.products.activations import CODES  # Triton is imported where a GPU is used

    return spec.activation in CODES and spec.encoder.head_dim % 8 == 0

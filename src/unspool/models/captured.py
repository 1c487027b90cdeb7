"""One decoding step on a GPU as one CUDA graph, for any cache of plain buffers and any lengths.

At a few rows the host's launches cost more than the work. So the whole step is captured once for a number of rows:
tokens, lengths and the addresses of the cache's buffers are read from the device, the lengths are advanced there, and
the likeliest token is found there too. A graph is made when a number of rows is first met, in some ten milliseconds
once Triton has its kernels, and it serves every later cache.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

import torch

from unspool.cache import Cache
from unspool.cache.places import Places
from unspool.models.layers import DecoderWeights
from unspool.models.spec import DecoderSpec
from unspool.protocols import Forward

if TYPE_CHECKING:
    from unspool.models.captured_blocks import Body

# A step is captured for so many rows; fewer rows ride along with some that are not there.
BUCKETS: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_MOST_KEPT: Final = 24  # steps that wait to be used again
_UNIT: Final = 8  # numbers: addresses are told as multiples of so many
_NOT_THERE: Final = -1
_SMALLEST_CAPABILITY: Final = (8, 0)


def explain_no_capture(spec: DecoderSpec, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why a model's steps can't be captured; None where they can."""
    if device.type != "cuda":
        return f"the model is on a device of type {device.type}"
    if find_spec("triton") is None:
        return "triton is not installed"
    if torch.cuda.get_device_capability(device) < _SMALLEST_CAPABILITY:
        return f"{torch.cuda.get_device_name(device)} is older than Ampere"
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"there are no kernels for {dtype}"
    if spec.alibi is not None and spec.alibi.is_rounded:
        return f"{spec.family} rounds its position biases key by key"
    if spec.head_dim % _UNIT:
        return f"heads of {spec.head_dim} numbers are not aligned"
    return None


class CapturedSteps:
    """The captured steps of a decoder: one for each bucket of rows, lent to one caller at a time."""

    def __init__(self, spec: DecoderSpec, weights: DecoderWeights, device: torch.device, dtype: torch.dtype) -> None:
        self._spec, self._weights, self._device, self._dtype = spec, weights, device, dtype
        self._waiting: dict[tuple[int, int, int], list[CapturedStep]] = {}  # by rows, branches and stream
        self._lock = threading.Lock()

    def explain_refusal(self, cache: Cache, rows: int) -> str | None:
        """Why a pass over this cache can't be a captured step; None where it can."""
        if rows > BUCKETS[-1]:
            return f"{rows} rows are more than the {BUCKETS[-1]} that steps are captured for"
        places = cache.places()
        if places is None:
            return f"a {type(cache).__name__} is not read by address"
        if len(places.buffers) != self._spec.num_layers:
            return "the cache has no buffers yet"
        first, device = places.buffers[0], self._weights.embedding.weight.device  # which has its number
        if first.device != device or first.dtype != self._dtype:
            return f"the cache is kept in {first.dtype} on {first.device}"
        if not first.is_contiguous():
            return "the cache's rows lie between others"
        return None

    def run(self, tokens: torch.Tensor, cache: Cache) -> Forward:
        """Read one token a row (rows, 1), and advance the cache."""
        rows = tokens.shape[0]
        starts = list(cache.lengths) or [0] * rows
        cache.advance(rows)
        places = cache.places()
        assert places is not None
        bucket = next(size for size in BUCKETS if size >= rows)
        with torch.cuda.device(self._device):
            # A step's inputs are written again for the next one, which only its own stream puts after this one's work.
            key = (bucket, places.branches, torch.cuda.current_stream().cuda_stream)
            step = self._borrow(key)
            logits, likeliest = step.run(tokens, starts, places)
        with self._lock:
            if sum(map(len, self._waiting.values())) >= _MOST_KEPT:
                self._waiting.clear()
            self._waiting.setdefault(key, []).append(step)
        return Forward(logits, likeliest=likeliest, path="captured")

    def _borrow(self, key: tuple[int, int, int]) -> CapturedStep:
        with self._lock:
            waiting = self._waiting.get(key)
            if waiting:
                return waiting.pop()
        rows, branches, _ = key
        return CapturedStep(self._spec, self._weights, self._device, self._dtype, rows, branches)


class CapturedStep:
    """A step for a fixed number of rows: its inputs on the device, and the graph that reads them."""

    def __init__(
        self,
        spec: DecoderSpec,
        weights: DecoderWeights,
        device: torch.device,
        dtype: torch.dtype,
        rows: int,
        branches: int,
    ) -> None:
        from unspool.kernels.gpu.tokens import count_tiles  # Triton is imported where a GPU is used
        from unspool.models.captured_blocks import StepInputs, make_body

        size = spec.num_layers + 1 + (spec.num_layers + 3 + rows if branches else 0)
        with torch.inference_mode():
            self._inputs = StepInputs(
                tokens=torch.zeros(rows, dtype=torch.int64, device=device),
                lengths=torch.full((rows,), _NOT_THERE, dtype=torch.int32, device=device),
                table=torch.zeros(size, dtype=torch.int64, device=device),
                base=torch.zeros(_UNIT, dtype=dtype, device=device),
                branches=branches,
            )
            self._logits = torch.empty(rows, spec.vocab_size, dtype=torch.float32, device=device)
            self._tops = torch.empty(rows, count_tiles(spec.vocab_size), dtype=torch.float32, device=device)
            self._likeliest = torch.zeros(rows, dtype=torch.int64, device=device)
            self._body: Body = make_body(spec, weights, device, dtype, rows)
        self._rows = rows
        self._cap = spec.logit_softcap
        self._places: Places | None = None  # what the table tells
        self._lengths: list[int] = []  # what the device's lengths are by now
        self._graph: torch.cuda.CUDAGraph | None = None

    def run(self, tokens: torch.Tensor, starts: Sequence[int], places: Places) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits (rows, vocab) in float32 and the likeliest tokens (rows,), for as many rows as there are tokens."""
        rows = len(starts)
        with torch.inference_mode():
            if places is not self._places:
                self._tell_places(places)
            if self._lengths != starts:
                self._tell_lengths(starts)
            self._inputs.tokens[:rows].copy_(tokens.view(-1))
            if self._graph is None:
                self._graph = self._capture(starts)
            self._graph.replay()
        self._lengths = [start + 1 for start in starts]
        return self._logits[:rows].clone(), self._likeliest[:rows].clone()

    def _tell_places(self, places: Places) -> None:
        told = self._tell_buffers(places.buffers)
        if places.branches:
            assert places.shared is not None and places.prompt_lengths is not None and places.ancestry is not None
            told += self._tell_buffers(places.shared)
            told.append((places.ancestry.data_ptr() - self._inputs.lengths.data_ptr()) // 4)
            told.append(places.ancestry.shape[1])
            told += places.prompt_lengths
        self._inputs.table[: len(told)].copy_(torch.tensor(told))
        self._places = places

    def _tell_buffers(self, buffers: Sequence[torch.Tensor]) -> list[int]:
        base, unit = self._inputs.base.data_ptr(), _UNIT * self._inputs.base.element_size()
        return [*((buffer.data_ptr() - base) // unit for buffer in buffers), buffers[0].shape[1]]

    def _tell_lengths(self, starts: Sequence[int]) -> None:
        told = [*starts, *[_NOT_THERE] * (self._rows - len(starts))]
        self._inputs.lengths.copy_(torch.tensor(told, dtype=torch.int32))

    def _capture(self, starts: Sequence[int]) -> torch.cuda.CUDAGraph:
        self._launch()  # what kernels and libraries set up once must not be captured
        self._tell_lengths(starts)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._launch()
        return graph

    def _launch(self) -> None:
        from unspool.kernels.gpu.tokens import take_highest

        self._body.run(self._inputs, self._logits)
        take_highest(self._logits, self._tops, self._likeliest, self._inputs.lengths, self._cap)

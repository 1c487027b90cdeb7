"""A Mamba's decoding step on a GPU as one CUDA graph.

A step reads the states in one set of buffers and writes them into another; the cache then swaps the two. So a graph
belongs to the addresses of both sets, and a cache needs two graphs. A step that is run twice changes nothing: kernels
are compiled and captured on the cache itself.
"""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from unspool.cache import Cache, MambaCache
from unspool.forks import make_lock
from unspool.kernels.by_thread import note_keeper
from unspool.kernels.presence import runs_kernels
from unspool.models.mamba.weights import MambaLayer, MambaSpec, MambaWeights
from unspool.models.weights import Linear, Norm, find_addresses, iterate_tensors
from unspool.protocols import Forward, Want

MOST_ROWS: Final = 64
_MOST_KEPT: Final = 8  # graphs
_FEW_ROWS: Final = 4  # up to this many, the small products are part of the kernels around them
_Buffers = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class CapturedStates:
    """The captured steps of a Mamba, lent to one caller at a time."""

    name = "captured"

    def __init__(
        self,
        spec: MambaSpec,
        weights: Any,  # a Mamba's or a Mamba-2's, as `make_work` takes them
        device: torch.device,
        dtype: torch.dtype,
        make_work: Callable[..., StateWork],
    ) -> None:
        self._spec, self._weights, self._device, self._dtype = spec, weights, device, dtype
        self._make_work = make_work
        self._steps: OrderedDict[tuple[int, ...], CapturedStateStep] = OrderedDict()
        self._addresses = find_addresses(iterate_tensors(weights))  # in the graphs
        self._seen: weakref.ref[MambaCache] | None = None  # the last pass's cache
        self._lock = make_lock(self, "_lock")
        note_keeper(self)

    def forget_thread(self, thread: int) -> None:
        """Drop the steps that a thread has captured, with their memory."""
        with self._lock:
            for key in [key for key, step in self._steps.items() if step.maker == thread]:
                del self._steps[key]

    def explain_refusal(
        self, tokens: torch.Tensor | None, cache: Cache, counts: Sequence[int] | None, want: Want
    ) -> str | None:
        """Why a pass can't be a captured step; None if it can."""
        if not runs_kernels(self._device):
            return f"there are no kernels for {self._device}"
        if self._dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"there are no kernels for {self._dtype}"
        if self._spec.activation not in ("silu", "swish"):
            return f"there is no kernel for {self._spec.activation}"
        if tokens is None or tokens.shape[1] != 1 or (counts is not None and min(counts) < 1):
            return "one token of every row is captured"
        if tokens.shape[0] > MOST_ROWS:
            return f"{tokens.shape[0]} rows are more than the {MOST_ROWS} that steps are captured for"
        if want.hidden_states or want.attentions or want.last_states or want.early or want.logits != "last":
            return "states beside the logits are wanted"
        if not isinstance(cache, MambaCache) or not cache.lengths or cache.is_trying:
            return "the states are tried, or not there yet"
        return None

    def run(self, tokens: torch.Tensor, cache: MambaCache) -> Forward:
        """Read one token per row, and advance the cache."""
        cache.begin(tokens.shape[0], 1, None, self._device)
        with torch.cuda.device(self._device), torch.inference_mode(), self._lock:
            self._follow_moves(cache)
            logits, likeliest = self._find_step(cache.list_buffers()).run(tokens)
        cache.end()
        return Forward(logits, likeliest=likeliest, path=self.name)

    def launch(self, cache: MambaCache) -> None:
        """Launch the kernels of a step over a cache."""
        buffers = cache.list_buffers()
        self._make_work(self._spec, self._weights, buffers, self._dtype).launch(buffers)

    def _follow_moves(self, cache: MambaCache) -> None:
        """Drop all captured steps if weights have moved; checked once per cache, because it costs host time."""
        if self._seen is not None and self._seen() is cache:
            return
        addresses = find_addresses(iterate_tensors(self._weights))
        if addresses != self._addresses:
            self._addresses = addresses
            self._steps.clear()
        self._seen = weakref.ref(cache)

    def _find_step(self, buffers: _Buffers) -> CapturedStateStep:
        stream = torch.cuda.current_stream().cuda_stream
        key = (buffers[0].shape[1], stream, *(buffer.data_ptr() for buffer in buffers))
        step = self._steps.pop(key, None)
        if step is None:
            step = CapturedStateStep(self._make_work(self._spec, self._weights, buffers, self._dtype), buffers)
        self._steps[key] = step
        while len(self._steps) > _MOST_KEPT:
            self._steps.popitem(last=False)
        return step


class StateWork(ABC):
    """The work of a step for one number of rows and one set of buffers, whose memory stays the cache's."""

    def __init__(self, spec: MambaSpec, weights: Any, buffers: _Buffers, dtype: torch.dtype) -> None:
        from unspool.kernels.gpu.sampling.tokens import count_tiles

        self._rows, self._device, self._dtype = buffers[0].shape[1], buffers[0].device, dtype
        self._spec, self._weights = spec, weights
        self.tokens = torch.zeros(self._rows, dtype=torch.int64, device=self._device)
        self.likeliest = torch.zeros_like(self.tokens)
        self.logits = self._make(spec.vocab_size, torch.float32)
        self._lengths = torch.zeros(self._rows, dtype=torch.int32, device=self._device)  # counted, and read by nobody
        self._tops = self._make(count_tiles(spec.vocab_size), torch.float32)
        self._x = self._make(spec.hidden_size, torch.float32 if spec.is_residual_float32 else dtype)
        self._normed = self._make(spec.hidden_size)

    def _make(self, width: int, kind: torch.dtype | None = None) -> torch.Tensor:
        """A workspace (rows, width)."""
        return torch.zeros(self._rows, width, dtype=kind or self._dtype, device=self._device)

    def launch(self, buffers: _Buffers) -> None:
        """Read `tokens`, write the next states, `logits` and the likeliest tokens."""
        from unspool.kernels.gpu.sampling.tokens import embed, take_highest

        weights, x = self._weights, self._x
        conv, next_conv, ssm, next_ssm = buffers
        embed(self.tokens, weights.embedding.weight, 1.0, x)
        for index, layer in enumerate(weights.layers):
            self._mix(layer, (conv[index], next_conv[index], ssm[index], next_ssm[index]))
        self._multiply_normed(weights.head, weights.final_norm, self.logits)
        take_highest(self.logits, self._tops, self.likeliest, self._lengths, None)

    def _multiply_normed(self, linear: Linear, norm: Norm, out: torch.Tensor) -> None:
        """A product of the normalised residual."""
        from unspool.kernels.gpu.products.norms import normalise
        from unspool.kernels.gpu.products.product import multiply

        assert norm.weight is not None
        if self._rows == 1:
            multiply(linear.operand, self._x, out, norm=norm.weight, eps=norm.eps, bias=linear.bias)
            return
        normalise(self._x, norm.weight, norm.eps, self._normed)
        multiply(linear.operand, self._normed, out, bias=linear.bias)

    @abstractmethod
    def _mix(self, layer: Any, states: _Buffers) -> None:
        """Add what a block makes of the residual to it; `states` are the layer's: windows and states, old and next."""


class MambaWork(StateWork):
    """A Mamba's step: four kernels a layer for one row, five for a few, else seven."""

    def __init__(
        self, spec: MambaSpec, weights: MambaWeights[MambaLayer], buffers: _Buffers, dtype: torch.dtype
    ) -> None:
        from unspool.kernels.gpu.state_projection import find_projection

        super().__init__(spec, weights, buffers, dtype)
        inner = spec.inner_size
        self._projected = self._make(2 * inner)
        self._gates = self._projected[:, inner:]
        self._u, self._read = self._make(inner, torch.float32), self._make(inner)
        self._rounded, self._chosen = self._make(inner), self._make(spec.time_rank + 2 * spec.state_size)
        self._time, self._times = self._make(spec.time_rank), self._make(inner)
        self._tiling = None
        if self._rows == 1:
            self._tiling = find_projection(weights.layers[0].project_in.weight)

    def _mix(self, layer: MambaLayer, states: _Buffers) -> None:
        from unspool.kernels.gpu.products.product import multiply
        from unspool.kernels.gpu.state_projection import project_and_convolve
        from unspool.kernels.gpu.state_step import convolve_step

        conv, next_conv, ssm, next_ssm = states
        space, first, norm = layer.space, layer.project_in, layer.norm
        if self._tiling is not None:
            assert norm.weight is not None
            project_and_convolve(
                first.weight,
                self._x,
                norm.weight,
                norm.eps,
                first.bias,
                conv,
                next_conv,
                space.conv,
                space.conv_bias,
                self._u,
                self._rounded,
                self._gates,
                self._tiling,
            )
        else:
            self._multiply_normed(first, norm, self._projected)
            convolve_step(self._projected, conv, next_conv, space.conv, space.conv_bias, self._u, self._rounded)
        multiply(layer.select.operand, self._rounded, self._chosen)
        self._feed(layer, ssm, next_ssm)
        multiply(layer.out.operand, self._read, self._x, bias=layer.out.bias, adds=True)

    def _feed(self, layer: MambaLayer, ssm: torch.Tensor, next_ssm: torch.Tensor) -> None:
        """Feed the states, and read from them."""
        from unspool.kernels.gpu.products.product import multiply
        from unspool.kernels.gpu.state_step import feed_step, feed_timed

        space, spec = layer.space, self._spec
        read = (space.decay, space.time_bias, space.skip, self._read, spec.select_eps)
        if self._rows <= _FEW_ROWS:
            feed_timed(self._gates, self._chosen, layer.time.operand, self._u, ssm, next_ssm, *read)
            return
        self._time.copy_(self._chosen[:, : spec.time_rank])
        multiply(layer.time.operand, self._time, self._times)
        feed_step(self._projected, self._chosen, self._times, self._u, ssm, next_ssm, *read)


class CapturedStateStep:
    """A step as a graph."""

    def __init__(self, work: StateWork, buffers: _Buffers) -> None:
        from unspool.kernels.gpu.launching import (
            compile_ahead,  # Triton is imported only if a GPU is used
            wait_for_compilers,
        )

        self._work, self.maker = work, threading.get_ident()
        wait_for_compilers()
        with compile_ahead():
            work.launch(buffers)
        work.launch(buffers)  # one-time setup of kernels and libraries must not be captured
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            work.launch(buffers)

    def run(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits (rows, vocab) float32 after tokens (rows, 1), and the likeliest tokens (rows,)."""
        self._work.tokens.copy_(tokens[:, 0])
        self._graph.replay()
        return self._work.logits.clone(), self._work.likeliest.clone()

"""A Mamba's decoding step on a GPU as one CUDA graph.

A step reads the states in one set of buffers and writes them into another; the cache then swaps the two. So a graph
belongs to the addresses of both sets, and a cache needs two graphs. A step that is run twice changes nothing: kernels
are compiled and captured on the cache itself.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

import torch

from unspool.cache import Cache, MambaCache
from unspool.kernels.presence import runs_kernels
from unspool.models.mamba.weights import MambaSpec, MambaWeights
from unspool.models.weights import find_addresses, iterate_tensors
from unspool.protocols import Forward, Want

MOST_ROWS: Final = 64
_MOST_KEPT: Final = 8  # graphs
_Buffers = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class CapturedStates:
    """The captured steps of a Mamba, lent to one caller at a time."""

    name = "captured"

    def __init__(self, spec: MambaSpec, weights: MambaWeights, device: torch.device, dtype: torch.dtype) -> None:
        self._spec, self._weights, self._device, self._dtype = spec, weights, device, dtype
        self._steps: OrderedDict[tuple[int, ...], CapturedStep] = OrderedDict()
        self._addresses = find_addresses(iterate_tensors(weights))  # in the graphs
        self._seen: weakref.ref[MambaCache] | None = None  # the last pass's cache
        self._lock = threading.Lock()

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
        if self._spec.select_eps is not None:
            return "there is no kernel for normalised time steps"
        if tokens is None or tokens.shape[1] != 1 or (counts is not None and min(counts) < 1):
            return "one token of every row is captured"
        if tokens.shape[0] > MOST_ROWS:
            return f"{tokens.shape[0]} rows are more than the {MOST_ROWS} that steps are captured for"
        if want.hidden_states or want.attentions or want.last_states or want.logits != "last":
            return "states beside the logits are wanted"
        if not isinstance(cache, MambaCache) or not cache.lengths or cache.is_trying:
            return "the states are tried, or not there yet"
        return None

    def run(self, tokens: torch.Tensor, cache: MambaCache) -> Forward:
        """Read one token per row, and advance the cache."""
        cache.begin(tokens.shape[0], 1, None, self._device)
        with torch.cuda.device(self._device), torch.inference_mode(), self._lock:
            self._follow_moves(cache)
            logits = self._find_step(cache.list_buffers()).run(tokens)
        cache.end()
        return Forward(logits, path=self.name)

    def _follow_moves(self, cache: MambaCache) -> None:
        """Drop all captured steps if weights have moved; checked once per cache, because it costs host time."""
        if self._seen is not None and self._seen() is cache:
            return
        addresses = find_addresses(iterate_tensors(self._weights))
        if addresses != self._addresses:
            self._addresses = addresses
            self._steps.clear()
        self._seen = weakref.ref(cache)

    def _find_step(self, buffers: _Buffers) -> CapturedStep:
        stream = torch.cuda.current_stream().cuda_stream
        key = (buffers[0].shape[1], stream, *(buffer.data_ptr() for buffer in buffers))
        step = self._steps.pop(key, None)
        if step is None:
            step = CapturedStep(self._spec, self._weights, buffers, self._dtype)
        self._steps[key] = step
        while len(self._steps) > _MOST_KEPT:
            self._steps.popitem(last=False)
        return step


class StateStep:
    """The work of a step for one number of rows and one set of buffers, whose memory stays the cache's."""

    def __init__(self, spec: MambaSpec, weights: MambaWeights, buffers: _Buffers, dtype: torch.dtype) -> None:
        rows, device = buffers[0].shape[1], buffers[0].device
        self._spec, self._weights = spec, weights

        def make(width: int, kind: torch.dtype = dtype) -> torch.Tensor:
            return torch.zeros(rows, width, dtype=kind, device=device)

        self.tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self.logits = make(spec.vocab_size, torch.float32)
        self._x = make(spec.hidden_size, torch.float32 if spec.is_residual_float32 else dtype)
        self._normed, self._projected = make(spec.hidden_size), make(2 * spec.inner_size)
        self._u, self._rounded = make(spec.inner_size, torch.float32), make(spec.inner_size)
        self._chosen = make(spec.time_rank + 2 * spec.state_size)
        self._time, self._times = make(spec.time_rank), make(spec.inner_size)
        self._read = make(spec.inner_size)

    def launch(self, buffers: _Buffers) -> None:
        """Read `tokens`, write the next states and `logits`."""
        from unspool.kernels.gpu.products.norms import normalise
        from unspool.kernels.gpu.products.product import multiply
        from unspool.kernels.gpu.state_step import convolve_step, feed_step

        spec, weights, x = self._spec, self._weights, self._x
        conv, next_conv, ssm, next_ssm = buffers
        x.copy_(weights.embedding(self.tokens))
        for index, layer in enumerate(weights.layers):
            space = layer.space
            assert layer.norm.weight is not None
            normalise(x, layer.norm.weight, layer.norm.eps, self._normed)
            multiply(layer.project_in.operand, self._normed, self._projected, bias=layer.project_in.bias)
            convolve_step(
                self._projected,
                conv[index],
                next_conv[index],
                space.conv,
                space.conv_bias,
                self._u,
                self._rounded,
            )
            multiply(layer.select.operand, self._rounded, self._chosen)
            time = self._chosen[:, : spec.time_rank]
            if len(time) > 1:  # one row's numbers lie together as they are
                time = self._time.copy_(time)
            multiply(layer.time.operand, time, self._times)
            feed_step(
                self._projected,
                self._chosen,
                self._times,
                self._u,
                ssm[index],
                next_ssm[index],
                space.decay,
                space.time_bias,
                space.skip,
                self._read,
            )
            multiply(layer.out.operand, self._read, x, bias=layer.out.bias, adds=True)
        assert weights.final_norm.weight is not None
        normalise(x, weights.final_norm.weight, weights.final_norm.eps, self._normed)
        multiply(weights.head.operand, self._normed, self.logits, bias=weights.head.bias)


class CapturedStep:
    """A step as a graph."""

    def __init__(self, spec: MambaSpec, weights: MambaWeights, buffers: _Buffers, dtype: torch.dtype) -> None:
        from unspool.kernels.gpu.launching import compile_ahead  # Triton is imported only if a GPU is used

        self._step = StateStep(spec, weights, buffers, dtype)
        with compile_ahead():
            self._step.launch(buffers)
        self._step.launch(buffers)  # one-time setup of kernels and libraries must not be captured
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._step.launch(buffers)

    def run(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits (rows, vocab) float32 after tokens (rows, 1)."""
        self._step.tokens.copy_(tokens[:, 0])
        self._graph.replay()
        return self._step.logits.clone()

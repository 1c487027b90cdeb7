"""Compiling a decoder's kernels while its weights are still being read.

Kernels are compiled for dtypes, sizes and alignments. So a decoder whose tensors have no memory is enough to compile
the first step of one row, and what a prompt runs through.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

import torch

from unspool.kernels.presence import has_triton, runs_kernels
from unspool.models.decoder.layers import DecoderWeights
from unspool.models.decoder.spec import DecoderSpec
from unspool.models.paths.captured import CapturedStep, explain_no_capture
from unspool.models.paths.captured_shape import PassShape

META = torch.device("meta")


def prepare_decoder(
    spec: DecoderSpec, device: torch.device, dtype: torch.dtype, assemble: Callable[[], DecoderWeights]
) -> None:
    """Start compiling a decoder's kernels in threads of their own; `assemble` makes its weights on the meta device."""
    if device.type != "cuda" or not has_triton() or not runs_kernels(device):
        return
    threading.Thread(target=_prepare, args=(spec, device, dtype, assemble), name="unspool kernels", daemon=True).start()


def _prepare(
    spec: DecoderSpec, device: torch.device, dtype: torch.dtype, assemble: Callable[[], DecoderWeights]
) -> None:
    with suppress(Exception), torch.cuda.device(device):  # whoever launches a kernel first compiles it then
        from unspool.kernels.gpu.launching import compile_beside  # Triton is imported beside the reading of weights

        weights = assemble()
        compile_beside(lambda: _launch_prompt(spec, weights, dtype))
        if explain_no_capture(spec, weights, device, dtype) is None:
            compile_beside(lambda: _launch_step(spec, weights, dtype))


def _launch_prompt(spec: DecoderSpec, weights: DecoderWeights, dtype: torch.dtype, num_new: int = 16) -> None:
    """The kernels between the products of a prompt's pass (`PlainPass`)."""
    from unspool.kernels.gpu.attention.rotating import rotate_heads_
    from unspool.kernels.gpu.products.activations import CODES
    from unspool.kernels.gpu.products.gating import gate

    if dtype == torch.float32:
        return
    heads, kv_heads = spec.num_heads, spec.num_kv_heads
    if spec.rope is not None:
        qkv = torch.empty(1, num_new, heads + 2 * kv_heads, spec.head_dim, dtype=dtype, device=META)
        factors = torch.empty(1, num_new, 1, len(spec.rope.frequencies), dtype=torch.complex64, device=META)
        rotate_heads_(qkv[:, :, : heads + kv_heads], factors, is_halved=weights.layers[0].is_halved)
    if spec.is_gated and spec.activation in CODES:
        up = torch.empty(num_new, 2 * spec.ffn_size, dtype=dtype, device=META)
        gate(up, CODES[spec.activation], up.new_empty(num_new, spec.ffn_size))


def _launch_step(spec: DecoderSpec, weights: DecoderWeights, dtype: torch.dtype) -> None:
    """A step of one row over a plain cache."""
    from unspool.models.paths.captured_blocks import make_body

    shape = PassShape(rows=1)
    CapturedStep(spec, make_body(spec, weights, META, dtype, shape), META, dtype, shape).launch()

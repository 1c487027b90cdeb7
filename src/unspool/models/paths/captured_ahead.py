"""Compiling a model's kernels while its weights are still being read.

Kernels are compiled for dtypes, sizes and alignments. So a model whose tensors have no memory is enough to compile what
a decoder's prompt runs through, and the first step of one row.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Final, Protocol, runtime_checkable

import torch
import torch.nn.functional as F

from unspool.forks import after_fork, make_lock
from unspool.kernels.attention import attend
from unspool.kernels.compiler_process import COMPILERS, has_cached_kernels
from unspool.kernels.preparations import announce_preparation, end_preparation
from unspool.kernels.presence import has_triton, runs_kernels
from unspool.models.decoder.layers import DecoderWeights
from unspool.models.decoder.spec import DecoderSpec
from unspool.models.paths.captured import explain_no_capture
from unspool.models.paths.captured_shape import PassShape
from unspool.models.paths.captured_sketch import can_sketch_captured, make_sketch
from unspool.models.paths.captured_step import CapturedStep

META: Final = torch.device("meta")
_WARM_TOKENS: Final = 64
_lock = make_lock(sys.modules[__name__], "_lock")
_importing: list[threading.Thread] = []  # what runs once, when Triton is asked for
_is_imported: threading.Event = threading.Event()  # Triton itself is, or can't be
_prepared: set[Hashable] = set()


def _end_waits(_module: object) -> None:
    """In a forked child: what was being imported there never will be."""
    global _is_imported
    _is_imported = threading.Event()
    _is_imported.set()


after_fork(sys.modules[__name__], _end_waits)


@runtime_checkable
class StepModel(Protocol):
    """A model whose step can be launched on the meta device."""

    def launch_step(self) -> None:
        """Launch the kernels of a step of one row."""


def start_triton(device: torch.device) -> None:
    """Start importing Triton and our kernels, if a GPU is to be used: a second, which CUDA's own start hides."""
    if device.type != "cuda" or not has_triton():
        return
    with _lock:
        if not _importing:
            if not has_cached_kernels():  # otherwise it is started if a kernel is missing
                COMPILERS.start()
            _importing.append(threading.Thread(target=_import_kernels, name="unspool kernels", daemon=True))
            _importing[-1].start()


def await_triton() -> None:
    """Wait until an import of Triton that was started has ended. While it goes on, a thread that imports a part of
    Triton first can leave both with half of it: Python ends one of two imports that wait for each other."""
    if _importing:
        _is_imported.wait()


def _import_kernels() -> None:
    try:
        with suppress(Exception):
            importlib.import_module("triton")
    finally:
        _is_imported.set()
    with suppress(Exception):  # the import that needs them raises again
        importlib.import_module("unspool.models.paths.captured_blocks")
        importlib.import_module("triton.experimental.gluon.nvidia.hopper")  # imported when a first kernel is launched


def prepare_decoder(
    spec: DecoderSpec,
    device: torch.device,
    dtype: torch.dtype,
    assemble: Callable[[], DecoderWeights],
    *,
    is_shared: bool,
) -> None:
    """Start compiling a decoder's kernels in threads of their own, once; `assemble` makes weights on the meta device.

    `is_shared` says that they are those of an object, which have another order.
    """

    def compile_all() -> None:
        weights = assemble()
        can_capture = explain_no_capture(spec, weights, device, dtype) is None
        compile_beside = _await_compiler()
        if not is_shared:  # an object's own forward has loaded them, or will
            threading.Thread(target=_start_libraries, args=(spec, device, dtype), daemon=True).start()
        compile_beside(lambda: _launch_prompt(spec, weights, dtype))
        if can_capture:
            compile_beside(lambda: _launch_step(spec, weights, dtype))

    _prepare((spec, device, dtype, is_shared), device, compile_all)


def prepare_step(key: Hashable, device: torch.device, build: Callable[[], object]) -> None:
    """Start compiling the kernels of a step in threads of their own, once for a key.

    `build` makes the model on the meta device; nothing is compiled for one that is no `StepModel`.
    """

    def compile_all() -> None:
        model = build()
        if isinstance(model, StepModel):
            _await_compiler()(model.launch_step)

    _prepare((key, device), device, compile_all)


def _prepare(key: Hashable, device: torch.device, compile_all: Callable[[], None]) -> None:
    """Run something in a thread of its own, once for a key. Launches wait until it has ended."""
    start_triton(device)
    if key in _prepared or not runs_kernels(device):
        return
    _prepared.add(key)
    announced = announce_preparation()

    def run() -> None:
        try:
            with suppress(Exception), torch.cuda.device(device):  # whoever launches a kernel first compiles it then
                compile_all()
        finally:
            end_preparation(announced)

    threading.Thread(target=run, name="unspool kernels", daemon=True).start()


def _await_compiler() -> Callable[[Callable[[], object]], None]:
    """What compiles beside, once Triton and our kernels are imported."""
    for thread in _importing:
        thread.join()
    from unspool.kernels.gpu.launching import compile_beside

    return compile_beside


def _start_libraries(spec: DecoderSpec, device: torch.device, dtype: torch.dtype) -> None:
    """Let torch load what a prompt's first operators need: a fifth of a second, while weights are read."""
    with suppress(Exception), torch.cuda.device(device), torch.inference_mode():
        heads, kv_heads, width = spec.num_heads, spec.num_kv_heads, spec.head_dim
        x = torch.zeros(_WARM_TOKENS, heads * width, dtype=dtype, device=device)
        queries = F.linear(F.rms_norm(x, x.shape[-1:], x[0]), x.new_zeros(heads * width, heads * width))
        keys = x.new_zeros(1, kv_heads, _WARM_TOKENS, width)
        attend(queries.view(1, -1, heads, width).transpose(1, 2), keys, keys, scale=1.0, is_causal=True)
        F.embedding(x.new_zeros(1, 1, dtype=torch.int64), x).float().argmax(-1)


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
    """A step of one row over a plain cache of a few keys."""
    from unspool.models.paths.captured_blocks import make_body
    from unspool.models.paths.captured_parted import list_limits

    shape = PassShape(rows=1, most_keys=min(list_limits(spec, weights, dtype), default=0))
    sketches = [make_sketch(weights.head)] if can_sketch_captured(weights.head) else []
    for sketch in (None, *sketches):
        CapturedStep(spec, make_body(spec, weights, META, dtype, shape), META, dtype, shape, sketch).launch()

"""A decoder whose steps run through torch.compile: for users who accept the compile time, if nothing faster exists.

Everything else (prompts, passes that return all layers' states, kinds of cache without plain buffers) is the decoder's
own pass, and `Forward.path_reason` says why.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, Final

import torch

from unspool.config import CompileConfig
from unspool.errors import SettingError, UnsupportedError
from unspool.kernels.presence import has_triton
from unspool.models.decoder.head import check_positions
from unspool.models.decoder.layers import DecoderWeights
from unspool.models.decoder.spec import DecoderSpec
from unspool.models.paths.compiled_step import StepFunction
from unspool.models.paths.path import ALL_LAYERS, EMBEDDINGS, Pass
from unspool.models.weights import TableLinear, WordRows, iterate_tensors
from unspool.protocols import Forward

MOST_NEW: Final = 16  # tokens per row
_STRIDE: Final = 256  # positions by which the keys in view grow
# Forms of keys that the compiled step does not read, and steps that would not be compiled ones.
UNREAD: Final = frozenset({"branches", "forks", "stretches"})


def explain_no_compile(spec: DecoderSpec, weights: DecoderWeights) -> str | None:
    """Why a decoder's step can't be compiled; None if it can."""
    if isinstance(weights.embedding, WordRows) or isinstance(weights.layers[0].up, WordRows | TableLinear):
        return "these weights are quantised for our own kernels on a GPU (quantize=None keeps plain numbers)"
    if spec.mixture is not None:
        return f"{spec.family} chooses experts by the numbers it computes, which a compiled step can't follow"
    if spec.alibi is not None and spec.alibi.is_rounded:
        return f"{spec.family} rounds its position biases key by key, and a compiler leaves roundings out"
    return None


class CompiledSteps:
    """The compiled steps of a decoder: one function for each set of layers to read."""

    name = "compiled"

    def __init__(
        self,
        spec: DecoderSpec,
        weights: DecoderWeights,
        device: torch.device,
        dtype: torch.dtype,
        config: CompileConfig,
    ) -> None:
        self._spec, self._weights, self._device, self._dtype = spec, weights, device, dtype
        self._arguments = _read_arguments(config, device)
        self._is_marked = config.dynamic is None
        self._functions: dict[tuple[tuple[int, ...], int | None], Callable[..., Any]] = {}
        self._known: list[torch.Tensor] = []  # the buffers whose sizes are marked

    def _explain_refusal(self, new: Pass) -> str | None:
        """Why a pass can't be a compiled step; None if it can."""
        tokens, cache, want = new.tokens, new.cache, new.want
        if tokens is None:
            return EMBEDDINGS
        if want.hidden_states or want.attentions:
            return ALL_LAYERS
        rows, num_new = tokens.shape
        if (num_new > 1) != (want.logits == "all") or num_new > MOST_NEW or (want.early and num_new > 1):
            return f"{num_new} tokens a row are read; compiled are one, and drafts of up to {MOST_NEW - 1}"
        places = cache.places()
        if places is None or not places.is_plain or cache.first_fork is not None:
            return f"a {type(cache).__name__} does not keep its keys in plain buffers"
        if len(places.buffers) != self._spec.num_layers:
            return "the cache has no buffers yet"
        first = places.buffers[0]
        if first.device.type != self._device.type or first.dtype != self._dtype or first.shape[0] != rows:
            return f"the cache keeps {first.shape[0]} rows in {first.dtype} on {first.device}"
        return None

    def run(self, new: Pass) -> Forward | str:
        """Read tokens (rows, new), and advance the cache; or why this can't be a compiled step."""
        if (refusal := self._explain_refusal(new)) is not None:
            return refusal
        tokens, cache, counts, want = new.tokens, new.cache, new.counts, new.want
        assert tokens is not None
        rows, num_new = tokens.shape
        starts = list(cache.lengths) or [0] * rows
        stop = max(starts) + num_new
        check_positions(self._spec, self._weights, stop)
        cache.begin(rows, num_new, counts, self._device)
        cache.end()
        places = cache.places()
        assert places is not None
        buffers = places.buffers
        ahead = torch.arange(num_new)
        positions = (torch.tensor(starts)[:, None] + ahead).to(self._device, non_blocking=True)
        num_keys = min(-(-stop // _STRIDE) * _STRIDE, buffers[0].shape[1])
        keys = torch.arange(num_keys, device=self._device)
        self._mark(keys, buffers)
        function = self._function(tuple(want.early), want.exit_layer)
        logits, states, early = self._call(function, tokens.contiguous(), positions, keys, buffers)
        return Forward(
            logits if want.logits == "all" else logits[:, -1],
            last_states=states if want.last_states else None,
            early_logits=early or None,
            path="compiled",
        )

    def _mark(self, keys: torch.Tensor, buffers: list[torch.Tensor]) -> None:
        """Mark the sizes that change, so that the first graph serves them all, and the tensors that never move."""
        if self._is_marked:
            torch._dynamo.maybe_mark_dynamic(keys, 0)
        if len(buffers) == len(self._known) and all(a is b for a, b in zip(buffers, self._known, strict=True)):
            return
        self._known = list(buffers)
        for buffer in buffers:
            if self._is_marked:
                torch._dynamo.maybe_mark_dynamic(buffer, 1)
            self._pin(buffer)

    def _pin(self, tensor: torch.Tensor) -> None:
        """Mark a tensor as static for CUDA graphs, so that it is not copied before every step."""
        if self._device.type == "cuda":
            torch._dynamo.mark_static_address(tensor, guard=False)

    def _function(self, early: tuple[int, ...], exit_layer: int | None) -> Callable[..., Any]:
        key = (early, exit_layer)
        if key not in self._functions:
            step = StepFunction(
                self._spec, self._weights, self._device, self._dtype, early=early, exit_layer=exit_layer
            )
            for tensor in iterate_tensors(self._weights):
                self._pin(tensor)
            self._functions[key] = torch.compile(_copy_run(step), **self._arguments)
        return self._functions[key]

    def _call(self, function: Callable[..., Any], *inputs: Any) -> tuple[torch.Tensor, torch.Tensor, Any]:
        if self._device.type == "cuda":
            torch.compiler.cudagraph_mark_step_begin()
        try:
            logits, states, early = function(*inputs)
        except torch._dynamo.exc.TorchDynamoException as error:
            cause = getattr(error, "inner_exception", error)  # a backend's own error
            message = " ".join(str(cause).split())[:200]
            raise UnsupportedError(
                f"torch.compile could not compile this step ({type(cause).__name__}: {message}); leave out "
                "compile_config, or try another backend"
            ) from error
        if self._device.type != "cuda":
            return logits, states, early
        # A graph's next run overwrites these results.
        return logits.clone(), states.clone(), tuple(each.clone() for each in early)


def _copy_run(step: StepFunction) -> Callable[..., Any]:
    """The step's `run` with its own code object: torch counts compilations per code object, and models share them."""
    function = StepFunction.run
    own = types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
    return types.MethodType(own, step)


def _read_arguments(config: CompileConfig, device: torch.device) -> dict[str, Any]:
    """The arguments of torch.compile, checked against this machine."""
    arguments: dict[str, Any] = {"fullgraph": config.fullgraph, "dynamic": config.dynamic, "backend": config.backend}
    if config.backend != "inductor":  # modes are inductor's
        if isinstance(config.backend, str):
            _check_backend(config.backend)
        return arguments | ({"options": dict(config.options)} if config.options else {})
    _check_compiler(device)
    modes = torch._inductor.list_mode_options()
    mode = config.mode or "default"
    if mode not in modes:
        raise SettingError(f"CompileConfig(mode={mode!r:.60}) is not known to inductor; use one of {', '.join(modes)}")
    if not config.options:
        return arguments | {"mode": mode}
    known = torch._inductor.list_options()
    for name in config.options:
        if name.replace("-", "_") not in known:
            raise SettingError(f"CompileConfig(options=…) has {name!r:.60}, which inductor does not know")
    return arguments | {"options": {**modes[mode], **config.options}}  # torch takes a mode or options, not both


def _check_backend(name: str) -> None:
    known = torch._dynamo.list_backends(exclude_tags=())
    if name not in known:
        raise SettingError(f"CompileConfig(backend={name!r:.60}) is not known to torch; use one of {', '.join(known)}")


def _check_compiler(device: torch.device) -> None:
    """Raise if the compiler that inductor needs is missing."""
    if device.type == "cuda":
        if not has_triton():
            raise UnsupportedError(
                "compile_config asks for inductor, which writes Triton for a GPU, and triton is not installed; "
                "install it (pip install triton), or leave out compile_config"
            )
        return
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise UnsupportedError(
            "compile_config asks for inductor, which writes C++ for a CPU, and there is no C++ compiler here; install "
            "one (g++ or clang++, or name it in the variable CXX), or leave out compile_config"
        ) from error

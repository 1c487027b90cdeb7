"""Mamba-2 (Dao and Gu, 2024): heads with one decay each, and one convolution over their inputs, B and C."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from unspool.cache import MambaCache
from unspool.kernels.activations import find_activation
from unspool.kernels.head_scan import scan_heads
from unspool.kernels.scan import convolve
from unspool.models.assembly import Assembler, Progress
from unspool.models.decoder.spec import NormSpec
from unspool.models.mamba.model import Mamba, normalise, replay
from unspool.models.mamba.second_weights import Mamba2Layer, Mamba2Spec, Mamba2Weights
from unspool.models.mamba.weights import StateSpace
from unspool.models.native import ModelConfig
from unspool.models.paths.captured_heads import HeadWork
from unspool.models.paths.captured_states import CapturedStates
from unspool.models.weights import Embedding, Linear, WeightSource


class Mamba2(Mamba):
    """A decoder of Mamba-2 blocks."""

    spec: Mamba2Spec
    weights: Mamba2Weights

    def __init__(
        self,
        spec: Mamba2Spec,
        weights: Mamba2Weights,
        config: Mapping[str, Any],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(spec, weights, config, device, dtype)
        self.config = _normalise(spec, config)

    def _refresh(self) -> None:
        self._activate = find_activation(self.spec.activation)
        self._captured = CapturedStates(self.spec, self.weights, self.device, self.dtype, HeadWork)

    @property
    def _layers(self) -> Sequence[Mamba2Layer]:
        return self.weights.layers

    def _mix(
        self, index: int, layer: Any, x: torch.Tensor, cache: MambaCache, past_end: torch.Tensor | None
    ) -> torch.Tensor:
        """What a block adds to the residual: (rows, new, hidden)."""
        assert isinstance(layer, Mamba2Layer)
        spec, space = self.spec, layer.space
        inner, bands = spec.inner_size, spec.num_groups * spec.state_size
        gate, inputs, time = torch.split(layer.project_in(x), [inner, spec.conv_size, spec.num_heads], dim=-1)
        mixed = self._activate(convolve(cache.extend(index, inputs), space.conv, space.conv_bias)).float()
        u, b, c = torch.split(mixed, [inner, bands, bands], dim=-1)
        b, c = (
            part.view(*part.shape[:2], spec.num_groups, spec.state_size) for part in (b.contiguous(), c.contiguous())
        )
        dt = F.softplus(time.float() + space.time_bias).clamp(spec.least_time, spec.most_time)
        if past_end is not None:
            dt = dt.masked_fill(past_end, 0.0)  # a step of no time leaves the state as it is
        y, state = scan_heads(cache.state(index), dt, space.decay, u, b, c)
        cache.next_state(index).copy_(state)
        cache.keep_inputs(index, (dt, u, b), partial(replay, scan_heads, space.decay))
        y = y + u * space.skip.repeat_interleave(inner // spec.num_heads)
        return layer.out(layer.gated_norm(y * self._activate(gate.float())).to(self.dtype))


def _normalise(spec: Mamba2Spec, config: Mapping[str, Any]) -> ModelConfig:
    sizes = {"num_heads": spec.num_heads, "head_dim": spec.inner_size // spec.num_heads, "n_groups": spec.num_groups}
    return normalise(spec, {**config, **sizes, "conv_size": spec.conv_size})


def assemble_mamba2(
    spec: Mamba2Spec,
    source: WeightSource,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress | None = None,
) -> Mamba2Weights:
    """Copy a checkpoint's tensors into a Mamba-2's buffers."""
    assembler = Assembler(source, device, dtype, progress=progress)
    embedding = Embedding(assembler.matrix("backbone.embeddings.weight", spec.vocab_size, spec.hidden_size))
    weights = Mamba2Weights(
        embedding=embedding,
        layers=[_assemble_layer(assembler, spec, f"backbone.layers.{index}.") for index in range(spec.num_layers)],
        final_norm=assembler.norm("backbone.norm_f", spec.hidden_size, NormSpec("rms", spec.eps)),
        head=Linear(embedding.weight)
        if spec.is_head_tied
        else assembler.linear(["lm_head"], [spec.vocab_size], spec.hidden_size, has_bias=False),
    )
    assembler.check_all_used(["lm_head.weight"] if spec.is_head_tied else [])
    return weights


def _assemble_layer(assembler: Assembler, spec: Mamba2Spec, start: str) -> Mamba2Layer:
    def read(name: str, *shape: int) -> torch.Tensor:
        return assembler.take(f"{start}mixer.{name}", *shape, dtype=torch.float32)

    def linear(name: str, outputs: int, inputs: int) -> Linear:
        return assembler.linear([f"{start}mixer.{name}"], [outputs], inputs, has_bias=spec.has_bias)

    inner, channels, heads = spec.inner_size, spec.conv_size, spec.num_heads
    conv = read("conv1d.weight", channels, 1, spec.kernel_size)
    return Mamba2Layer(
        norm=assembler.norm(f"{start}norm", spec.hidden_size, NormSpec("rms", spec.eps)),
        project_in=linear("in_proj", inner + channels + heads, spec.hidden_size),
        space=StateSpace(
            decay=-torch.exp(read("A_log", heads)) * math.log2(math.e),
            skip=read("D", heads),
            time_bias=read("dt_bias", heads),
            conv=conv.view(channels, spec.kernel_size).t().contiguous(),
            conv_bias=read("conv1d.bias", channels) if spec.has_conv_bias else None,
        ),
        gated_norm=assembler.norm(f"{start}mixer.norm", inner, NormSpec("rms", spec.eps)),
        out=linear("out_proj", spec.hidden_size, inner),
    )

"""Mamba's description, its weights, and their assembly from a checkpoint."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from unspool.models.assembly import Assembler, Progress
from unspool.models.decoder.spec import NormSpec
from unspool.models.weights import Embedding, Linear, Norm, WeightSource

LayerT = TypeVar("LayerT")  # a block's weights


@dataclass(frozen=True, slots=True)
class MambaSpec:
    """A Mamba: sizes, which biases there are, and the residual's dtype."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    inner_size: int
    state_size: int
    kernel_size: int  # inputs that the convolution reads
    time_rank: int
    eps: float
    activation: str = "silu"
    has_bias: bool = False  # of the projections in and out
    has_conv_bias: bool = True
    is_residual_float32: bool = True
    is_head_tied: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None
    family: str = "mamba"
    select_eps: float | None = None  # time step, B and C are normalised, as Falcon-Mamba does


@dataclass(frozen=True, slots=True)
class MambaNames:
    """A checkpoint's names of a Mamba's weights, without .weight and .bias; `{i}` is the layer."""

    embedding: str
    layer: str
    norm: str
    project_in: str
    conv: str
    select: str
    time: str
    decay: str
    skip: str
    out: str
    final_norm: str
    head: str
    has_decay_log: bool  # decays are stored as log(-decay)
    has_flat_conv: bool  # the convolution is stored (inner, kernel), without an axis for groups


@dataclass(slots=True)
class StateSpace:
    """The recurrence's parameters, in float32 for every model dtype: errors would accumulate over the whole text."""

    decay: torch.Tensor  # (state, inner), or (heads,) in a Mamba-2: log2(e) times the rate, below 0
    skip: torch.Tensor  # (inner,) or (heads,): the skip connection's weight
    time_bias: torch.Tensor  # (inner,) or (heads,)
    conv: torch.Tensor  # (kernel, channels): inner, or in a Mamba-2 also those of B and C
    conv_bias: torch.Tensor | None  # (channels,)
    is_float32: bool = True


@dataclass(slots=True)
class MambaLayer:
    """One block's weights."""

    norm: Norm
    project_in: Linear  # the convolution's inputs and the gate
    select: Linear  # time step, B and C
    time: Linear
    space: StateSpace
    out: Linear


@dataclass(slots=True)
class MambaWeights(Generic[LayerT]):
    """All weights of a Mamba, or of a Mamba-2, whose blocks are others."""

    embedding: Embedding
    layers: list[LayerT]
    final_norm: Norm
    head: Linear


def assemble_mamba(
    spec: MambaSpec,
    names: MambaNames,
    source: WeightSource,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress | None = None,
) -> MambaWeights[MambaLayer]:
    """Copy a checkpoint's tensors into a Mamba's buffers."""
    assembler = Assembler(source, device, dtype, progress=progress)
    embedding = Embedding(assembler.matrix(f"{names.embedding}.weight", spec.vocab_size, spec.hidden_size))
    weights = MambaWeights(
        embedding=embedding,
        layers=[_assemble_layer(assembler, spec, names, i) for i in range(spec.num_layers)],
        final_norm=assembler.norm(names.final_norm, spec.hidden_size, NormSpec("rms", spec.eps)),
        head=Linear(embedding.weight)
        if spec.is_head_tied
        else assembler.linear([names.head], [spec.vocab_size], spec.hidden_size, has_bias=False),
    )
    assembler.check_all_used([f"{names.head}.weight"] if spec.is_head_tied else [])
    return weights


def _assemble_layer(assembler: Assembler, spec: MambaSpec, names: MambaNames, index: int) -> MambaLayer:
    start, inner = names.layer.format(i=index), spec.inner_size

    def linear(name: str, outputs: int, inputs: int, has_bias: bool = False) -> Linear:
        return assembler.linear([start + name], [outputs], inputs, has_bias=has_bias)

    return MambaLayer(
        norm=assembler.norm(start + names.norm, spec.hidden_size, NormSpec("rms", spec.eps)),
        project_in=linear(names.project_in, 2 * inner, spec.hidden_size, spec.has_bias),
        select=linear(names.select, spec.time_rank + 2 * spec.state_size, inner),
        time=linear(names.time, inner, spec.time_rank),
        space=_assemble_space(assembler, spec, names, start),
        out=linear(names.out, spec.hidden_size, inner, spec.has_bias),
    )


def _assemble_space(assembler: Assembler, spec: MambaSpec, names: MambaNames, start: str) -> StateSpace:
    inner = spec.inner_size

    def read(name: str, *shape: int) -> torch.Tensor:
        return assembler.take(start + name, *shape, dtype=torch.float32)

    conv = read(f"{names.conv}.weight", *((inner,) if names.has_flat_conv else (inner, 1)), spec.kernel_size)
    decay = read(names.decay, inner, spec.state_size)
    rates = -torch.exp(decay) if names.has_decay_log else decay
    return StateSpace(
        decay=(rates * math.log2(math.e)).t().contiguous(),
        skip=read(names.skip, inner),
        time_bias=read(f"{names.time}.bias", inner),
        conv=conv.view(inner, spec.kernel_size).t().contiguous(),
        conv_bias=read(f"{names.conv}.bias", inner) if spec.has_conv_bias else None,
    )
